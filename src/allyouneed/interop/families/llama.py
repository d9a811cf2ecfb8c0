"""Llama (Touvron et al. 2023), and what its descendants share with it."""

from __future__ import annotations

import re
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig


def attention(config: ConfigReader, **other: Any) -> Tree:
    """Llama's attention, overridden by `other`."""
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


def swiglu(config: ConfigReader, hidden: int | None = None, **other: Any) -> Tree:
    hidden = config["intermediate_size"] if hidden is None else hidden
    found = {"kind": "glu", "hidden": hidden, "activation": config.activation("hidden_act")}
    return found | {"bias": config.get("mlp_bias", False)} | other


def window_pattern(config: ConfigReader) -> str:
    """Mistral's: a causal window that includes the token itself."""
    window = config.get("sliding_window")
    return "causal" if window is None else f"causal & window({window})"


def decoder(config: ConfigReader, layers: list[Tree], **other: Any) -> Tree:
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "norm": {"kind": "rms", "eps": config["rms_norm_eps"]},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": layers,
    }
    return match_head(config, found | other)


def layers(config: ConfigReader, mixer: Tree, channel: Tree, wiring: str = "pre-norm") -> list[Tree]:
    return [{"repeat": config["num_hidden_layers"], "wiring": wiring, "mixer": mixer, "channel": channel}]


@strict_config("max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    return decoder(config, layers(config, attention(config), swiglu(config)))


def shared_fields(ours: ModelTree) -> dict[str, Any]:
    """Fields that Llama and its descendants share."""
    return {
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "num_attention_heads": ours["decoder.mixer.heads"],
        "num_key_value_heads": ours.get("decoder.mixer.kv_heads") or ours["decoder.mixer.heads"],
        "head_dim": ours.get("decoder.mixer.head_width") or ours["width"] // ours["decoder.mixer.heads"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "rms_norm_eps": ours["norm.eps"],
        "tie_word_embeddings": ours["embed.tied"],
        **rope_parameters(ours),
    }


def mlp_fields(ours: ModelTree, path: str = "decoder.channel") -> dict[str, Any]:
    word = ours.activation(f"{path}.activation", tanh="gelu_pytorch_tanh")
    return {"intermediate_size": ours[f"{path}.hidden"], "hidden_act": word}


def sliding_window(ours: ModelTree) -> int | None:
    """The window of the first layer with such a pattern; inverse of `window_pattern`."""
    found = [
        re.fullmatch(r"causal & window\((\d+)\)", layer.get("mixer.pattern", "")) for layer in ours.layers("decoder")
    ]
    return next((int(match[1]) for match in found if match), None)


def hf_config(ours: ModelTree) -> HfConfig:
    biases = {"attention_bias": ours.flag("decoder.mixer.bias"), "mlp_bias": ours.flag("decoder.channel.bias")}
    return {
        "architectures": ours.architectures("LlamaForCausalLM"),
        **shared_fields(ours),
        **mlp_fields(ours),
        **biases,
    }


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
IGNORED_WEIGHTS = ["lm_head.weight", "*.rotary_emb.inv_freq"]
PREPARE = chain(add_prefix("model."), untie_head("lm_head.weight", "model.embed_tokens.weight"))
FINISH = remove_prefix("model.")
FAMILY = Family("llama", tree, LINES, IGNORED_WEIGHTS, prepare=PREPARE, hf_config=hf_config, finish=FINISH)
