"""Rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), and ours."""

from __future__ import annotations

import math
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_writer import ModelTree

DEFAULT_LENGTH = 2048  # written as max_position_embeddings for models without a limit


def rotary(
    config: ConfigReader, order: str = "halves", fraction: float | None = None, base: float = 10000.0
) -> dict[str, Any]:
    """`fraction` and `base`: the family's defaults; without a fraction, whole heads are rotated."""
    rope = config.nested("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if fraction is None:
        fraction = rope.require("partial_rotary_factor", 1.0, None) or 1.0
    else:
        fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or fraction
    return {
        "kind": "rotary",
        "base": float(rope.get("rope_theta") or config.get("rope_theta") or base),
        "order": order,
        "fraction": fraction,
        "scaling": scaling(rope, config.get("max_position_embeddings")),
    }


def scaling(rope: ConfigReader, length: int | None) -> dict[str, Any]:
    """`length`: the training length, where the scaling itself does not give it."""
    kinds = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
    kind = rope.map_value("rope_type" if "rope_type" in rope else "type", kinds, "default")
    if kind == "default":
        return {"kind": "none"}
    factor = rope["factor"]
    if kind == "linear":
        rope.get("original_max_position_embeddings")  # no effect
        return {"kind": kind, "factor": factor}
    original = rope.get("original_max_position_embeddings") or length
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return {"kind": kind, "factor": factor, "original": original, "low": low, "high": high}
    found = {
        "kind": "yarn",
        "factor": factor,
        "original": original,
        "fast": rope.get("beta_fast") or 32.0,
        "slow": rope.get("beta_slow") or 1.0,
        "whole_planes": rope.get("truncate", True),
    }
    attention_factor = rope.get("attention_factor")
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and scale and scale_all:
        attention_factor = yarn_scale(factor, scale) / yarn_scale(factor, scale_all)
    return found if attention_factor is None else found | {"attention_factor": attention_factor}


def rope_parameters(ours: ModelTree, partial: bool = False) -> dict[str, Any]:
    """Our rotary positions as `rope_parameters`, with `max_position_embeddings`; `partial`: write the rotated fraction
    of each head."""
    path = "decoder.mixer.positions"
    kind, scaled = ours.get(f"{path}.scaling.kind", "none"), f"{path}.scaling"
    found = {"rope_type": "default" if kind == "none" else kind, "rope_theta": ours[f"{path}.base"]}
    if partial:
        found["partial_rotary_factor"] = ours[f"{path}.fraction"]
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "truncate": "whole_planes",
        "attention_factor": "attention_factor",
    }
    found |= {key: value for key, name in names.items() if (value := ours.get(f"{scaled}.{name}")) is not None}
    length = int(ours.get(f"{scaled}.original", DEFAULT_LENGTH) * ours.get(f"{scaled}.factor", 1))
    return {"rope_parameters": found, "max_position_embeddings": length}


def yarn_scale(factor: float, scale: float) -> float:
    """YaRN's attention factor (Peng et al. 2023, eq. 22), with its logarithmic term times `scale`."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
