"""The rule by which every architecture gets its learning rate. There is one, so that none is tuned more than another.

Each is trained at every rate of the grid with the first seed, and has the rate with the lowest validation loss. While
that is the lowest or highest rate that was tried, the grid grows by a step on that side. All other seeds train at the
rate that was found. The curve over rates is kept: how wide its valley is, is a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEP = math.sqrt(10)  # two rates per factor of ten
NEAR = 0.02  # within this share of the lowest loss, a rate is as good


def grid(low: float, high: float, step: float = STEP) -> tuple[float, ...]:
    """Rates from low to high, each `step` times the one before, rounded to two digits."""
    count = round(math.log(high / low, step))
    return tuple(rounded(low * step**n) for n in range(count + 1))


def rounded(rate: float) -> float:
    return float(f"{rate:.1e}")


@dataclass(frozen=True)
class RateRule:
    """The rule. `rates`: the grid at first; `extensions`: steps by which it may grow on each side."""

    rates: tuple[float, ...] = field(default_factory=lambda: grid(1e-3, 1e-2))
    step: float = STEP
    extensions: int = 2

    @property
    def most(self) -> int:
        """Rates that are tried at most."""
        return len(self.rates) + 2 * self.extensions

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest rate that may be tried."""
        factor = self.step**self.extensions
        return rounded(min(self.rates) / factor), rounded(max(self.rates) * factor)

    def next(self, losses: Mapping[float, float | None]) -> tuple[float, ...]:
        """The rates to be tried next, given the validation losses so far (None: diverged); none: the sweep is over."""
        if missing := tuple(rate for rate in self.rates if rate not in losses):
            return missing
        curve, (least, most) = RateCurve(dict(losses)), self.bounds
        if curve.best is None:  # everything diverged
            wanted = rounded(min(losses) / self.step)
        elif curve.best == min(losses):
            wanted = rounded(curve.best / self.step)
        elif curve.best == max(losses):
            wanted = rounded(curve.best * self.step)
        else:
            return ()
        return (wanted,) if least * 0.99 <= wanted <= most * 1.01 else ()


@dataclass(frozen=True)
class RateCurve:
    """Validation losses by rate; None: diverged."""

    losses: dict[float, float | None]

    @property
    def finished(self) -> dict[float, float]:
        return {rate: loss for rate, loss in sorted(self.losses.items()) if loss is not None and math.isfinite(loss)}

    @property
    def diverged(self) -> tuple[float, ...]:
        """Rates at which training diverged."""
        return tuple(sorted(rate for rate in self.losses if rate not in self.finished))

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss, the lower one of equals; None if all diverged."""
        return min(self.finished, key=lambda rate: (self.finished[rate], rate), default=None)

    @property
    def at_edge(self) -> bool:
        """Whether a better rate may lie outside what was tried. Above the best rate, a diverged one is a bound."""
        return self.best is not None and self.best in (min(self.losses), max(self.losses))

    @property
    def width(self) -> float:
        """The factor between the lowest and the highest of the neighbouring rates that are as good as the best."""
        if self.best is None:
            return 0.0
        rates, good = sorted(self.losses), {r for r, loss in self.finished.items() if loss <= self._as_good}
        low = high = rates.index(self.best)
        while low > 0 and rates[low - 1] in good:
            low -= 1
        while high + 1 < len(rates) and rates[high + 1] in good:
            high += 1
        return rates[high] / rates[low]

    @property
    def _as_good(self) -> float:
        assert self.best is not None
        lowest = self.finished[self.best]
        return lowest + NEAR * abs(lowest)

    def warnings(self) -> list[str]:
        """What a reader must know before comparing this model."""
        if self.best is None:
            return [f"diverged at every rate from {min(self.losses):g} to {max(self.losses):g}"]
        if self.at_edge:
            side = "lowest" if self.best == min(self.losses) else "highest"
            return [f"its best rate, {self.best:g}, is the {side} that was tried; a better one may lie outside"]
        return []

    def to_tree(self) -> dict[str, Any]:
        return {
            "losses": [[rate, self.losses[rate]] for rate in sorted(self.losses)],
            "best": self.best,
            "at_edge": self.at_edge,
            "width": self.width,
        }


def sweep(
    names: Sequence[str],
    train: Callable[[list[tuple[str, float]]], Mapping[tuple[str, float], float | None]],
    rule: RateRule | None = None,
) -> dict[str, RateCurve]:
    """The curve of each model. `train`: the validation losses of models at rates, a round of them at a time, so that
    processes can share it."""
    rule = rule or RateRule()
    losses: dict[str, dict[float, float | None]] = {name: {} for name in names}
    while wanted := [(name, rate) for name in names for rate in rule.next(losses[name])]:
        found = train(wanted)
        for name, rate in wanted:
            losses[name][rate] = found[name, rate]
    return {name: RateCurve(found) for name, found in losses.items()}
