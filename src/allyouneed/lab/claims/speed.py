"""Decoding speeds of models of one size, for claims about a GPU."""

from __future__ import annotations

from typing import Any

from allyouneed.lab.claims.claim import ClaimRun
from allyouneed.lab.claims.trees import attention, built
from allyouneed.lab.comparison.speed import decoding_speeds


def model_of(mixer: dict[str, Any], run: ClaimRun, **keys: Any) -> dict[str, Any]:
    """About 1.3 billion parameters: 24 layers of width 2048."""
    width, layers = run.pick((2048, 24), (32, 2))
    layer = {
        "repeat": layers,
        "wiring": "pre-norm",
        "mixer": mixer,
        "channel": {"kind": "glu", "hidden": width * 8 // 3},
    }
    return {"kind": "decoder", "vocab": run.pick(32000, 64), "width": width, "norm": "rms", "decoder": [layer | keys]}


def heads(run: ClaimRun, **keys: Any) -> dict[str, Any]:
    return attention(run.pick(16, 4), positions="rotary", bias=False, **keys)


def tokens_per_second(
    trees: dict[str, dict[str, Any]], lengths: tuple[int, ...], run: ClaimRun
) -> dict[str, dict[float, float]]:
    """By name and context. Models take turns, two at a time fit the memory of one GPU."""
    import torch

    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    found: dict[str, dict[float, float]] = {}
    for name, tree in trees.items():
        model = built(tree).to(run.device, dtype)
        speeds = decoding_speeds([model], lengths)[0]
        found[name] = {float(n): float(speeds[str(n)]) for n in lengths if isinstance(speeds[str(n)], float)}
        del model
    return found
