"""Llama (Touvron et al. 2023), and what its descendants share with it."""

from __future__ import annotations

import re
from typing import Any

from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import rotary, turned
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs


def attention(config: Reader, **other: Any) -> Tree:
    """With Llama's own words where `other` has none."""
    found = {
        "kind": "attention",
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_width": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "pattern": "causal",
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }
    return found | ({} if "positions" in other else {"positions": rotary(config)}) | other


def swiglu(config: Reader, hidden: int | None = None, **other: Any) -> Tree:
    hidden = config["intermediate_size"] if hidden is None else hidden
    found = {"kind": "glu", "hidden": hidden, "activation": config.activation("hidden_act")}
    return found | {"bias": config.get("mlp_bias", False)} | other


def windowed(config: Reader) -> str:
    """Mistral's: everybody sees itself and so many before it."""
    window = config.get("sliding_window")
    return "causal" if window is None else f"causal & window({window})"


def decoder(config: Reader, layers: list[Tree], **other: Any) -> Tree:
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "norm": {"kind": "rms", "eps": config["rms_norm_eps"]},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": layers,
    }
    return headed(config, found | other)


def layers(config: Reader, mixer: Tree, channel: Tree, wiring: str = "pre-norm") -> list[Tree]:
    return [{"repeat": config["num_hidden_layers"], "wiring": wiring, "mixer": mixer, "channel": channel}]


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    return decoder(config, layers(config, attention(config), swiglu(config)))


def sizes(said: Said) -> dict[str, Any]:
    """What Llama and all its descendants say."""
    return {
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "num_attention_heads": said["decoder.mixer.heads"],
        "num_key_value_heads": said.get("decoder.mixer.kv_heads") or said["decoder.mixer.heads"],
        "head_dim": said.get("decoder.mixer.head_width") or said["width"] // said["decoder.mixer.heads"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "rms_norm_eps": said["norm.eps"],
        "tie_word_embeddings": said["embed.tied"],
        **turned(said),
    }


def gated(said: Said, path: str = "decoder.channel") -> dict[str, Any]:
    word = said.activation(f"{path}.activation", tanh="gelu_pytorch_tanh")
    return {"intermediate_size": said[f"{path}.hidden"], "hidden_act": word}


def window(said: Said) -> int | None:
    """Of a pattern that `windowed` says; the first of several kinds of layers."""
    found = [
        re.fullmatch(r"causal & window\((\d+)\)", layer.get("mixer.pattern", "")) for layer in said.layers("decoder")
    ]
    return next((int(match[1]) for match in found if match), None)


def back(said: Said) -> Theirs:
    biases = {"attention_bias": said.flag("decoder.mixer.bias"), "mlp_bias": said.flag("decoder.channel.bias")}
    return {"architectures": said.writer("LlamaForCausalLM"), **sizes(said), **gated(said), **biases}


OUTSIDE = """
embed.tokens.weight = model.embed_tokens.weight
head.weight = lm_head.weight
decoder.end.weight = model.norm.weight
"""
NORMS = """
decoder.blocks.{n}.wiring.norms.0.weight = model.layers.{n}.input_layernorm.weight
decoder.blocks.{n}.wiring.norms.1.weight = model.layers.{n}.post_attention_layernorm.weight
"""
ATTENTION = """
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.o_proj.*
""".replace("SELF", "model.layers.{n}.self_attn")
CHANNEL = """
decoder.blocks.{n}.sublayers.channel.gate_up.* = model.layers.{n}.mlp.gate_proj.* + model.layers.{n}.mlp.up_proj.*
decoder.blocks.{n}.sublayers.channel.down.* = model.layers.{n}.mlp.down_proj.*
"""
LINES = OUTSIDE + NORMS + ATTENTION + CHANNEL
IGNORE = ["lm_head.weight", "*.rotary_emb.inv_freq"]
BEFORE = chained(prefixed("model."), own_head("lm_head.weight", "model.embed_tokens.weight"))
AFTER = unprefixed("model.")
FAMILY = Family("llama", tree, LINES, IGNORE, before=BEFORE, back=back, after=AFTER)
