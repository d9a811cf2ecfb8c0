"""Mamba (Gu, Dao 2023): one mixer per layer, no feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import add_prefix, chain, match_head, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig, TensorTransform

ReadTree = Callable[[HfConfig], dict[str, Any]]
WriteConfig = Callable[[ModelTree], HfConfig]

# training-only options, choices of their implementation, other names of sizes, and sizes that follow from others
IGNORED_KEYS = (
    "d_inner", "d_model", "fused_add_norm", "intermediate_size", "n_layer", "norm_before_gate",
    "pad_vocab_size_multiple", "rescale_prenorm_residual", "residual_in_fp32", "time_step_*", "use_associative_scan",
    "use_mambapy",
)  # fmt: skip
DEFAULTS = {"expand": 2, "state_size": 16, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    width = config["hidden_size"]
    hidden = int(config["expand"] * width)
    rank, usual = config.get("time_step_rank", "auto"), -(-width // 16)
    mixer = {
        "kind": "mamba",
        "hidden": None if hidden == 2 * width else hidden,
        "rank": None if rank in ("auto", usual) else rank,
        "state": config["state_size"],
        **convolution(config),
    }
    return decoder(config, mixer)


def convolution(config: ConfigReader) -> Tree:
    """Keys of the mixer that Mamba-2 has as well."""
    config.require("hidden_act", "silu", "swish")
    config.require("rms_norm", True)
    return {
        "convolution": config["conv_kernel"],
        "conv_bias": config.get("use_conv_bias", True),
        "bias": config.get("use_bias", False),
    }


def decoder(config: ConfigReader, mixer: Tree) -> Tree:
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "norm": {"kind": "rms", "eps": config["layer_norm_epsilon"]},
        "embed": {"scale": "none", "tied": config["tie_word_embeddings"]},
        "decoder": [{"repeat": config["num_hidden_layers"], "wiring": "pre-norm", "mixer": mixer}],
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = backbone.embeddings.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.weight = backbone.layers.{n}.norm.weight
decoder.blocks.{n}.sublayers.mixer.up.* = backbone.layers.{n}.mixer.in_proj.*
decoder.blocks.{n}.sublayers.mixer.convolution.taps = backbone.layers.{n}.mixer.conv1d.weight |flat
decoder.blocks.{n}.sublayers.mixer.convolution.shift = backbone.layers.{n}.mixer.conv1d.bias
decoder.blocks.{n}.sublayers.mixer.a_log = backbone.layers.{n}.mixer.A_log
decoder.blocks.{n}.sublayers.mixer.skip = backbone.layers.{n}.mixer.D
decoder.blocks.{n}.sublayers.mixer.out.* = backbone.layers.{n}.mixer.out_proj.*
decoder.end.weight = backbone.norm_f.weight
"""
OWN_LINES = """
decoder.blocks.{n}.sublayers.mixer.select.weight = backbone.layers.{n}.mixer.x_proj.weight
decoder.blocks.{n}.sublayers.mixer.step_map = backbone.layers.{n}.mixer.dt_proj.weight
decoder.blocks.{n}.sublayers.mixer.step_bias = backbone.layers.{n}.mixer.dt_proj.bias
"""


def config_fields(ours: ModelTree, name: str) -> Tree:
    """Fields of the config that Mamba-2 has as well."""
    return {
        "architectures": ours.architectures(name),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "state_size": ours["decoder.mixer.state"],
        "conv_kernel": ours["decoder.mixer.convolution"],
        "use_conv_bias": ours["decoder.mixer.conv_bias"],
        "use_bias": ours["decoder.mixer.bias"],
        "layer_norm_epsilon": ours["norm.eps"],
        "tie_word_embeddings": ours["embed.tied"],
        "hidden_act": "silu",
    }


def hf_config(ours: ModelTree) -> HfConfig:
    width = ours["width"]
    hidden = ours.get("decoder.mixer.hidden") or 2 * width
    return config_fields(ours, "MambaForCausalLM") | {
        "intermediate_size": hidden,
        "expand": hidden // width,
        "time_step_rank": ours.get("decoder.mixer.rank") or -(-width // 16),
    }


FLAT = TensorTransform(lambda tensor, config: tensor[:, 0], lambda tensor, config: tensor[:, None])  # one input each


def mamba_family(name: str, tree: ReadTree, lines: str, hf_config: WriteConfig) -> Family:
    """A family with the weights that Mamba and Mamba-2 share, and those of `lines`."""
    return Family(
        name,
        tree,
        LINES + lines,
        ignore=["lm_head.weight"],
        transforms={"flat": FLAT},
        prepare=chain(add_prefix("backbone."), untie_head("lm_head.weight", "backbone.embeddings.weight")),
        hf_config=hf_config,
        finish=remove_prefix("backbone."),
    )


FAMILY = mamba_family("mamba", tree, OWN_LINES, hf_config)
