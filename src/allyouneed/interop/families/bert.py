"""BERT (Devlin et al. 2019), and what its relatives have in common with it: `encoder`, `BODY` and `renamed`."""

from __future__ import annotations

import re

from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family, Theirs, Weights

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


def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Old files call a norm's weight `gamma` and its bias `beta`; those of a bare model do not say what it is called.
    An untied head has two biases and uses the second."""
    body = {"big_bird": "bert."}.get(config["model_type"], f"{config['model_type']}.")
    bare = "" if any(name.startswith(body) for name in weights) else body
    old = {".gamma": ".weight", ".beta": ".bias"}
    named = {bare + re.sub(r"\.(gamma|beta)$", lambda end: old[end[0]], name): w for name, w in weights.items()}
    if not config.get("tie_word_embeddings", True):
        used = {name: tensor for name, tensor in named.items() if name.endswith("decoder.bias")}
        named |= {name.replace("decoder.bias", "bias"): tensor for name, tensor in used.items()}
    return config, named


IGNORE = (
    "*.position_ids",
    "*.pooler.*",  # only classes use it
    "cls.predictions.decoder.*",
    "cls.seq_relationship.*",
)


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    found = encoder(config, learned(config))
    return found | {"head": head(config, found["head"], "tanh", ForPreTraining=found["head"])}


POOLER = """
head.hidden.* = bert.pooler.dense.*
head.classes.* = classifier.*
head.tags.* = classifier.*
"""
FAMILY = Family("bert", tree, BODY + HEAD + POOLER, IGNORE, before=renamed)
