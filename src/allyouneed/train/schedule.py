"""Learning-rate schedules: functions of the step alone (the first update is step 1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from allyouneed.config import Part


class Schedule(Part, slot="schedule", default="paper"):
    @abstractmethod
    def rate(self, step: int, width: int, total: int) -> float:
        """The learning rate of an update, for a model of this width in a run of `total` updates."""


class Paper(Schedule):
    """ "Attention Is All You Need", eq. 3: width^-0.5 · min(step^-0.5, step · warmup^-1.5)."""

    kind: Literal["paper"] = "paper"
    warmup: PositiveInt = 4000
    factor: PositiveFloat = 1.0

    def rate(self, step: int, width: int, total: int) -> float:
        return self.factor * width**-0.5 * min(step**-0.5, step * self.warmup**-1.5)


class InverseSqrt(Schedule):
    """The same curve, given by its peak and independent of width."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    peak: PositiveFloat
    warmup: PositiveInt = 4000

    def rate(self, step: int, width: int, total: int) -> float:
        return self.peak * min((self.warmup / step) ** 0.5, step / self.warmup)


class Cosine(Schedule):
    """Linear warmup, then half a cosine down to `floor` at the last step (Loshchilov, Hutter 2017, eq. 5)."""

    kind: Literal["cosine"] = "cosine"
    peak: PositiveFloat
    warmup: NonNegativeInt = 4000
    floor: Annotated[float, Field(ge=0)] = 0.0

    def rate(self, step: int, width: int, total: int) -> float:
        if step < self.warmup:
            return self.peak * step / self.warmup
        gone = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * gone))


class Constant(Schedule):
    """Linear warmup, then constant."""

    kind: Literal["constant"] = "constant"
    peak: PositiveFloat
    warmup: NonNegativeInt = 0

    def rate(self, step: int, width: int, total: int) -> float:
        return self.peak * min(1.0, step / self.warmup) if self.warmup else self.peak
