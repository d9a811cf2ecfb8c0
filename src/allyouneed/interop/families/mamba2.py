"""Mamba-2 (Dao, Gu 2024): heads with one decay each, a norm of the gated output."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.families.mamba import FIELDS, mamba_family
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree

OWN = """
decoder.mixer: {kind: mamba2}
decoder.mixer.heads = num_heads ?? 128
decoder.mixer.head_width = head_dim, expand |expand
decoder.mixer.groups = n_groups ?? 8
head.kind = architectures |decoder Mamba2ForCausalLM
?? {state_size: 128, head_dim: 64, tie_word_embeddings: false}
ignore chunk_size
"""


def read_head_width(config: ConfigReader, line: Line) -> int | None:
    heads, head_width, width = config["num_heads"], config["head_dim"], config["hidden_size"]
    if heads * head_width != config["expand"] * width:
        config.problems.append(f"expand: {config['expand']} × hidden_size is not num_heads × head_dim")
    limits = [_number(limit) for limit in config.get("time_step_limit") or (0.0, "inf")]
    if limits != [0.0, float("inf")]:
        config.problems.append(f"time_step_limit: {limits} is not supported (allowed: [0.0, inf])")
    return None if heads * head_width == 2 * width else head_width


def write_head_width(ours: ModelTree, line: Line) -> dict[str, int]:
    heads, width = ours["decoder.mixer.heads"], ours["width"]
    head_width = ours.get(line.path) or 2 * width // heads
    return {"head_dim": head_width, "expand": heads * head_width // width}


def _number(value: Any) -> float:
    """Transformers writes infinity, which JSON has no word for, as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


OWN_LINES = """
decoder.blocks.{n}.sublayers.mixer.step_bias = backbone.layers.{n}.mixer.dt_bias
decoder.blocks.{n}.sublayers.mixer.norm.weight = backbone.layers.{n}.mixer.norm.weight
"""
EXPAND = Conversion(read_head_width, write_head_width)
FAMILY = mamba_family("mamba2", FIELDS + OWN, {"expand": EXPAND}, OWN_LINES)
