"""Falcon (Almazrouei et al. 2023): few keys for many heads, both sub-layers at once, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from allyouneed.interop.reader import ACTIVATIONS, Reader, Tree, reading
from allyouneed.interop.rope import rotary
from allyouneed.interop.shapes import ungrouped
from allyouneed.interop.table import Family


def groups(config: Mapping[str, Any]) -> int:
    """How many keys there are."""
    if config.get("new_decoder_architecture"):
        return int(config.get("num_kv_heads") or config["num_attention_heads"])
    return 1 if config.get("multi_query", True) else int(config["num_attention_heads"])


def norms(config: Mapping[str, Any]) -> int:
    """Of a layer: one for both sub-layers, or one each."""
    if not config.get("parallel_attn", True):
        return 2
    return int(config.get("num_ln_in_parallel_attn") or 0) or (2 if config.get("new_decoder_architecture") else 1)


@reading("max_position_embeddings", "multi_query", "num_kv_heads")  # `groups` asks for one or the other
def tree(config: Reader) -> Tree:
    width, bias = config["hidden_size"], config.get("bias", False)
    config.only("alibi", False)  # theirs is divided by √head_width, which is not what the paper says
    config.only("apply_residual_connection_post_layernorm", False)
    parallel = {"kind": "parallel", "norms": "one" if norms(config) == 1 else "each"}
    if norms(config) == 2 and config.get("parallel_attn", True) and not config.get("new_decoder_architecture"):
        config.problems.append("num_ln_in_parallel_attn: 2 goes with new_decoder_architecture only")
    if config.get("new_decoder_architecture"):
        config.only("parallel_attn", True)
    mixer = {
        "kind": "attention",
        "heads": config["num_attention_heads"],
        "kv_heads": groups(config),
        "pattern": "causal",
        "positions": rotary(config),
        "bias": bias,
        "dropout": config.get("attention_dropout", 0.0),
    }
    channel = {
        "kind": "ffn",
        "hidden": config.get("ffn_hidden_size") or 4 * width,
        "activation": config.choose("activation", ACTIVATIONS, "gelu"),
        "bias": bias,
    }
    return {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("hidden_dropout", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", True)},
        "decoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": parallel if config.get("parallel_attn", True) else "pre-norm",
                "mixer": mixer,
                "channel": channel,
            }
        ],
    }


def lines(config: Mapping[str, Any]) -> str:
    first, second = "input_layernorm", "post_attention_layernorm"
    if config.get("parallel_attn", True) and norms(config) == 2:
        first, second = "ln_attn", "ln_mlp"
    return LINES.replace("FIRST", first).replace("SECOND", second)


def apart(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    return ungrouped(tensor, config["num_attention_heads"], groups(config))


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
FAMILY = Family("falcon", tree, lines, ["lm_head.weight", "*.rotary_emb.inv_freq"], {"apart": apart})
