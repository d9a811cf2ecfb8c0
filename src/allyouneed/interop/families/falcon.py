"""Falcon (Almazrouei et al. 2023): multi-query or grouped-query attention, parallel sub-layers, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.interop.hf.config_reader import ACTIVATIONS, ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary
from allyouneed.interop.hf.transforms import add_prefix, chain, grouped_qkv, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig


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


@strict_config("max_position_embeddings", "multi_query", "num_kv_heads")  # `groups` reads one of them
def tree(config: ConfigReader) -> Tree:
    width, bias = config["hidden_size"], config.get("bias", False)
    config.require("alibi", False)  # theirs is divided by √head_width, unlike the paper
    config.require("apply_residual_connection_post_layernorm", False)
    parallel = {"kind": "parallel", "norms": "one" if norms(config) == 1 else "each"}
    if norms(config) == 2 and config.get("parallel_attn", True) and not config.get("new_decoder_architecture"):
        config.problems.append("num_ln_in_parallel_attn: 2 requires new_decoder_architecture")
    if config.get("new_decoder_architecture"):
        config.require("parallel_attn", True)
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
        "activation": config.map_value("activation", ACTIVATIONS, "gelu"),
        "bias": bias,
    }
    found = {
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
    return match_head(config, found)


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


def hf_config(ours: ModelTree) -> HfConfig:
    """Only the new decoder architecture has grouped-query attention, or two norms for parallel sub-layers."""
    heads, parallel = ours["decoder.mixer.heads"], ours.get("decoder.wiring.kind") == "parallel"
    keys = ours.get("decoder.mixer.kv_heads") or heads
    two_norms = parallel and ours.get("decoder.wiring.norms") == "each"
    new = two_norms or (parallel and keys not in (1, heads))
    return {
        "architectures": ours.architectures("FalconForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "num_attention_heads": heads,
        "new_decoder_architecture": new,
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if new else None,
        "ffn_hidden_size": ours["decoder.channel.hidden"],
        "activation": ours.activation("decoder.channel.activation"),
        "bias": ours.flag("decoder.mixer.bias"),
        "alibi": False,
        "layer_norm_epsilon": ours["norm.eps"],
        "hidden_dropout": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
        **rope_parameters(ours),
    }


FAMILY = Family(
    "falcon",
    tree,
    lines,
    ignore=["lm_head.weight", "*.rotary_emb.inv_freq"],
    transforms={"apart": grouped_qkv(lambda config: (config["num_attention_heads"], groups(config)))},
    prepare=chain(add_prefix("transformer."), untie_head("lm_head.weight", "transformer.word_embeddings.weight")),
    hf_config=hf_config,
    finish=remove_prefix("transformer."),
)
