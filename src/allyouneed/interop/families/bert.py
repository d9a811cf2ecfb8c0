"""BERT (Devlin et al. 2019), and what its relatives share with it: `encoder` and `config_fields` for configs, `BODY`,
`normalize_names` and `restore_names` for weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.position_offset import model_without_offset, without_offset
from allyouneed.interop.hf.transforms import is_headless, untie_if_different
from allyouneed.interop.hf.weight_table import EquivalentModel, Family, HfConfig, TensorTransform, Weights

IGNORED_KEYS = ("directionality", "output_past", "pooler_*")
DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}


def learned(config: ConfigReader, offset: int = 0) -> Tree:
    """A position table whose first `offset` rows are unused."""
    return {"kind": "learned", "length": config["max_position_embeddings"] - offset, "offset": offset}


def head(
    config: ConfigReader, vocabulary: Tree, hidden: str, dropout: str = "classifier_dropout", **others: Tree
) -> Tree:
    """The head of their class: `BertForMaskedLM`, …; none for a headless class.

    `hidden`: the activation of the layer before the classifier; `others`: heads that only this family has.
    """
    labelled = {"labels": len(config.get("id2label") or "01"), "dropout": config.get(dropout)}
    heads = {
        "ForMaskedLM": vocabulary,
        "ForSequenceClassification": {"kind": "classes", "hidden": hidden} | labelled,
        "ForTokenClassification": {"kind": "tags"} | labelled,
        **others,
    }
    name = (config.get("architectures") or ["ForMaskedLM"])[0]
    headless = name.endswith("Model") and not name.endswith("LMHeadModel")
    known = (
        {"Model": {"kind": "none"}} if headless else {end: tree for end, tree in heads.items() if name.endswith(end)}
    )
    if not known:
        config.problems.append(f"architectures: {name!r} is not supported (allowed: …Model, …{', …'.join(heads)})")
    return next(iter(known.values()), vocabulary)


def encoder(config: ConfigReader, positions: Tree, mixer: Tree | None = None, inner: int | None = None) -> Tree:
    """BERT's tree with these positions, other options in its mixer, and token vectors of width `inner`."""
    if positions["kind"] != "none":
        config.require("position_embedding_type", "absolute")
    norm = {"kind": "layer", "eps": config["layer_norm_eps"]}
    activation, tied = config.activation("hidden_act"), config["tie_word_embeddings"]
    if inner is not None and not tied:
        config.problems.append(
            "tie_word_embeddings: False is not supported where embedding_size differs from hidden_size"
        )
    attention = {
        "kind": "attention",
        "heads": config["num_attention_heads"],
        "dropout": config["attention_probs_dropout_prob"],
    }
    return {
        "kind": "encoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "dropout": config["hidden_dropout_prob"],
        "norm": norm,
        "embed": {
            "positions": positions,
            "scale": "none",
            "tied": tied,
            "types": config["type_vocab_size"],
            "norm": norm,
            "inner": inner,
        },
        "encoder": [
            {
                "repeat": config["num_hidden_layers"],
                "mixer": attention | (mixer or {}),
                "channel": {"kind": "ffn", "hidden": config["intermediate_size"], "activation": activation},
            }
        ],
        "head": {"kind": "vocabulary", "bias": True, "transform": {"activation": activation, "norm": norm}},
    }


def config_fields(ours: ModelTree, name: str) -> Tree:
    """BERT's config for our encoder; `name`: the prefix of its classes."""
    found = {
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("encoder"),
        "num_attention_heads": ours["encoder.mixer.heads"],
        "intermediate_size": ours["encoder.channel.hidden"],
        "hidden_act": ours.activation("encoder.channel.activation"),
        "hidden_dropout_prob": ours.get("dropout", 0.0),
        "attention_probs_dropout_prob": ours.get("encoder.mixer.dropout", 0.0),
        "type_vocab_size": ours.get("embed.types", 1),
        "layer_norm_eps": ours["norm.eps"],
        "tie_word_embeddings": ours.get("embed.tied", True),
    }
    return found | head_fields(ours, name)


def head_fields(ours: ModelTree, name: str, dropout: str = "classifier_dropout", masks: str = "ForMaskedLM") -> Tree:
    """Their class for our head, and its labels."""
    ends = {masks: "vocabulary", "ForSequenceClassification": "classes", "ForTokenClassification": "tags"}
    found: Tree = {"architectures": [name + (ours.hf_name("head.kind", ends | {"Model": "none"}) or "")]}
    labels = ours.get("head.labels")
    if labels is not None:
        found |= label_fields(labels)
    if ours.get("head.dropout") is not None:
        found[dropout] = ours["head.dropout"]
    return found


def label_fields(count: int) -> Tree:
    """Default label names; those of the task, if any, replace them."""
    names = [f"LABEL_{number}" for number in range(count)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def position_fields(ours: ModelTree) -> dict[str, Any]:
    """The rows of the position table; an offset is `pad_token_id` + 1 unused rows."""
    offset = ours.get("embed.positions.offset", 0)
    found = {"max_position_embeddings": (ours["embed.positions.length"] or 0) + offset}
    return found | ({"pad_token_id": offset - 1} if offset else {})


BODY = """
embed.tokens.weight = bert.embeddings.word_embeddings.weight
embed.positions.weight = bert.embeddings.position_embeddings.weight
embed.types.weight = bert.embeddings.token_type_embeddings.weight
embed.norm.* = bert.embeddings.LayerNorm.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.query.* + SELF.key.* + SELF.value.*
encoder.blocks.{n}.sublayers.mixer.out.* = bert.encoder.layer.{n}.attention.output.dense.*
encoder.blocks.{n}.sublayers.channel.up.* = bert.encoder.layer.{n}.intermediate.dense.*
encoder.blocks.{n}.sublayers.channel.down.* = bert.encoder.layer.{n}.output.dense.*
encoder.blocks.{n}.wiring.norms.0.* = bert.encoder.layer.{n}.attention.output.LayerNorm.*
encoder.blocks.{n}.wiring.norms.1.* = bert.encoder.layer.{n}.output.LayerNorm.*
""".replace("SELF", "bert.encoder.layer.{n}.attention.self")

HEAD = """
head.weight = cls.predictions.decoder.weight
head.bias = cls.predictions.bias
head.transform.linear.* = cls.predictions.transform.dense.*
head.transform.norm.* = cls.predictions.transform.LayerNorm.*
"""

CLASSES = """
head.classes.* = classifier.out_proj.*
head.hidden.* = classifier.dense.*
head.tags.* = classifier.*
"""


def body(config: HfConfig) -> str:
    """The prefix of the encoder in files of a model with a head."""
    return {"big_bird": "bert."}.get(config["model_type"], f"{config['model_type']}.")


def tied(config: HfConfig) -> bool:
    return bool(config.get("tie_word_embeddings", True))


def normalize_names(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Old files name a norm's weight `gamma` and its bias `beta`; those of a headless model omit the prefix. An untied
    head has two biases and uses the second, which old files omit."""
    prefix = "" if any(name.startswith(body(config)) for name in weights) else body(config)
    old = {".gamma": ".weight", ".beta": ".bias"}
    named = {prefix + re.sub(r"\.(gamma|beta)$", lambda end: old[end[0]], name): w for name, w in weights.items()}
    tokens = f"{body(config)}embeddings.word_embeddings.weight"
    heads = [name for name in named if name.endswith((".decoder.weight", "_lm_head.weight", "vocab_projector.weight"))]
    for head in heads:
        config = untie_if_different(config, named, head, tokens)
    if not tied(config):
        first = {name.replace(".decoder.weight", ""): name for name in heads if name.endswith(".decoder.weight")}
        named = {f"{name}.decoder.bias": named[f"{name}.bias"] for name in first if f"{name}.bias" in named} | named
    return config, named


def restore_names(pooler: Mapping[str, str]) -> Callable[[HfConfig, Weights], tuple[HfConfig, Weights]]:
    """Inverse of `normalize_names`. `pooler`: end of a class name -> the pooler that class requires; ours has none, so
    it is written as zeros."""

    def restore(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
        found = {**weights}
        for name in [name for name in found if name.endswith(".decoder.bias")]:
            found.setdefault(name.replace(".decoder.bias", ".bias"), found[name].clone())
        architecture = (config.get("architectures") or [""])[0]
        width, like = config.get("hidden_size", 0), next(iter(weights.values()))
        for end, name in pooler.items():
            if architecture.endswith(end) and f"{name}.weight" not in found:
                found |= {f"{name}.weight": like.new_zeros(width, width), f"{name}.bias": like.new_zeros(width)}
        if is_headless(config):
            found = {name.removeprefix(body(config)): tensor for name, tensor in found.items()}
        return config, found

    return restore


def untied_bias(lines: str, head: str) -> Callable[[HfConfig], str]:
    """The table of a family whose untied head (under `head`) uses the second of its two biases."""
    other = lines.replace(f"head.bias = {head}.bias", f"head.bias = {head}.decoder.bias")
    return lambda config: lines if tied(config) else other


IGNORED_WEIGHTS = ("*.position_ids", "cls.predictions.decoder.*")  # buffers and copies of tied matrices
PRESERVED_WEIGHTS = ("*.pooler.*", "cls.seq_relationship.*", "cls.predictions.bias")  # used by other heads only


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    config.require("uniem_embedding_strategy", "last_mean")  # M3E: mean pooling, as ours
    terms = config.map_value("position_embedding_type", RELATIVE_TERMS, "absolute")
    found = encoder(config, learned(config)) if terms is None else relative_encoder(config, terms)
    return found | {"head": head(config, found["head"], "tanh", ForPreTraining=found["head"])}


RELATIVE_TERMS = {"absolute": None, "relative_key": "key", "relative_key_query": "key-query"}


def relative_encoder(config: ConfigReader, terms: str) -> Tree:
    """Shaw's positions in every layer, a vector for each distance that can occur, and none in the embedding."""
    most = config["max_position_embeddings"]
    positions = {"kind": "shaw", "distance": most - 1, "values": False, "terms": terms}
    return encoder(config, {"kind": "none"}, {"positions": positions})


def hf_config(ours: ModelTree) -> Tree:
    if ours.get("encoder.mixer.positions.kind") == "shaw":
        names = {terms: name for name, terms in RELATIVE_TERMS.items()}
        positions = {"position_embedding_type": names.get(ours["encoder.mixer.positions.terms"])}
        positions["max_position_embeddings"] = ours["encoder.mixer.positions.distance"] + 1
        return config_fields(ours, "Bert") | positions
    return config_fields(ours, "Bert") | position_fields(ours)


POOLER = """
encoder.blocks.{n}.sublayers.mixer.relative.keys_table.weight = DISTANCES |reversed
head.hidden.* = bert.pooler.dense.*
head.classes.* = classifier.*
head.tags.* = classifier.*
"""
DISTANCES = "bert.encoder.layer.{n}.attention.self.distance_embedding.weight"  # query minus key; ours: key minus query
FAMILY = Family(
    "bert",
    tree,
    untied_bias(BODY + HEAD + POOLER.replace("DISTANCES", DISTANCES), "cls.predictions"),
    IGNORED_WEIGHTS,
    {"reversed": TensorTransform(lambda table, config: table.flip(0), lambda table, config: table.flip(0))},
    prepare=normalize_names,
    preserve=(*PRESERVED_WEIGHTS, "bert.embeddings.position_embeddings.weight"),  # stored beside relative positions
    hf_config=hf_config,
    finish=restore_names({"BertModel": "bert.pooler.dense"}),
    equivalent=EquivalentModel(without_offset, model_without_offset),
)
