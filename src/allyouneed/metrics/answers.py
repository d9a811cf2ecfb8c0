"""Metrics for classes, tags, similarity scores and matches. All figures are from 0 to 100."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allyouneed.errors import UserError

BEGINS, INSIDE, ENDS = frozenset("BS"), frozenset("IME"), frozenset("ES")  # BIO, BIOES and BMES


def accuracy(found: Sequence[str], expected: Sequence[str]) -> float:
    _check(found, expected)
    return 100 * sum(f == e for f, e in zip(found, expected, strict=True)) / len(expected)


def macro_f1(found: Sequence[str], expected: Sequence[str]) -> float:
    """Mean of 2·hits / (found + expected) over all classes that occur on either side."""
    _check(found, expected)
    hits = Counter(f for f, e in zip(found, expected, strict=True) if f == e)
    predicted, true = Counter(found), Counter(expected)
    return 100 * float(np.mean([2 * hits[label] / (predicted[label] + true[label]) for label in {*predicted, *true}]))


def confusion(found: Sequence[str], expected: Sequence[str], labels: Sequence[str]) -> NDArray[np.int64]:
    """How often each of the labels (rows) was taken for each (columns); other labels are left out."""
    numbers = {label: number for number, label in enumerate(labels)}
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for answer, right in zip(found, expected, strict=True):
        if answer in numbers and right in numbers:
            counts[numbers[right], numbers[answer]] += 1
    return counts


def confusion_text(counts: NDArray[np.int64], labels: Sequence[str], most: int = 12) -> str:
    """The matrix, expected labels in rows and found ones in columns; of more than `most` labels only the most frequent
    errors."""
    if len(labels) <= most:
        side = max(map(len, labels), default=0)
        wide = [max(len(label), len(str(column.max()))) for label, column in zip(labels, counts.T, strict=True)]
        rows = [["", *labels], *([label, *map(str, row)] for label, row in zip(labels, counts.tolist(), strict=True))]
        lines = ["  ".join(f"{cell:>{size}}" for cell, size in zip(row, [side, *wide], strict=True)) for row in rows]
        return "\n".join(["expected in rows, found in columns:", *lines])
    wrong = counts * (1 - np.eye(len(labels), dtype=np.int64))
    worst = [(int(n), *divmod(int(n), len(labels))) for n in np.argsort(-wrong, axis=None, kind="stable")[:most]]
    lines = [f"  {labels[a]} taken for {labels[b]}: {wrong[a, b]:,}" for _, a, b in worst if wrong[a, b]]
    return "\n".join(["most frequent errors:", *lines]) if lines else ""


def label_figures(found: Sequence[Collection[str]], expected: Sequence[Collection[str]]) -> dict[str, float]:
    """`accuracy`: how often all labels of a text are right; F1 of all labels together (`micro-f1`) and the mean of
    those of each (`macro-f1`), of texts with any number of labels."""
    _check(found, expected)
    hits = Counter(label for f, e in zip(found, expected, strict=True) for label in set(f) & set(e))
    both = Counter(label for some in (*found, *expected) for label in set(some))
    same = sum(set(f) == set(e) for f, e in zip(found, expected, strict=True))
    micro = 2 * hits.total() / both.total() if both else 1.0
    macro = float(np.mean([2 * hits[label] / count for label, count in both.items()])) if both else 1.0
    return {"accuracy": 100 * same / len(expected), "macro-f1": 100 * macro, "micro-f1": 100 * micro}


class EntitySpan(NamedTuple):
    """Words [begin, end) form an entity of this kind."""

    begin: int
    end: int
    kind: str


def spans(tags: Sequence[str]) -> list[EntitySpan]:
    """The spans of tags such as B-NP, I-NP, O (BIO, BIOES or BMES). As in conlleval, an inside tag without a preceding
    tag of its kind begins a span."""
    found: list[EntitySpan] = []
    begin, kind = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        letter, _, name = tag.partition("-")
        if kind and (letter not in INSIDE or name != kind):
            found.append(EntitySpan(begin, position, kind))
            kind = ""
        if letter in BEGINS | INSIDE and name and not kind:
            begin, kind = position, name
        if kind and letter in ENDS:
            found.append(EntitySpan(begin, position + 1, kind))
            kind = ""
    return found


def has_spans(labels: Sequence[str]) -> bool:
    """Whether tags mark spans, as opposed to one class per word (parts of speech)."""
    return any(label.startswith(("B-", "I-")) for label in labels)


def span_f1(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> float:
    """2·hits / (found + expected) over the spans of all sentences (Tjong Kim Sang, Buchholz 2000)."""
    hits = total = 0
    for predicted, true in zip(found, expected, strict=True):
        one, other = set(spans(predicted)), set(spans(true))
        hits += len(one & other)
        total += len(one) + len(other)
    return 200 * hits / total if total else 100.0


def pearson(found: Sequence[float], expected: Sequence[float]) -> float:
    """Pearson correlation × 100; 0 where either side is constant."""
    _check(found, expected)
    one, other = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    one, other = one - one.mean(), other - other.mean()
    size = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return 100 * float((one * other).sum()) / size if size > 0 else 0.0


def spearman(found: Sequence[float], expected: Sequence[float]) -> float:
    """Spearman correlation × 100: Pearson of the ranks, ties sharing their mean rank."""
    return pearson(_ranks(found).tolist(), _ranks(expected).tolist())


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def recall_at_1(scores: NDArray[np.floating], right: NDArray[np.integer]) -> float:
    """How often the highest score of a row is in its right column; ties count fractionally."""
    own = np.take_along_axis(scores, right[:, None], 1)
    better, equal = (scores > own).sum(1), (scores == own).sum(1)
    return 100 * float(np.mean(np.where(better == 0, 1 / equal, 0.0)))


def _check(found: Sequence[object], expected: Sequence[object]) -> None:
    if len(found) != len(expected):
        raise UserError(f"{len(found)} answers but {len(expected)} expected ones; the numbers must be equal")
    if not expected:
        raise UserError("nothing to evaluate: no examples")
