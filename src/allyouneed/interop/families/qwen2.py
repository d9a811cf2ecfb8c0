"""Qwen2 (Yang et al. 2024): Llama with a bias for queries, keys and values; some layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree

PATTERNS = {"full_attention": "causal", "sliding_attention": "causal & window({})"}


def read_patterns(config: ConfigReader, default: list[str] | None = None) -> list[str]:
    """The pattern of each layer; `default`: the layer types where the config has none."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    sliding = config.get("use_sliding_window", window is not None) and window is not None
    first = config.get("max_window_layers", 0)
    kinds = (
        config.get("layer_types")
        or default
        or ["sliding_attention" if sliding and number >= first else "full_attention" for number in range(count)]
    )
    unknown = sorted(set(kinds) - set(PATTERNS))
    config.problems.extend(
        f"layer_types: {kind!r} is not supported (allowed: {', '.join(PATTERNS)})" for kind in unknown
    )
    return [PATTERNS.get(kind, "causal").format(window) for kind in kinds]


def write_types(ours: ModelTree, line: Line) -> dict[str, Any]:
    window = ours.window()
    plain = [layer.get("mixer.pattern") == "causal" for layer in ours.layers("decoder")]
    return {
        "layer_types": ["full_attention" if full else "sliding_attention" for full in plain],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


FIELDS = llama.FIELDS + """
decoder.channel.bias: false
decoder[*].mixer.pattern = layer_types, sliding_window, use_sliding_window, max_window_layers |layer_types
"""  # fmt: skip
BIAS = """
decoder.mixer.bias: {q: true, k: true, v: true, out: false}
"""
LAYER_TYPES = {"layer_types": Conversion(lambda config, line: read_patterns(config), write_types)}
FAMILY = llama.family("qwen2", "Qwen2ForCausalLM", FIELDS + BIAS, conversions=LAYER_TYPES)
