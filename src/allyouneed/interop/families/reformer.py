"""Reformer (Kitaev et al. 2020): reversible layers of two kinds, block-local attention and LSH attention.

Theirs hashes only texts longer than a chunk; up to there both compute the same. For longer texts theirs draws new
hashes in every pass (unless `hash_seed` is set), attends to everything in two chunks of sorted tokens, and counts a key
once per round in which it is found; ours is the paper's definition with as many buckets: nn/mixers/attention/lsh.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from allyouneed.config import iter_parts
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, is_headless
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, remove_prefix
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform, Weights
from allyouneed.nn.mixers.attention.lsh import LSH
from allyouneed.nn.models.base import Model

# ignored keys are used only in training or by other classes, or are keys of old files
FIELDS = """
kind: decoder
is_decoder in [true]
-> {is_decoder: true}
tie_word_embeddings in [false]
vocab = vocab_size ?? 320
width = hidden_size ?? 256
dropout = hidden_dropout_prob ?? 0.05
norm: {kind: layer}
norm.eps = layer_norm_eps ?? 1.0e-12
init: {kind: normal}
init.std <- initializer_range ?? 0.02
embed: {scale: none, tied: false}
embed.positions = axial_pos_embds, axial_pos_shape, axial_pos_embds_dim, max_position_embeddings |positions
decoder.wiring: {kind: reversible, join: concat}
decoder[*].mixer.kind = attn_layers |layers
decoder.mixer.heads = num_attention_heads ?? 12
decoder.mixer.head_width = attention_head_size ?? 64 or hidden_size // num_attention_heads
decoder.mixer<attention>: {bias: false}
decoder.mixer<attention>.pattern = local_attn_chunk_length, local_num_chunks_before, local_num_chunks_after |blocks
decoder.mixer<attention>.dropout = local_attention_probs_dropout_prob ?? 0.05
decoder.mixer<lsh> = lsh_attn_chunk_length, lsh_num_chunks_before, num_buckets, num_hashes, hash_seed |lsh
decoder.mixer<lsh>.dropout = lsh_attention_probs_dropout_prob ?? 0.0
decoder.channel: {kind: ffn}
decoder.channel.hidden = feed_forward_size ?? 512
decoder.channel.activation = hidden_act ?? relu |activation
decoder.channel.dropout <- hidden_dropout_prob
head.kind = architectures |decoder ReformerModelWithLMHead
?? {attn_layers: [local, lsh, local, lsh, local, lsh], max_position_embeddings: 4096, axial_pos_embds: true}
?? {axial_pos_shape: [64, 64], axial_pos_embds_dim: [64, 192]}
?? {local_attn_chunk_length: 64, lsh_attn_chunk_length: 64, num_hashes: 1}
ignore axial_norm_std, chunk_size_lm_head, classifier_dropout, lsh_num_chunks_after, num_hidden_layers, num_chunks_*,
    output_past
"""


def read_positions(config: ConfigReader, line: Line) -> Tree:
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


def write_positions(ours: ModelTree, line: Line) -> dict[str, Any]:
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


KINDS = {"local": "attention", "lsh": "lsh"}


def read_kinds(config: ConfigReader, line: Line) -> list[str]:
    unknown = sorted(set(config[line.key]) - set(KINDS))
    config.problems.extend(f"attn_layers: {kind!r} is not supported (allowed: {', '.join(KINDS)})" for kind in unknown)
    return [KINDS.get(kind, "lsh") for kind in config[line.key]]


def write_kinds(ours: ModelTree, line: Line) -> list[str]:
    return ["lsh" if layer.get("mixer.kind") == "lsh" else "local" for layer in ours.layers("decoder")]


def read_blocks(config: ConfigReader, line: Line) -> str:
    config.require("local_num_chunks_after", 0)
    before = config.require("local_num_chunks_before", 1, 0)  # with more, theirs counts keys twice in short texts
    return f"causal & block-window({config['local_attn_chunk_length']}, {1 + before})"


def write_blocks(ours: ModelTree, line: Line) -> dict[str, int]:
    block, count = ours.parse_integers(r"causal & block-window\((\d+), (\d+)\)", ours[line.path], 2)
    return {"local_attn_chunk_length": block, "local_num_chunks_before": count - 1}


def read_lsh(config: ConfigReader, line: Line) -> Tree:
    """Where a chunk covers the max_length text, nothing is hashed."""
    chunk, buckets, rounds = config["lsh_attn_chunk_length"], config.get("num_buckets"), config["num_hashes"]
    seed = config.get("hash_seed") or 0
    if chunk >= config["max_position_embeddings"]:
        config.get("lsh_num_chunks_before")
        return {"buckets": 1, "rounds": 1}
    config.require("lsh_num_chunks_before", 1)
    if buckets is None:  # theirs chooses a power of two for its first long text
        buckets = 2 ** ((2 * (config["max_position_embeddings"] // chunk)).bit_length() - 1)
    elif not isinstance(buckets, int):  # factors
        buckets = math.prod(buckets)
    return {"buckets": buckets, "rounds": rounds, "chunk": chunk, "whole": chunk, "seed": seed}


def write_lsh(ours: ModelTree, line: Line) -> dict[str, int]:
    if ours.get(f"{line.path}.buckets") == 1:
        return {"lsh_attn_chunk_length": write_positions(ours, line)["max_position_embeddings"]}
    names = {"lsh_attn_chunk_length": "chunk", "num_buckets": "buckets", "num_hashes": "rounds", "hash_seed": "seed"}
    return {key: ours[f"{line.path}.{name}"] for key, name in names.items()}


CONVERSIONS = {
    "blocks": Conversion(read_blocks, write_blocks),
    "layers": Conversion(read_kinds, write_kinds),
    "lsh": Conversion(read_lsh, write_lsh),
    "positions": Conversion(read_positions, write_positions),
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
    ConfigTable(FIELDS, CONVERSIONS),
    LINES,
    IGNORED_WEIGHTS,
    TRANSFORMS,
    prepare=add_prefix("reformer."),
    preserve=(BIAS,),
    finish=chain(add_unused_bias, remove_prefix("reformer.")),
    notes=notes,
)
