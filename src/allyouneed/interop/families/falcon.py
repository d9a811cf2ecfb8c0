"""Falcon (Almazrouei et al. 2023): few keys for many heads, both sub-layers at once, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.interop.hf.config_reader import ACTIVATIONS, Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import rotary, turned
from allyouneed.interop.hf.transforms import chained, grouping, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs


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
    return headed(config, found)


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


def back(said: Said) -> Theirs:
    """Only the newer kind of layer shares keys between some heads, or has two norms for two sub-layers at once."""
    heads, parallel = said["decoder.mixer.heads"], said.get("decoder.wiring.kind") == "parallel"
    keys = said.get("decoder.mixer.kv_heads") or heads
    twice = parallel and said.get("decoder.wiring.norms") == "each"
    newer = twice or (parallel and keys not in (1, heads))
    return {
        "architectures": said.writer("FalconForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "num_attention_heads": heads,
        "new_decoder_architecture": newer,
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": (2 if twice else 1) if newer else None,
        "ffn_hidden_size": said["decoder.channel.hidden"],
        "activation": said.activation("decoder.channel.activation"),
        "bias": said.flag("decoder.mixer.bias"),
        "alibi": False,
        "layer_norm_epsilon": said["norm.eps"],
        "hidden_dropout": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
        **turned(said),
    }


FAMILY = Family(
    "falcon",
    tree,
    lines,
    ignore=["lm_head.weight", "*.rotary_emb.inv_freq"],
    changes={"apart": grouping(lambda config: (config["num_attention_heads"], groups(config)))},
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.word_embeddings.weight")),
    back=back,
    after=unprefixed("transformer."),
)
