"""Which pairs are worth training on: each rule counts and shows what it leaves out, in the same report as the readers.

Duplicates are recognised by 64-bit digests in a few sorted arrays, eight bytes a pair, so that a corpus far larger
than memory can be searched for them. Among a hundred million pairs, the chance that any two share one is 3e-4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from allyouneed.config import Config
from allyouneed.data.readers import Pair, Report

CHUNK = 4096


class Filters(Config):
    """Rules a pair must pass; lengths are in characters (the store has its own limit in tokens)."""

    duplicates: bool = False
    empty: bool = True
    ratio: Annotated[float, Field(ge=1)] | None = None
    max_length: PositiveInt | None = None

    def apply(self, pairs: Iterable[Pair], report: Report) -> Iterator[Pair]:
        """The pairs that pass. Duplicates are looked for among those that pass everything else."""
        passed = (pair for pair in pairs if self._passes(pair, report))
        return _first_of_each(passed, report) if self.duplicates else passed

    def _passes(self, pair: Pair, report: Report) -> bool:
        here, there = len(pair.source), len(pair.target)
        if self.empty and not (pair.source.strip() and pair.target.strip()):
            side = "target" if pair.source.strip() else "source"
            return _drop(report, "empty", pair, f"the {side} is empty")
        if self.max_length is not None and max(here, there) > self.max_length:
            return _drop(report, "too long", pair, f"{max(here, there)} characters, at most {self.max_length}")
        if self.ratio is not None and max(here, there) > self.ratio * max(min(here, there), 1):
            return _drop(report, "length ratio", pair, f"{here} against {there} characters, ratio over {self.ratio:g}")
        return True


def _drop(report: Report, why: str, pair: Pair, detail: str) -> bool:
    report.drop(why, pair.file, pair.line, detail, f"{pair.source}\t{pair.target}")
    return False


def _first_of_each(pairs: Iterator[Pair], report: Report) -> Iterator[Pair]:
    seen = Seen()
    while chunk := list(islice(pairs, CHUNK)):
        new = seen.add(np.array([_digest(pair) for pair in chunk], dtype=np.uint64))
        for pair, fresh in zip(chunk, new.tolist(), strict=True):
            if fresh:
                yield pair
            else:
                _drop(report, "duplicate", pair, "seen before")


def _digest(pair: Pair) -> int:
    # The lengths keep "ab"+"c" apart from "a"+"bc"; the same pair towards another language is another example.
    text = f"{len(pair.source)} {pair.to or ''} {pair.source}{pair.target}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Seen:
    """A set of 64-bit numbers as sorted arrays of falling size; equals are merged, so there are few to search."""

    def __init__(self) -> None:
        self.levels: list[NDArray[np.uint64]] = []

    def add(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these are new here, counting the first of several equal ones as new."""
        values, first = np.unique(digests, return_index=True)
        known = np.zeros(len(values), dtype=bool)
        for level in self.levels:
            at = np.minimum(np.searchsorted(level, values), len(level) - 1)
            known |= level[at] == values
        new = np.zeros(len(digests), dtype=bool)
        new[first[~known]] = True
        if not known.all():
            self._insert(values[~known])
        return new

    def _insert(self, values: NDArray[np.uint64]) -> None:
        while self.levels and len(self.levels[-1]) <= 2 * len(values):
            values = np.sort(np.concatenate([self.levels.pop(), values]), kind="stable")
        self.levels.append(values)
