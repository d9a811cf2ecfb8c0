"""BERT (Devlin et al. 2019), and what its relatives have in common with it: `encoder` and `words` for configs, `BODY`,
`renamed` and `named_back` for weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.position_offset import from_the_first, with_places_from_the_first
from allyouneed.interop.hf.transforms import bare, unless_tied
from allyouneed.interop.hf.weight_table import Alike, Family, Theirs, Weights

HARMLESS = ("directionality", "output_past", "pooler_*")
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


def learned(config: Reader, offset: int = 0) -> Tree:
    """A table of places, of which the first `offset` rows are never used."""
    return {"kind": "learned", "length": config["max_position_embeddings"] - offset, "offset": offset}


def head(config: Reader, vocabulary: Tree, hidden: str, dropout: str = "classifier_dropout", **others: Tree) -> Tree:
    """What stands on the encoder, by the name of their class: `BertForMaskedLM`, … ; a bare model has no head.

    `hidden`: the activation of the layer before classes; `others`: heads that only this family has.
    """
    said = {"labels": len(config.get("id2label") or "01"), "dropout": config.get(dropout)}
    heads = {
        "ForMaskedLM": vocabulary,
        "ForSequenceClassification": {"kind": "classes", "hidden": hidden} | said,
        "ForTokenClassification": {"kind": "tags"} | said,
        **others,
    }
    name = (config.get("architectures") or ["ForMaskedLM"])[0]
    bare = name.endswith("Model") and not name.endswith("LMHeadModel")
    known = {"Model": {"kind": "none"}} if bare else {end: tree for end, tree in heads.items() if name.endswith(end)}
    if not known:
        config.problems.append(f"architectures: {name!r} is not known here (…Model, …{', …'.join(heads)} are)")
    return next(iter(known.values()), vocabulary)


def encoder(config: Reader, positions: Tree, mixer: Tree | None = None, inner: int | None = None) -> Tree:
    """BERT's tree with these positions, other words in its mixer, and token vectors of a width `inner`."""
    config.only("position_embedding_type", "absolute")
    norm = {"kind": "layer", "eps": config["layer_norm_eps"]}
    activation, tied = config.activation("hidden_act"), config["tie_word_embeddings"]
    if inner is not None and not tied:
        config.problems.append("tie_word_embeddings: False is not known here where embedding_size is not hidden_size")
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


def words(said: Said, name: str) -> Tree:
    """BERT's words for an encoder of ours, whose classes begin with this name."""
    found = {
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("encoder"),
        "num_attention_heads": said["encoder.mixer.heads"],
        "intermediate_size": said["encoder.channel.hidden"],
        "hidden_act": said.activation("encoder.channel.activation"),
        "hidden_dropout_prob": said.get("dropout", 0.0),
        "attention_probs_dropout_prob": said.get("encoder.mixer.dropout", 0.0),
        "type_vocab_size": said.get("embed.types", 1),
        "layer_norm_eps": said["norm.eps"],
        "tie_word_embeddings": said.get("embed.tied", True),
    }
    return found | head_words(said, name)


def head_words(said: Said, name: str, dropout: str = "classifier_dropout", masks: str = "ForMaskedLM") -> Tree:
    """Their class for what stands on our encoder, and how many labels it has."""
    ends = {masks: "vocabulary", "ForSequenceClassification": "classes", "ForTokenClassification": "tags"}
    found: Tree = {"architectures": [name + (said.word("head.kind", ends | {"Model": "none"}) or "")]}
    labels = said.get("head.labels")
    if labels is not None:
        found |= label_words(labels)
    if said.get("head.dropout") is not None:
        found[dropout] = said["head.dropout"]
    return found


def label_words(count: int) -> Tree:
    """Names for so many labels; those of the task, where it has some, are written over them."""
    names = [f"LABEL_{number}" for number in range(count)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def places(said: Said) -> dict[str, Any]:
    """The rows of a table of places; those before the first are as many as the number of the padding token and one."""
    offset = said.get("embed.positions.offset", 0)
    found = {"max_position_embeddings": (said["embed.positions.length"] or 0) + offset}
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


def body(config: Theirs) -> str:
    """What the encoder is called in the files of a model with a head."""
    return {"big_bird": "bert."}.get(config["model_type"], f"{config['model_type']}.")


def tied(config: Theirs) -> bool:
    return bool(config.get("tie_word_embeddings", True))


def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Old files call a norm's weight `gamma` and its bias `beta`; those of a bare model do not say what it is called.
    An untied head has two biases and uses the second, which old files leave out."""
    alone = "" if any(name.startswith(body(config)) for name in weights) else body(config)
    old = {".gamma": ".weight", ".beta": ".bias"}
    named = {alone + re.sub(r"\.(gamma|beta)$", lambda end: old[end[0]], name): w for name, w in weights.items()}
    tokens = f"{body(config)}embeddings.word_embeddings.weight"
    heads = [name for name in named if name.endswith((".decoder.weight", "_lm_head.weight", "vocab_projector.weight"))]
    for head in heads:
        config = unless_tied(config, named, head, tokens)
    if not tied(config):
        first = {name.replace(".decoder.weight", ""): name for name in heads if name.endswith(".decoder.weight")}
        named = {f"{name}.decoder.bias": named[f"{name}.bias"] for name in first if f"{name}.bias" in named} | named
    return config, named


def named_back(pooler: Mapping[str, str]) -> Callable[[Theirs, Weights], tuple[Theirs, Weights]]:
    """The way back. `pooler`: the end of a class's name -> the pooler it has though nothing here was trained with it;
    it is written as zeros."""

    def undone(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
        found = {**weights}
        for name in [name for name in found if name.endswith(".decoder.bias")]:
            found.setdefault(name.replace(".decoder.bias", ".bias"), found[name].clone())
        architecture = (config.get("architectures") or [""])[0]
        width, like = config.get("hidden_size", 0), next(iter(weights.values()))
        for end, name in pooler.items():
            if architecture.endswith(end) and f"{name}.weight" not in found:
                found |= {f"{name}.weight": like.new_zeros(width, width), f"{name}.bias": like.new_zeros(width)}
        if bare(config):
            found = {name.removeprefix(body(config)): tensor for name, tensor in found.items()}
        return config, found

    return undone


def untied_bias(lines: str, head: str) -> Callable[[Theirs], str]:
    """The table of a family whose untied head (called `head`) uses the second of its two biases."""
    other = lines.replace(f"head.bias = {head}.bias", f"head.bias = {head}.decoder.bias")
    return lambda config: lines if tied(config) else other


IGNORE = ("*.position_ids", "cls.predictions.decoder.*")  # buffers, and copies of what is tied
SPARE = ("*.pooler.*", "cls.seq_relationship.*", "cls.predictions.bias")  # only another head uses them


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    config.only("uniem_embedding_strategy", "last_mean")  # of M3E: a text is the mean of its tokens, as here
    found = encoder(config, learned(config))
    return found | {"head": head(config, found["head"], "tanh", ForPreTraining=found["head"])}


def back(said: Said) -> Tree:
    return words(said, "Bert") | places(said)


POOLER = """
head.hidden.* = bert.pooler.dense.*
head.classes.* = classifier.*
head.tags.* = classifier.*
"""
FAMILY = Family(
    "bert",
    tree,
    untied_bias(BODY + HEAD + POOLER, "cls.predictions"),
    IGNORE,
    before=renamed,
    spare=SPARE,
    back=back,
    after=named_back({"BertModel": "bert.pooler.dense"}),
    alike=Alike(from_the_first, with_places_from_the_first),
)
