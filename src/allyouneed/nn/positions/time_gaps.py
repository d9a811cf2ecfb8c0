"""Positions by the time that has passed, in buckets."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.absolute import Positions


class TimeGaps(Positions):
    """A learned vector per bucket of pos(v_i) = t(v_t) − t(v_i), the time from an item to the recommendation (Chen et
    al. 2019, "Behavior Sequence Transformer", 2.1): bucket ⌊log_base(1 + pos)⌋, the last one for all that is longer.

    In a text, where no times are known, pos is the position of the token.
    """

    kind: Literal["time-gaps"] = "time-gaps"
    buckets: Annotated[int, Field(gt=0)] = 32
    """Number of buckets; the last one has no end."""
    base: Annotated[float, Field(ge=1)] = 2.0
    """Ratio of the length of a bucket to that of the one before; 1: a bucket per unit of time."""

    def build(self, width: int) -> nn.Module:
        return TimeGapsModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=self.buckets * width)


class TimeGapsModule(nn.Embedding):
    def __init__(self, config: TimeGaps, width: int) -> None:
        super().__init__(config.buckets, width)
        self.base = config.base

    def forward(self, positions: Tensor) -> Tensor:
        gaps = positions.clamp(min=0)
        if self.base > 1:  # in float64: exact at the powers of 2
            gaps = (gaps.double() + 1).log2().div(math.log2(self.base)).floor().long()
        return super().forward(gaps.clamp(max=self.num_embeddings - 1))
