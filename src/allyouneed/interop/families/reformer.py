"""Reformer (Kitaev et al. 2020): reversible layers of two kinds, block-local attention and LSH attention.

Theirs hashes only texts longer than a chunk; up to there both compute the same. For longer texts theirs draws new
hashes in every pass (unless `hash_seed` is set), attends to everything in two chunks of sorted tokens, and counts a key
once per round in which it is found; ours is the paper's definition with as many buckets: nn/mixers/attention/lsh.py.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch

from allyouneed.config import iter_parts
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, is_headless, match_head, remove_prefix
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform, Weights
from allyouneed.nn.mixers.attention.lsh import LSH
from allyouneed.nn.models.base import Model

# used only in training or by other classes, and keys of old files
IGNORED_KEYS = (
    "axial_norm_std",
    "chunk_size_lm_head",
    "classifier_dropout",
    "lsh_num_chunks_after",
    "num_hidden_layers",
)
OLD = ("num_chunks_*", "output_past")
DEFAULTS = {
    "vocab_size": 320,
    "hidden_size": 256,
    "attention_head_size": 64,
    "num_attention_heads": 12,
    "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
    "feed_forward_size": 512,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 4096,
    "axial_pos_embds": True,
    "axial_pos_shape": [64, 64],
    "axial_pos_embds_dim": [64, 192],
    "local_attn_chunk_length": 64,
    "lsh_attn_chunk_length": 64,
    "num_hashes": 1,
    "hidden_dropout_prob": 0.05,
    "local_attention_probs_dropout_prob": 0.05,
    "lsh_attention_probs_dropout_prob": 0.0,
}


def positions(config: ConfigReader) -> Tree:
    max_length = config["max_position_embeddings"]
    shape, widths = config["axial_pos_shape"], config["axial_pos_embds_dim"]
    if not config["axial_pos_embds"]:
        return {"kind": "learned", "length": max_length}
    if len(shape) != 2 or len(widths) != 2 or sum(widths) != config["hidden_size"]:
        config.problems.append(
            f"axial_pos_shape: {shape} with widths {widths} is not supported "
            "(allowed: two axes whose widths sum to hidden_size)"
        )
    elif shape[0] * shape[1] > max_length:
        config.problems.append(f"max_position_embeddings: {max_length} is less than the product of axial_pos_shape")
    return {"kind": "learned-2d", "rows": shape[0], "columns": shape[-1], "row_width": widths[0]}


def local_mixer(config: ConfigReader, heads: Tree) -> Tree:
    config.require("local_num_chunks_after", 0)
    prepare = config.require("local_num_chunks_before", 1, 0)  # with more, theirs counts keys twice in short texts
    blocks = f"block-window({config['local_attn_chunk_length']}, {1 + prepare})"
    drop = config["local_attention_probs_dropout_prob"]
    return heads | {"kind": "attention", "pattern": f"causal & {blocks}", "bias": False, "dropout": drop}


def lsh_mixer(config: ConfigReader, heads: Tree) -> Tree:
    """Where a chunk covers the max_length text, nothing is hashed."""
    mixer = heads | {"kind": "lsh", "buckets": 1, "rounds": 1, "dropout": config["lsh_attention_probs_dropout_prob"]}
    chunk, buckets, rounds = config["lsh_attn_chunk_length"], config.get("num_buckets"), config["num_hashes"]
    seed = config.get("hash_seed") or 0
    if chunk >= config["max_position_embeddings"]:
        config.get("lsh_num_chunks_before")
        return mixer
    config.require("lsh_num_chunks_before", 1)
    if buckets is None:  # theirs chooses a power of two for its first long text
        buckets = 2 ** ((2 * (config["max_position_embeddings"] // chunk)).bit_length() - 1)
    elif not isinstance(buckets, int):  # factors
        buckets = math.prod(buckets)
    return mixer | {"buckets": buckets, "rounds": rounds, "chunk": chunk, "whole": chunk, "seed": seed}


@strict_config(*IGNORED_KEYS, *OLD)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    config.require("is_decoder", True)
    config.require("tie_word_embeddings", False)
    heads = {"heads": config["num_attention_heads"], "head_width": config["attention_head_size"]}
    kinds = {"local": local_mixer(config, heads), "lsh": lsh_mixer(config, heads)}
    unknown = sorted(set(config["attn_layers"]) - set(kinds))
    config.problems.extend(f"attn_layers: {kind!r} is not supported (allowed: {', '.join(kinds)})" for kind in unknown)
    channel = {
        "kind": "ffn",
        "hidden": config["feed_forward_size"],
        "activation": config.activation("hidden_act"),
        "dropout": config["hidden_dropout_prob"],
    }
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "dropout": config["hidden_dropout_prob"],
        "norm": {"kind": "layer", "eps": config["layer_norm_eps"]},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"positions": positions(config), "scale": "none", "tied": False},
        "decoder": [
            {
                "repeat": len(list(run)),
                "wiring": {"kind": "reversible", "join": "concat"},
                "mixer": kinds.get(kind, kinds["lsh"]),
                "channel": channel,
            }
            for kind, run in groupby(config["attn_layers"])
        ],
    }
    return match_head(config, found)


def position_fields(ours: ModelTree) -> dict[str, Any]:
    """Inverse of `positions`."""
    if ours.get("embed.positions.kind") != "learned-2d":
        return {"axial_pos_embds": False, "max_position_embeddings": ours["embed.positions.length"]}
    rows, columns = ours["embed.positions.rows"], ours["embed.positions.columns"]
    width = ours.get("embed.positions.row_width") or ours["width"] - ours["width"] // 2
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": [rows, columns],
        "axial_pos_embds_dim": [width, ours["width"] - width],
        "max_position_embeddings": rows * columns,
    }


def lsh_fields(ours: ModelTree, max_length: int) -> dict[str, Any]:
    """Inverse of `lsh_mixer`."""
    if ours.get("mixer.buckets") == 1:
        return {"lsh_attn_chunk_length": max_length}
    found = {"lsh_attn_chunk_length": ours["mixer.chunk"], "num_buckets": ours["mixer.buckets"]}
    return found | {"num_hashes": ours["mixer.rounds"], "hash_seed": ours["mixer.seed"]}


def hf_config(ours: ModelTree) -> HfConfig:
    layers, found = ours.layers("decoder"), position_fields(ours)
    kinds = ["lsh" if layer.get("mixer.kind") == "lsh" else "local" for layer in layers]
    for kind, layer in dict(zip(kinds, layers, strict=True)).items():
        found[f"{kind}_attention_probs_dropout_prob"] = layer.get("mixer.dropout", 0.0)
        if kind == "lsh":
            found |= lsh_fields(layer, found["max_position_embeddings"])
        else:
            block, count = ours.parse_integers(r"causal & block-window\((\d+), (\d+)\)", layer["mixer.pattern"], 2)
            found |= {"local_attn_chunk_length": block, "local_num_chunks_before": count - 1}
    return found | {
        "architectures": ours.architectures("ReformerModelWithLMHead"),
        "is_decoder": True,
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "attn_layers": kinds,
        "num_attention_heads": ours["decoder.mixer.heads"],
        "attention_head_size": ours.get("decoder.mixer.head_width") or ours["width"] // ours["decoder.mixer.heads"],
        "feed_forward_size": ours["decoder.channel.hidden"],
        "hidden_act": ours.activation("decoder.channel.activation"),
        "layer_norm_eps": ours["norm.eps"],
        "hidden_dropout_prob": ours["dropout"],
    }


LINES = """
embed.tokens.weight = reformer.embeddings.word_embeddings.weight
embed.positions.weight = reformer.embeddings.position_embeddings.embedding.weight
embed.positions.rows.weight = reformer.embeddings.position_embeddings.weights.0 |rows
embed.positions.columns.weight = reformer.embeddings.position_embeddings.weights.1 |columns
decoder.blocks.{n}.wiring.norms.0.* = LAYER.attention.layer_norm.*
decoder.blocks.{n}.wiring.norms.1.* = LAYER.feed_forward.layer_norm.*
decoder.blocks.{n}.sublayers.mixer.qkv.weight = SELF.query.weight + SELF.key.weight + SELF.value.weight
decoder.blocks.{n}.sublayers.mixer.qk.weight = SELF.query_key.weight
decoder.blocks.{n}.sublayers.mixer.v.weight = SELF.value.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = LAYER.attention.output.dense.weight
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.feed_forward.dense.dense.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.feed_forward.output.dense.*
decoder.end.norm.* = reformer.encoder.layer_norm.*
head.weight = lm_head.decoder.weight
""".replace("SELF", "LAYER.attention.self_attention").replace("LAYER", "reformer.encoder.layers.{n}")
TRANSFORMS = {
    "rows": TensorTransform(lambda tensor, config: tensor[:, 0], lambda tensor, config: tensor[:, None]),
    "columns": TensorTransform(lambda tensor, config: tensor[0], lambda tensor, config: tensor[None]),
}
BIAS = "lm_head.bias"  # stored, never added


def add_unused_bias(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Their class expects a bias that it does not use."""
    if BIAS in weights or is_headless(config):
        return config, weights
    return config, {**weights, BIAS: torch.zeros(len(weights["lm_head.decoder.weight"]))}


def notes(ours: Model) -> list[str]:
    """Hashing of longer texts is ours, not theirs."""
    hashed = [part for part in iter_parts(ours) if isinstance(part, LSH) and part.buckets > 1]
    if not hashed:
        return []
    chunk = min(part.whole for part in hashed)
    return [
        f"Reformer: texts of more than {chunk} tokens are hashed as in the paper, with fixed rotations (seed "
        f"{hashed[0].seed}); transformers draws new ones in every pass, so results differ there (docs/other-models.md)"
    ]


IGNORED_WEIGHTS = ("*.mask_value_float*", "*.self_mask_value_float*")
FAMILY = Family(
    "reformer",
    tree,
    LINES,
    IGNORED_WEIGHTS,
    TRANSFORMS,
    prepare=add_prefix("reformer."),
    preserve=(BIAS,),
    hf_config=hf_config,
    finish=chain(add_unused_bias, remove_prefix("reformer.")),
    notes=notes,
)
