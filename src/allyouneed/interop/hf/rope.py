"""Their rotary positions as ours: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""

from __future__ import annotations

import math
from typing import Any

from allyouneed.interop.hf.config_reader import Reader
from allyouneed.interop.hf.config_writer import Said

USUAL = 2048  # places, where a model of ours knows no limit


def rotary(
    config: Reader, order: str = "halves", fraction: float | None = None, base: float = 10000.0
) -> dict[str, Any]:
    """`fraction` and `base` are the family's own where the config says nothing; most families turn whole heads."""
    said = config.inside("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    if fraction is None:
        fraction = said.only("partial_rotary_factor", 1.0, None) or 1.0
    else:
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


def turned(said: Said, partly: bool = False) -> dict[str, Any]:
    """Our rotary positions as `rope_parameters`, and the length that these are for; `partly`: of families that may turn
    a part of each head."""
    path = "decoder.mixer.positions"
    kind, at = said.get(f"{path}.scaling.kind", "none"), f"{path}.scaling"
    found = {"rope_type": "default" if kind == "none" else kind, "rope_theta": said[f"{path}.base"]}
    if partly:
        found["partial_rotary_factor"] = said[f"{path}.fraction"]
    words = {
        "factor": "factor",
        "original_max_position_embeddings": "original",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_fast": "fast",
        "beta_slow": "slow",
        "truncate": "whole_planes",
        "attention_factor": "attention_factor",
    }
    found |= {word: value for word, ours in words.items() if (value := said.get(f"{at}.{ours}")) is not None}
    length = int(said.get(f"{at}.original", USUAL) * said.get(f"{at}.factor", 1))
    return {"rope_parameters": found, "max_position_embeddings": length}


def grown(factor: float, scale: float) -> float:
    """How much YaRN sharpens (Peng et al. 2023, eq. 22), `scale` times as much as the paper."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
