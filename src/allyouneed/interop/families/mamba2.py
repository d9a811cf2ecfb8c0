"""Mamba-2 (Dao, Gu 2024): heads with one decay each, a norm of the gated output."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.families.mamba import IGNORED_KEYS, config_fields, convolution, decoder, mamba_family
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import HfConfig

DEFAULTS = {
    "expand": 2,
    "state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "num_heads": 128,
    "head_dim": 64,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}


@strict_config("chunk_size", *IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS)
    heads, head_width, width = config["num_heads"], config["head_dim"], config["hidden_size"]
    if heads * head_width != config["expand"] * width:
        config.problems.append(f"expand: {config['expand']} × hidden_size is not num_heads × head_dim")
    limits = [_number(limit) for limit in config.get("time_step_limit") or (0.0, "inf")]
    if limits != [0.0, float("inf")]:
        config.problems.append(f"time_step_limit: {limits} is not supported (allowed: [0.0, inf])")
    mixer = {
        "kind": "mamba2",
        "heads": heads,
        "head_width": None if heads * head_width == 2 * width else head_width,
        "groups": config["n_groups"],
        "state": config["state_size"],
        **convolution(config),
    }
    return decoder(config, mixer)


def _number(value: Any) -> float:
    """Transformers writes infinity, which JSON has no word for, as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


OWN_LINES = """
decoder.blocks.{n}.sublayers.mixer.step_bias = backbone.layers.{n}.mixer.dt_bias
decoder.blocks.{n}.sublayers.mixer.norm.weight = backbone.layers.{n}.mixer.norm.weight
"""


def hf_config(ours: ModelTree) -> HfConfig:
    heads, width = ours["decoder.mixer.heads"], ours["width"]
    head_width = ours.get("decoder.mixer.head_width") or 2 * width // heads
    return config_fields(ours, "Mamba2ForCausalLM") | {
        "num_heads": heads,
        "head_dim": head_width,
        "n_groups": ours["decoder.mixer.groups"],
        "expand": heads * head_width // width,
    }


FAMILY = mamba_family("mamba2", tree, OWN_LINES, hf_config)
