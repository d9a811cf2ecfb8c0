"""Qwen2 (Yang et al. 2024): Llama with a bias for queries, keys and values; some layers may have a sliding window."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig

PATTERNS = {"full_attention": "causal", "sliding_attention": "causal & window({})"}


def layer_patterns(config: ConfigReader, default: list[str] | None = None) -> list[tuple[str, int]]:
    """(pattern, number of consecutive layers); `default`: the layer types where the config has none."""
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
    texts = [PATTERNS.get(kind, "causal").format(window) for kind in kinds]
    return [(text, len(list(run))) for text, run in groupby(texts)]


@strict_config("max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    bias = {"q": True, "k": True, "v": True, "out": False}
    channel = llama.swiglu(config, bias=False)
    layers = [
        {
            "repeat": count,
            "wiring": "pre-norm",
            "mixer": llama.attention(config, pattern=pattern, bias=bias),
            "channel": channel,
        }
        for pattern, count in layer_patterns(config)
    ]
    return llama.decoder(config, layers)


def layer_type_fields(ours: ModelTree) -> dict[str, Any]:
    """Inverse of `layer_patterns`."""
    window = llama.sliding_window(ours)
    plain = [layer.get("mixer.pattern") == "causal" for layer in ours.layers("decoder")]
    return {
        "layer_types": ["full_attention" if full else "sliding_attention" for full in plain],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("Qwen2ForCausalLM"),
        **llama.shared_fields(ours),
        **llama.mlp_fields(ours),
        **layer_type_fields(ours),
    }


FAMILY = Family(
    "qwen2", tree, llama.LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
