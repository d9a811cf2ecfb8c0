"""Edits between a text and its correction, and the F0.5 of edits (Dahlmeier, Ng 2012, "Better Evaluation for
Grammatical Error Correction"; Bryant et al. 2017, ERRANT), by an alignment of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allyouneed.errors import UserError
from allyouneed.metrics.rewriting import EAST_ASIAN

TOKEN = re.compile(rf"{EAST_ASIAN}|(?:(?!{EAST_ASIAN})[\w'’])+|\S")


class TextEdit(NamedTuple):
    """Characters [begin, end) of the text, `before`, are replaced by `after`."""

    begin: int
    end: int
    before: str
    after: str


class CorrectionScores(NamedTuple):
    """From 0 to 100."""

    precision: float
    recall: float
    f05: float


def text_edits(source: str, target: str) -> list[TextEdit]:
    """The edits that turn the tokens of one text into those of the other: words, punctuation marks, Chinese and
    Japanese characters. Spaces do not count. Each replaced token is an edit; what is inserted or deleted belongs to
    the edit beside it ("alot" → "a lot" is one)."""
    ours, theirs = list(TOKEN.finditer(source)), list(TOKEN.finditer(target))
    steps = _alignment([one[0] for one in ours], [one[0] for one in theirs])
    found = []
    for i, j, n, m in _merged(steps):
        begin = ours[i].start() if n > i else (ours[i - 1].end() if i else 0)
        end = ours[n - 1].end() if n > i else begin
        after = target[theirs[j].start() : theirs[m - 1].end()] if m > j else ""
        found.append(TextEdit(begin, end, source[begin:end], after))
    return found


def _merged(steps: Sequence[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Neighbouring steps that change something as one, unless both replace one token by one."""
    held: tuple[int, int, int, int] | None = None
    for step in steps:
        if held is not None and held[2:] == step[:2] and not (_replaces(held) and _replaces(step)):
            held = held[:2] + step[2:]
            continue
        if held is not None:
            yield held
        held = step
    if held is not None:
        yield held


def _replaces(step: tuple[int, int, int, int]) -> bool:
    return step[2] - step[0] == step[3] - step[1] == 1


def _alignment(ours: list[str], theirs: list[str]) -> list[tuple[int, int, int, int]]:
    """The steps of a least-edit alignment that change something: ours[i:n] becomes theirs[j:m]. Where several have as
    few edits, the later token is replaced rather than inserted or deleted."""
    table = _distances(ours, theirs)
    i, j, steps = len(ours), len(theirs), []
    while i or j:
        if i and j and table[i, j] == table[i - 1, j - 1] + (ours[i - 1] != theirs[j - 1]):
            before = i - 1, j - 1
        elif i and table[i, j] == table[i - 1, j] + 1:
            before = i - 1, j
        else:
            before = i, j - 1
        if table[i, j] != table[before]:
            steps.append((*before, i, j))
        i, j = before
    return steps[::-1]


def _distances(ours: list[str], theirs: list[str]) -> NDArray[np.int32]:
    """(i, j): the edit distance of the first i and the first j tokens (Levenshtein 1966)."""
    steps = np.arange(len(theirs) + 1, dtype=np.int32)
    table = np.empty((len(ours) + 1, len(theirs) + 1), np.int32)
    table[0] = steps
    columns = np.array(theirs, dtype=object)
    for i, word in enumerate(ours, 1):
        above = table[i - 1] + 1
        above[1:] = np.minimum(above[1:], table[i - 1, :-1] + (columns != word))
        table[i] = np.minimum.accumulate(above - steps) + steps
    return table


def correction_scores(sources: Sequence[str], found: Sequence[str], expected: Sequence[str]) -> CorrectionScores:
    """Precision, recall and F0.5 of the edits of all texts together. Without any edit to find and any found, all are
    100."""
    if not len(sources) == len(found) == len(expected):
        raise UserError(f"{len(found)} corrections and {len(expected)} references of {len(sources)} texts")
    right = made = wanted = 0
    for source, ours, theirs in zip(sources, found, expected, strict=True):
        one, other = set(text_edits(source, ours)), set(text_edits(source, theirs))
        right, made, wanted = right + len(one & other), made + len(one), wanted + len(other)
    precision, recall = right / made if made else 1.0, right / wanted if wanted else 1.0
    f05 = 1.25 * precision * recall / (0.25 * precision + recall) if right or not (made or wanted) else 0.0
    return CorrectionScores(100 * precision, 100 * recall, 100 * f05)
