"""A claim as data: what a paper says, the smallest honest test, and the range of each figure that the claim predicts.

The range comes from the paper, not from our result; what is changed after a first run is recorded (`revised`). A figure
with an interval inside its range confirms the claim, outside refutes it, across a bound leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from allyouneed.errors import UserError
from allyouneed.lab.statistics import interval

Text = tuple[str, str]  # English, Chinese
Verdict = Literal["confirmed", "refuted", "inconclusive", "not testable", "not run"]
HOME = Path(__file__).parent


@dataclass(frozen=True)
class Figure:
    """A measured figure, one value for each seed; a single one is exact. The claim predicts `low` to `high`. A
    `control` must land where theory says, or the experiment tells nothing."""

    name: Text
    values: tuple[float, ...]
    low: float = -math.inf
    high: float = math.inf
    control: bool = False

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        if not all(map(math.isfinite, self.values)):
            return -math.inf, math.inf
        found = interval(self.values)
        return found.low, found.high

    @property
    def predicts(self) -> bool:
        return not (math.isinf(self.low) and math.isinf(self.high))

    @property
    def verdict(self) -> Verdict:
        low, high = self.interval
        if self.low <= low and high <= self.high:
            return "confirmed"
        return "refuted" if high < self.low or low > self.high else "inconclusive"


@dataclass(frozen=True)
class Outcome:
    """What an experiment found. `curves`: y by x, by name, drawn with the labels `axes` (x, y)."""

    figures: tuple[Figure, ...]
    curves: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")
    log: bool = False  # both axes

    @property
    def verdict(self) -> Verdict:
        """Refuted if one prediction is; confirmed if all are and every control landed."""
        if any(figure.control and figure.verdict != "confirmed" for figure in self.figures):
            return "inconclusive"
        found = {figure.verdict for figure in self.figures if figure.predicts and not figure.control}
        return "refuted" if "refuted" in found else "confirmed" if found == {"confirmed"} else "inconclusive"

    def tree(self) -> dict[str, Any]:
        def bound(value: float) -> float | None:
            return None if math.isinf(value) else value

        figures = [
            {"name": list(one.name), "values": [float(f"{value:.6g}") for value in one.values]}
            | {"low": bound(one.low), "high": bound(one.high), "control": one.control}
            for one in self.figures
        ]
        curves = {name: [[float(x), float(f"{y:.6g}")] for x, y in line.items()] for name, line in self.curves.items()}
        return {"figures": figures, "curves": curves, "axes": list(self.axes), "log": self.log}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        figures = tuple(
            Figure(
                (one["name"][0], one["name"][1]),
                tuple(one["values"]),
                -math.inf if one["low"] is None else one["low"],
                math.inf if one["high"] is None else one["high"],
                one["control"],
            )
            for one in tree["figures"]
        )
        curves = {name: dict(map(tuple, line)) for name, line in tree["curves"].items()}
        return cls(figures, curves, (tree["axes"][0], tree["axes"][1]), tree["log"])


@dataclass(frozen=True)
class ClaimRun:
    """How large an experiment is: `tiny` only rehearses it, and its figures say nothing."""

    device: str = "cpu"
    tiny: bool = False

    @property
    def seeds(self) -> range:
        return range(2 if self.tiny else 3)

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Claim:
    """`says`: the claim with its figure as published; `checked`: the figure was read in the paper or its authors' code,
    otherwise it is quoted as recalled. `tests`: the experiment. `needs`: the device. Without `measure`, `why_not` says
    why it cannot be tested here."""

    paper: str
    says: Text
    tests: Text = ("", "")
    measure: Callable[[ClaimRun], Outcome] | None = None
    needs: Literal["cpu", "gpu"] = "cpu"
    checked: bool = False
    why_not: Text = ("", "")
    revised: Text = ("", "")


def names() -> dict[str, str]:
    """The module of every claim, by its name; in the order of the folders."""
    files = [path for path in sorted(HOME.glob("*/*.py")) if path.stem != "__init__"]
    return {path.stem.replace("_", "-"): f"{__package__}.{path.parent.name}.{path.stem}" for path in files}


def topic(name: str) -> str:
    return names()[name].split(".")[-2]


@cache
def find(name: str) -> Claim:
    known = names()
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"no claim {name!r}{hint}; `allyouneed claims --list` lists all {len(known)}")
    found: Claim = import_module(known[name]).CLAIM
    return found


def verdict(claim: Claim, outcome: Outcome | None) -> Verdict:
    if claim.measure is None:
        return "not testable"
    return "not run" if outcome is None else outcome.verdict
