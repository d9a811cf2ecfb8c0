"""A wiring without a skip connection."""

from __future__ import annotations

from typing import Literal

from allyouneed.nn.depth import Depth
from allyouneed.nn.wiring.residual import Chained, FinalNorm, Step


class NoSkip(Chained, FinalNorm):
    """Sublayer(LayerNorm(x)), no skip connection (Yu et al. 2023, eq. 17; Dong, Cordonnier, Loukas 2021, "Attention is
    Not All You Need")."""

    kind: Literal["no-skip"] = "no-skip"

    def step(self, depth: Depth) -> Step:
        return lambda x, f, norm: f(norm(x))
