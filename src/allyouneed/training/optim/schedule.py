"""Learning-rate schedules: functions of the step alone (the first update is step 1).

A warm-up that the recipe does not set follows the length of the run: the paper's 4000 steps would be more than all of
a run of 300. A shorter one reaches the same peak sooner: with the peak that eq. 3 gives for a short warm-up, runs
diverge. It is fixed when a run starts and kept when the run is resumed or extended.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from allyouneed.config import Part

PAPER_WARMUP = 4000  # 5.3
SHARE = 2  # at most one half of a run is warm-up (on Multi30k, 300 steps, better than a quarter or a tenth)


def default_warmup(total: int) -> int:
    """The warm-up of a run of `total` updates (0: unknown) whose recipe sets none."""
    return max(1, min(PAPER_WARMUP, total // SHARE)) if total else PAPER_WARMUP


class Schedule(Part, slot="schedule", default="paper"):
    @abstractmethod
    def rate(self, step: int, width: int, total: int) -> float:
        """The learning rate of an update, for a model of this width in a run of `total` updates."""

    @property
    def follows_length(self) -> bool:
        """Whether the warm-up is left to the length of the run."""
        return getattr(self, "warmup", 0) is None

    def with_warmup(self, steps: int, width: int) -> Schedule:
        """This schedule with the warm-up that it leaves open, for a model of this width."""
        return self.model_copy(update={"warmup": steps})

    def warning(self, total: int) -> str | None:
        """What is wrong with this schedule in a run of `total` updates."""
        warmup = getattr(self, "warmup", None) or 0
        if warmup < total:
            return None
        return (
            f"schedule.warmup: {warmup:,} of {total:,} steps, so the rate hardly reaches its peak or not at all; "
            f"remove warmup (the default would be {default_warmup(total):,}), or raise steps"
        )


class Paper(Schedule):
    """ "Attention Is All You Need", eq. 3: width^-0.5 · min(step^-0.5, step · warmup^-1.5)."""

    kind: Literal["paper"] = "paper"
    warmup: PositiveInt | None = None
    """Steps of linear warmup; default: 4000, at most half of the run, with the same peak."""
    factor: PositiveFloat = 1.0
    """Multiplies the rate."""

    def with_warmup(self, steps: int, width: int) -> Schedule:
        if steps == PAPER_WARMUP:
            return self.model_copy(update={"warmup": steps})
        return InverseSqrt(peak=self.factor * (width * PAPER_WARMUP) ** -0.5, warmup=steps)

    def rate(self, step: int, width: int, total: int) -> float:
        if self.warmup is None:
            return self.with_warmup(default_warmup(total), width).rate(step, width, total)
        return self.factor * width**-0.5 * min(step**-0.5, step * self.warmup**-1.5)


class InverseSqrt(Schedule):
    """The same curve, given by its peak and independent of width."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    peak: PositiveFloat
    """Highest learning rate, reached after warmup."""
    warmup: PositiveInt | None = None
    """Steps of linear warmup; default: 4000, at most half of the run, with the same peak."""

    def rate(self, step: int, width: int, total: int) -> float:
        warmup = self.warmup or default_warmup(total)
        return self.peak * min((warmup / step) ** 0.5, step / warmup)


class Cosine(Schedule):
    """Linear warmup, then half a cosine down to `floor` at the last step (Loshchilov, Hutter 2017, eq. 5)."""

    kind: Literal["cosine"] = "cosine"
    peak: PositiveFloat
    """Highest learning rate, reached after warmup."""
    warmup: NonNegativeInt | None = None
    """Steps of linear warmup; default: 4000, at most half of the run, with the same peak."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step."""

    def rate(self, step: int, width: int, total: int) -> float:
        warmup = default_warmup(total) if self.warmup is None else self.warmup
        if step < warmup:
            return self.peak * step / warmup
        gone = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * gone))


class Constant(Schedule):
    """Linear warmup, then constant."""

    kind: Literal["constant"] = "constant"
    peak: PositiveFloat
    """Learning rate after warmup."""
    warmup: NonNegativeInt = 0
    """Steps of linear warmup."""

    def rate(self, step: int, width: int, total: int) -> float:
        return self.peak * min(1.0, step / self.warmup) if self.warmup else self.peak
