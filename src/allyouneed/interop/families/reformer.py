"""Reformer (Kitaev et al. 2020): reversible layers of two kinds, a window of blocks, or a search for tokens alike.

Theirs hashes only texts that are longer than a chunk. Up to there both compute the same. Longer ones theirs hashes by
other lots in every pass (unless `hash_seed` says which), looks at whatever lies in two chunks of sorted tokens, and
counts a key once for every round in which it is met; ours is the paper's definition, with as many buckets: nn/mixers/attention/lsh.py.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import torch

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import bare, chained, headed, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Change, Family, Theirs, Weights

# what only training looks at, what is kept for others, and names of old files
HARMLESS = ("axial_norm_std", "chunk_size_lm_head", "classifier_dropout", "lsh_num_chunks_after", "num_hidden_layers")
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


def positions(config: Reader) -> Tree:
    longest = config["max_position_embeddings"]
    shape, widths = config["axial_pos_shape"], config["axial_pos_embds_dim"]
    if not config["axial_pos_embds"]:
        return {"kind": "learned", "length": longest}
    if len(shape) != 2 or len(widths) != 2 or sum(widths) != config["hidden_size"]:
        config.problems.append(f"axial_pos_shape: {shape} of {widths}; known are two axes that make hidden_size")
    elif shape[0] * shape[1] > longest:
        config.problems.append(f"max_position_embeddings: {longest} are fewer places than axial_pos_shape has")
    return {"kind": "learned-2d", "rows": shape[0], "columns": shape[-1], "row_width": widths[0]}


def window(config: Reader, heads: Tree) -> Tree:
    config.only("local_num_chunks_after", 0)
    before = config.only("local_num_chunks_before", 1, 0)  # with more, theirs counts keys twice in short texts
    blocks = f"block-window({config['local_attn_chunk_length']}, {1 + before})"
    drop = config["local_attention_probs_dropout_prob"]
    return heads | {"kind": "attention", "pattern": f"causal & {blocks}", "bias": False, "dropout": drop}


def hashing(config: Reader, heads: Tree) -> Tree:
    """A text that never outgrows a chunk is never hashed."""
    mixer = heads | {"kind": "lsh", "buckets": 1, "rounds": 1, "dropout": config["lsh_attention_probs_dropout_prob"]}
    chunk, buckets, rounds = config["lsh_attn_chunk_length"], config.get("num_buckets"), config["num_hashes"]
    seed = config.get("hash_seed") or 0
    if chunk >= config["max_position_embeddings"]:
        config.get("lsh_num_chunks_before")
        return mixer
    config.only("lsh_num_chunks_before", 1)
    if buckets is None:  # theirs: as many as suit its first long text, a power of two
        buckets = 2 ** ((2 * (config["max_position_embeddings"] // chunk)).bit_length() - 1)
    elif not isinstance(buckets, int):  # factors
        buckets = math.prod(buckets)
    return mixer | {"buckets": buckets, "rounds": rounds, "chunk": chunk, "whole": chunk, "seed": seed}


@reading(*HARMLESS, *OLD)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS)
    config.only("is_decoder", True)
    config.only("tie_word_embeddings", False)
    heads = {"heads": config["num_attention_heads"], "head_width": config["attention_head_size"]}
    kinds = {"local": window(config, heads), "lsh": hashing(config, heads)}
    unknown = sorted(set(config["attn_layers"]) - set(kinds))
    config.problems.extend(f"attn_layers: {kind!r} is not known here ({', '.join(kinds)} are)" for kind in unknown)
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
    return headed(config, found)


def places(said: Said) -> dict[str, Any]:
    """The way back of `positions`."""
    if said.get("embed.positions.kind") != "learned-2d":
        return {"axial_pos_embds": False, "max_position_embeddings": said["embed.positions.length"]}
    rows, columns = said["embed.positions.rows"], said["embed.positions.columns"]
    width = said.get("embed.positions.row_width") or said["width"] - said["width"] // 2
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": [rows, columns],
        "axial_pos_embds_dim": [width, said["width"] - width],
        "max_position_embeddings": rows * columns,
    }


def searches(said: Said, longest: int) -> dict[str, Any]:
    """The way back of `hashing`."""
    if said.get("mixer.buckets") == 1:
        return {"lsh_attn_chunk_length": longest}
    found = {"lsh_attn_chunk_length": said["mixer.chunk"], "num_buckets": said["mixer.buckets"]}
    return found | {"num_hashes": said["mixer.rounds"], "hash_seed": said["mixer.seed"]}


def back(said: Said) -> Theirs:
    layers, found = said.layers("decoder"), places(said)
    kinds = ["lsh" if layer.get("mixer.kind") == "lsh" else "local" for layer in layers]
    for kind, layer in dict(zip(kinds, layers, strict=True)).items():
        found[f"{kind}_attention_probs_dropout_prob"] = layer.get("mixer.dropout", 0.0)
        if kind == "lsh":
            found |= searches(layer, found["max_position_embeddings"])
        else:
            block, count = said.numbers(r"causal & block-window\((\d+), (\d+)\)", layer["mixer.pattern"], 2)
            found |= {"local_attn_chunk_length": block, "local_num_chunks_before": count - 1}
    return found | {
        "architectures": said.writer("ReformerModelWithLMHead"),
        "is_decoder": True,
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "attn_layers": kinds,
        "num_attention_heads": said["decoder.mixer.heads"],
        "attention_head_size": said.get("decoder.mixer.head_width") or said["width"] // said["decoder.mixer.heads"],
        "feed_forward_size": said["decoder.channel.hidden"],
        "hidden_act": said.activation("decoder.channel.activation"),
        "layer_norm_eps": said["norm.eps"],
        "hidden_dropout_prob": said["dropout"],
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
CHANGES = {
    "rows": Change(lambda tensor, config: tensor[:, 0], lambda tensor, config: tensor[:, None]),
    "columns": Change(lambda tensor, config: tensor[0], lambda tensor, config: tensor[None]),
}
BIAS = "lm_head.bias"  # theirs has one and never adds it


def completed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Their class looks for a bias that it does not use."""
    if BIAS in weights or bare(config):
        return config, weights
    return config, {**weights, BIAS: torch.zeros(len(weights["lm_head.decoder.weight"]))}


IGNORE = ("*.mask_value_float*", "*.self_mask_value_float*")
FAMILY = Family(
    "reformer",
    tree,
    LINES,
    IGNORE,
    CHANGES,
    before=prefixed("reformer."),
    spare=(BIAS,),
    back=back,
    after=chained(completed, unprefixed("reformer.")),
)
