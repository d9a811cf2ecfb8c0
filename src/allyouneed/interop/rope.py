"""Their rotary positions as ours: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""

from __future__ import annotations

import math
from typing import Any

from allyouneed.interop.reader import Reader


def rotary(config: Reader, order: str = "halves", fraction: float = 1.0, base: float = 10000.0) -> dict[str, Any]:
    """`fraction` and `base` are the family's own where the config says nothing."""
    said = config.inside("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    fraction = said.get("partial_rotary_factor") or config.get("partial_rotary_factor") or fraction
    found = {
        "kind": "rotary",
        "base": float(said.get("rope_theta") or config.get("rope_theta") or base),
        "order": order,
        "fraction": fraction,
        "scaling": scaling(said, config.get("max_position_embeddings")),
    }
    said.finish()
    return found


def scaling(said: Reader, length: int | None) -> dict[str, Any]:
    """`length`: of the sentences trained on, where the scaling does not say it itself."""
    kinds = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
    kind = said.choose("rope_type" if "rope_type" in said else "type", kinds, "default")
    if kind == "default":
        return {"kind": "none"}
    factor = said["factor"]
    if kind == "linear":
        said.get("original_max_position_embeddings")  # says what it was trained on, and changes nothing
        return {"kind": kind, "factor": factor}
    original = said.get("original_max_position_embeddings") or length
    if kind == "llama3":
        low, high = said["low_freq_factor"], said["high_freq_factor"]
        return {"kind": kind, "factor": factor, "original": original, "low": low, "high": high}
    found = {
        "kind": "yarn",
        "factor": factor,
        "original": original,
        "fast": said.get("beta_fast") or 32.0,
        "slow": said.get("beta_slow") or 1.0,
        "whole_planes": said.get("truncate", True),
    }
    sharpened = said.get("attention_factor")
    scale, everywhere = said.get("mscale"), said.get("mscale_all_dim")
    if sharpened is None and scale and everywhere:
        sharpened = grown(factor, scale) / grown(factor, everywhere)
    return found if sharpened is None else found | {"attention_factor": sharpened}


def grown(factor: float, scale: float) -> float:
    """How much YaRN sharpens (Peng et al. 2023, eq. 22), `scale` times as much as the paper."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
