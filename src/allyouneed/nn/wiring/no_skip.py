"""A wiring without a skip connection."""

from __future__ import annotations

from typing import Any, Literal

from allyouneed.nn.wiring.residual import Call, Chained, FinalNorm


class NoSkip(Chained, FinalNorm):
    """Sublayer(LayerNorm(x)), no skip connection (Yu et al. 2023, eq. 17; Dong, Cordonnier, Loukas 2021, "Attention is
    Not All You Need")."""

    kind: Literal["no-skip"] = "no-skip"

    def before(self, x: Any, norm: Call) -> Any:
        return norm(x)

    def after(self, x: Any, y: Any, norm: Call) -> Any:
        return y
