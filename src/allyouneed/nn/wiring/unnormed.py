"""Wirings without norms, used before layer normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from allyouneed.nn.wiring.residual import BlockFormula, Call, Chained


class Plain(Chained):
    """Sublayer(x) without skip connections (Bahdanau et al. 2015)."""

    norms_each: ClassVar[int] = 0
    kind: Literal["plain"] = "plain"

    def before(self, x: Any) -> Any:
        return x

    def after(self, x: Any, y: Any) -> Any:
        return y


class ScaledResidual(BlockFormula):
    """Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", 3.2–3.4: y = Mixer(x), plus the
    cross-attention of y; the layer gives (x + y) · √½, which preserves the variance."""

    kind: Literal["scaled-residual"] = "scaled-residual"

    def run(self, stream: Any, sublayers: Sequence[Call], norms: Sequence[Call]) -> Any:
        first, *others = sublayers
        y = first(stream)
        for f in others:
            y = y + f(y)
        return (stream + y) * 0.5**0.5

    def norm_count(self, sublayers: int) -> int:
        return 0
