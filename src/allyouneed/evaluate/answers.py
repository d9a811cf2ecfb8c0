"""How good answers are that are no texts: classes, tags, scores, matches. All figures go from 0 to 100."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allyouneed.errors import UserError

BEGINS, INSIDE, ENDS = frozenset("BS"), frozenset("IME"), frozenset("ES")  # BIO, BIOES and BMES


def accuracy(found: Sequence[str], expected: Sequence[str]) -> float:
    _check(found, expected)
    return 100 * sum(f == e for f, e in zip(found, expected, strict=True)) / len(expected)


def macro_f1(found: Sequence[str], expected: Sequence[str]) -> float:
    """The mean over all classes that occur, found or expected, of 2·hits / (found + expected)."""
    _check(found, expected)
    hits = Counter(f for f, e in zip(found, expected, strict=True) if f == e)
    here, there = Counter(found), Counter(expected)
    return 100 * float(np.mean([2 * hits[label] / (here[label] + there[label]) for label in {*here, *there}]))


class Span(NamedTuple):
    """Words `begin` up to `end` are a `kind`."""

    begin: int
    end: int
    kind: str


def spans(tags: Sequence[str]) -> list[Span]:
    """What tags such as B-NP, I-NP, O say (BIO, BIOES or BMES). A span also begins where a word inside one follows
    none of its kind, as conlleval has it."""
    found: list[Span] = []
    begin, kind = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        letter, _, name = tag.partition("-")
        if kind and (letter not in INSIDE or name != kind):
            found.append(Span(begin, place, kind))
            kind = ""
        if letter in BEGINS | INSIDE and name and not kind:
            begin, kind = place, name
        if kind and letter in ENDS:
            found.append(Span(begin, place + 1, kind))
            kind = ""
    return found


def tag_spans(labels: Sequence[str]) -> bool:
    """Whether tags mark spans, or are words' own classes (parts of speech)."""
    return any(label.startswith(("B-", "I-")) for label in labels)


def span_f1(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> float:
    """2·hits / (found + expected) over the spans of all sentences (Tjong Kim Sang, Buchholz 2000)."""
    hits = total = 0
    for here, there in zip(found, expected, strict=True):
        one, other = set(spans(here)), set(spans(there))
        hits += len(one & other)
        total += len(one) + len(other)
    return 200 * hits / total if total else 100.0


def pearson(found: Sequence[float], expected: Sequence[float]) -> float:
    """How well a line fits; 0 where either side is all the same."""
    _check(found, expected)
    one, other = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return 100 * float((one * other).sum()) / size if size > 0 else 0.0


def spearman(found: Sequence[float], expected: Sequence[float]) -> float:
    """How well the order fits: Pearson of the ranks, equals sharing the mean of theirs."""
    return pearson(_ranks(found).tolist(), _ranks(expected).tolist())


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return means


def recall_at_1(scores: NDArray[np.floating], right: NDArray[np.integer]) -> float:
    """How often the highest score of a row is in its right column; of equal ones each has its share."""
    own = np.take_along_axis(scores, right[:, None], 1)
    better, equal = (scores > own).sum(1), (scores == own).sum(1)
    return 100 * float(np.mean(np.where(better == 0, 1 / equal, 0.0)))


def _check(found: Sequence[object], expected: Sequence[object]) -> None:
    if len(found) != len(expected):
        raise UserError(f"{len(found)} answers but {len(expected)} expected ones; there must be one for each")
    if not expected:
        raise UserError("there is nothing to evaluate")
