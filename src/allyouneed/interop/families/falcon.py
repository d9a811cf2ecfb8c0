"""Falcon (Almazrouei et al. 2023): multi-query or grouped-query attention, parallel sub-layers, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import MODEL, decoder_family
from allyouneed.interop.hf.transforms import grouped_qkv

# theirs divides the bias of ALiBi by √head_width, unlike the paper
FIELDS = MODEL + """
dropout = hidden_dropout ?? 0.0
alibi in [false]
-> {alibi: false}
apply_residual_connection_post_layernorm in [false]
decoder.mixer.heads = num_attention_heads
decoder.mixer.bias = bias ?? false |flag
decoder.mixer.positions = rope_parameters, rope_scaling, rope_theta, max_position_embeddings |rotary
decoder = new_decoder_architecture, num_kv_heads, multi_query, parallel_attn, num_ln_in_parallel_attn |layers
decoder.channel.hidden = ffn_hidden_size or 4 * hidden_size
decoder.channel.activation = activation ?? gelu |activation
decoder.channel.bias <- bias
head.kind = architectures |decoder FalconForCausalLM
ignore max_position_embeddings, multi_query, num_kv_heads
"""  # fmt: skip


def groups(config: Mapping[str, Any]) -> int:
    """Number of key-value heads."""
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or config["num_attention_heads"])
    return 1 if config.get("multi_query", True) else int(config["num_attention_heads"])


def norms(config: Mapping[str, Any]) -> int:
    """Norms per layer: one for both sub-layers, or one each."""
    if not config.get("parallel_attn", True):
        return 2
    return int(config.get("num_ln_in_parallel_attn") or 0) or (2 if config.get("new_decoder_architecture") else 1)


def read_layers(config: ConfigReader, line: Line) -> Tree:
    parallel, new = config.get("parallel_attn", True), config.get("new_decoder_architecture")
    if norms(config) == 2 and parallel and not new:
        config.problems.append("num_ln_in_parallel_attn: 2 requires new_decoder_architecture")
    if new:
        config.require("parallel_attn", True)
    wiring = {"kind": "parallel", "norms": "one" if norms(config) == 1 else "each"} if parallel else "pre-norm"
    return {"wiring": wiring, "mixer": {"kv_heads": groups(config)}}


def write_layers(ours: ModelTree, line: Line) -> Tree:
    """Only the new decoder architecture has grouped-query attention, or two norms for parallel sub-layers."""
    heads, parallel = ours["decoder.mixer.heads"], ours.get("decoder.wiring.kind") == "parallel"
    keys = ours.get("decoder.mixer.kv_heads") or heads
    two_norms = parallel and ours.get("decoder.wiring.norms") == "each"
    new = two_norms or (parallel and keys not in (1, heads))
    return {
        "new_decoder_architecture": new,
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if new else None,
    }


def lines(config: Mapping[str, Any]) -> str:
    first, second = "input_layernorm", "post_attention_layernorm"
    if config.get("parallel_attn", True) and norms(config) == 2:
        first, second = "ln_attn", "ln_mlp"
    return LINES.replace("FIRST", first).replace("SECOND", second)


LINES = """
embed.tokens.weight = transformer.word_embeddings.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = transformer.h.{n}.FIRST.*
decoder.blocks.{n}.wiring.norms.1.* = transformer.h.{n}.SECOND.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = transformer.h.{n}.self_attention.query_key_value.* |apart
decoder.blocks.{n}.sublayers.mixer.out.* = transformer.h.{n}.self_attention.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = transformer.h.{n}.mlp.dense_h_to_4h.*
decoder.blocks.{n}.sublayers.channel.down.* = transformer.h.{n}.mlp.dense_4h_to_h.*
decoder.end.* = transformer.ln_f.*
"""
FAMILY = decoder_family(
    "falcon",
    FIELDS,
    lines,
    "transformer.word_embeddings.weight",
    {"layers": Conversion(read_layers, write_layers)},
    ignore=("*.rotary_emb.inv_freq",),
    transforms={"apart": grouped_qkv(lambda config: (config["num_attention_heads"], groups(config)))},
)
