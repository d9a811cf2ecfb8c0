"""Filters for training examples; each rule reports what it drops.

Duplicates are recognised by 64-bit digests in a few sorted arrays, eight bytes an example, so that a corpus far larger
than memory can be searched for them. Among a hundred million examples, the chance that any two share one is 3e-4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from allyouneed.config import Config
from allyouneed.data.files.readers import Example, Report

CHUNK = 4096

E = TypeVar("E", bound=Example)


class Filters(Config):
    """Rules an example must pass; lengths are in characters (the store has its own limit in tokens)."""

    duplicates: bool = False
    """Drop repeated examples."""
    empty: bool = True
    """Drop examples with an empty text."""
    ratio: Annotated[float, Field(ge=1)] | None = None
    """Drop pairs whose longer text has more than this many times the characters of the shorter; default: keep."""
    max_length: PositiveInt | None = None
    """Drop examples with a text of more characters; default: keep."""

    def apply(self, examples: Iterable[E], report: Report) -> Iterator[E]:
        """The examples that pass. Duplicates are searched among those that pass all other rules."""
        passed = (example for example in examples if self._passes(example, report))
        return _drop_duplicates(passed, report) if self.duplicates else passed

    def _passes(self, example: Example, report: Report) -> bool:
        lengths = [len(text) for text in example.texts]
        if self.empty and not all(text.strip() for text in example.texts):
            return _drop(report, "empty", example, f"{_empty_side(example)} is empty")
        if self.max_length is not None and max(lengths) > self.max_length:
            return _drop(report, "too long", example, f"{max(lengths)} characters, at most {self.max_length}")
        if self.ratio is not None and len(lengths) == 2 and max(lengths) > self.ratio * max(min(lengths), 1):
            here, there = lengths
            detail = f"{here} against {there} characters, ratio over {self.ratio:g}"
            return _drop(report, "length ratio", example, detail)
        return True


def _empty_side(example: Example) -> str:
    if len(example.texts) == 1:
        return "the text"
    return "the target" if example.texts[0].strip() else "the source"


def _drop(report: Report, reason: str, example: Example, detail: str) -> bool:
    report.drop(reason, example.file, example.line, detail, "\t".join(example.texts))
    return False


def _drop_duplicates(examples: Iterator[E], report: Report) -> Iterator[E]:
    seen = DigestSet()
    while chunk := list(islice(examples, CHUNK)):
        new = seen.add(np.array([_digest(example) for example in chunk], dtype=np.uint64))
        for example, fresh in zip(chunk, new.tolist(), strict=True):
            if fresh:
                yield example
            else:
                _drop(report, "duplicate", example, "seen before")


def _digest(example: Example) -> int:
    # lengths distinguish "ab"+"c" from "a"+"bc"; the same text with another label or language is another example
    lengths = " ".join(str(len(text)) for text in example.texts)
    text = f"{lengths} {example.metadata} {''.join(example.texts)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class DigestSet:
    """A set of 64-bit numbers as sorted arrays of decreasing size; arrays of similar size are merged, so few remain."""

    def __init__(self) -> None:
        self.levels: list[NDArray[np.uint64]] = []

    def add(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these are new; of several equal ones the first counts as new."""
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
