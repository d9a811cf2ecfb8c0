"""Intervals and verdicts from few seeds and many examples.

A result is an array of figures, (seeds, examples), of the same examples for every model: losses, or 1 for right and 0
for wrong. Examples are resampled (percentile bootstrap, Efron 1979; paired, Koehn 2004), because their figures are many
and skewed. Seeds are too few to be resampled: three give Student's t. The two sources of variance are joined by the
distances of their limits from the mean (Zou, Donner 2008, eq. 2), so that each keeps its own shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from allyouneed.errors import UserError

LEVEL = 0.95
RESAMPLES = 2000
CHUNK = 1 << 24  # draws held at a time
Verdict = Literal["higher", "lower", "inconclusive"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean, and the interval that covers the true one at this level. Without several seeds it covers examples only:
    another run of the same model may differ by more."""

    mean: float
    low: float
    high: float
    seeds: int
    examples: int

    @property
    def width(self) -> float:
        return self.high - self.low

    def text(self, digits: int = 3) -> str:
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def interval(
    figures: ArrayLike, weights: ArrayLike | None = None, *, level: float = LEVEL, seed: int = 0
) -> ConfidenceInterval:
    """The mean of figures (seeds, examples), or (seeds,) where each run gives one figure. `weights`: of the examples,
    such as their tokens, if a figure is a mean over them."""
    table = np.asarray(figures, np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size:
        raise ValueError(f"figures have shape {table.shape}; expected (seeds, examples)")
    if not np.isfinite(table).all():
        raise ValueError("figures are not finite: a diverged run is reported, not averaged")
    seeds, examples = table.shape
    shares = np.ones(examples) if weights is None else np.asarray(weights, np.float64)
    if shares.shape != (examples,) or not (shares >= 0).all() or not shares.sum():
        raise ValueError(f"{shares.shape} weights of {examples} examples; expected one each, above 0")
    each = table @ shares / shares.sum()  # (seeds)
    mean = float(each.mean())
    low, high = _resampled(table.mean(0), shares, level, seed) if examples > 1 else (mean, mean)
    spread = student(seeds - 1, level) * float(each.std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else 0.0
    below, above = math.hypot(max(0.0, mean - low), spread), math.hypot(max(0.0, high - mean), spread)
    return ConfidenceInterval(mean, mean - below, mean + above, seeds, examples)


def difference(
    first: ArrayLike, second: ArrayLike, weights: ArrayLike | None = None, *, level: float = LEVEL, seed: int = 0
) -> ConfidenceInterval:
    """How much higher the first result is than the second: paired, so both have the same seeds and examples."""
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if one.shape != other.shape:
        raise ValueError(f"results of shapes {one.shape} and {other.shape} are not paired")
    return interval(one - other, weights, level=level, seed=seed)


def verdict(found: ConfidenceInterval, margin: float = 0.0) -> Verdict:
    """Whether a difference is above `margin` or below its negative; inconclusive if the interval says neither."""
    return "higher" if found.low > margin else "lower" if found.high < -margin else "inconclusive"


def _resampled(figures: Floats, weights: Floats, level: float, seed: int) -> tuple[float, float]:
    """Percentiles of the weighted mean of examples that are drawn with replacement; the same for the same seed."""
    generator, examples = np.random.default_rng(seed), len(figures)
    weighted, means = figures * weights, np.empty(RESAMPLES)
    step = max(1, CHUNK // examples)
    for begin in range(0, RESAMPLES, step):
        drawn = generator.integers(examples, size=(min(step, RESAMPLES - begin), examples))
        total = weights[drawn].sum(1)
        means[begin : begin + step] = weighted[drawn].sum(1) / np.where(total > 0, total, 1.0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def student(freedom: int, level: float = LEVEL) -> float:
    """The quantile of Student's t whose interval ±t has this probability (Abramowitz, Stegun 1964, 26.7.3, 26.7.4)."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_probability(middle, freedom) < level else (low, middle)
    return high


def _student_probability(t: float, freedom: int) -> float:
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    if freedom == 1:
        return 2 * angle / math.pi
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


@dataclass(frozen=True)
class Control:
    """A measurement whose result is known: outside these bounds the experiment is broken, whatever else it found."""

    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def lands(self) -> bool:
        return self.low <= self.value <= self.high  # false for NaN


def require_controls(controls: Sequence[Control]) -> None:
    """Refuse to print results beside controls that do not land."""
    if wrong := [one for one in controls if not one.lands]:
        lines = [f"{one.name}: {one.value:.4g}, expected {_bounds(one)}" for one in wrong]
        raise UserError(
            f"{len(wrong)} of {len(controls)} controls do not land, so the other results are not shown:\n  "
            + "\n  ".join(lines)
        )


def _bounds(one: Control) -> str:
    if math.isinf(one.low) or math.isinf(one.high):
        return f"at most {one.high:g}" if math.isinf(one.low) else f"at least {one.low:g}"
    return f"{one.low:g} to {one.high:g}"
