"""Wirings without norms, used before layer normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from allyouneed.nn.depth import Depth
from allyouneed.nn.wiring.residual import Call, Chained, Residual, Step


class Plain(Chained):
    """Sublayer(x) without skip connections (Bahdanau et al. 2015)."""

    kind: Literal["plain"] = "plain"

    def step(self, depth: Depth) -> Step:
        return lambda x, f: f(x)

    def norm_count(self, sublayers: int) -> int:
        return 0


class ScaledResidual(Residual):
    """Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", 3.2–3.4: y = Mixer(x), plus the
    cross-attention of y; the layer gives (x + y) · √½, which preserves the variance."""

    kind: Literal["scaled-residual"] = "scaled-residual"

    def run(self, stream: Any, branches: Sequence[Call], norms: Sequence[Call], depth: Depth) -> Any:
        first, *others = branches
        y = first(stream)
        for f in others:
            y = y + f(y)
        return (stream + y) * 0.5**0.5

    def norm_count(self, sublayers: int) -> int:
        return 0
