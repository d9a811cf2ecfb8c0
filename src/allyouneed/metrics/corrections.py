"""Edits between a text and its correction, and the F0.5 of edits (Dahlmeier, Ng 2012, "Better Evaluation for
Grammatical Error Correction"; Bryant et al. 2017, ERRANT)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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


def correction_scores(
    sources: Sequence[str], found: Sequence[str], expected: Sequence[str | Sequence[str]]
) -> CorrectionScores:
    """Precision, recall and F0.5 of the edits of all texts together. Of several references of a text, that counts with
    which F0.5 so far is highest. Without any edit to find and any found, all are 100."""
    if not len(sources) == len(found) == len(expected):
        raise UserError(f"{len(found)} corrections and {len(expected)} references of {len(sources)} texts")
    several = [[one] if isinstance(one, str) else one for one in expected]
    wanted = [[text_edits(source, one) for one in some] for source, some in zip(sources, several, strict=True)]
    return edit_scores(sources, found, wanted)


def edit_scores(
    sources: Sequence[str], found: Sequence[str], wanted: Sequence[Sequence[Sequence[TextEdit]]]
) -> CorrectionScores:
    """The same for given edits, as those of annotators in M² files: for each text, one list of edits or several."""
    total = (0, 0, 0)
    for source, ours, several in zip(sources, found, wanted, strict=True):
        counted = []
        for edits in several:
            right, made = count_edits(source, ours, edits)
            now = (total[0] + right, total[1] + made, total[2] + len(edits))
            counted.append((_f05(*now)[2], now[0], -now[1] - 0.25 * now[2], now))
        total = max(counted, default=(0, 0, 0, total))[3]
    return CorrectionScores(*(100 * one for one in _f05(*total)))


def _f05(right: int, made: int, wanted: int) -> tuple[float, float, float]:
    """Precision, recall and F0.5, 0 to 1."""
    f05 = 1.25 * right / (0.25 * wanted + made) if made or wanted else 1.0
    return right / made if made else 1.0, right / wanted if wanted else 1.0, f05


def count_edits(source: str, found: str, wanted: Sequence[TextEdit]) -> tuple[int, int]:
    """How many edits of a correction are wanted, and how many there are: of all least-edit alignments, with the one
    that has most of the wanted edits (Dahlmeier, Ng 2012, 3.1, MaxMatch)."""
    ours, theirs = list(TOKEN.finditer(source)), list(TOKEN.finditer(found))
    one, other = [token[0] for token in ours], [token[0] for token in theirs]
    there, back = _distances(one, other), _distances(one[::-1], other[::-1])[::-1, ::-1]
    best = there + back == there[-1, -1]  # places that a least-edit alignment passes
    arcs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for number, edit in enumerate(wanted, 1):
        begin = sum(token.end() <= edit.begin for token in ours)
        end = max(begin, sum(token.start() < edit.end for token in ours))
        after = TOKEN.findall(edit.after)
        for j in range(len(other) - len(after) + 1):
            if other[j : j + len(after)] == after:
                arcs.setdefault((begin, j), []).append((end, j + len(after), number))
    # by place: wanted edits to there (most), steps that change something (fewest), and the steps of that alignment
    table: dict[tuple[int, int], tuple[int, int, tuple[Any, ...]]] = {(0, 0): (0, 0, ())}
    for i, j in zip(*(axis.tolist() for axis in np.nonzero(best)), strict=True):
        if (i, j) not in table:
            continue
        right, cost, steps = table[i, j]
        used = {step[0] for step in steps}  # an insertion may be there twice
        following: list[Any] = [
            ((n, m), (1, 0), (number, i, j, n, m))
            for n, m, number in arcs.get((i, j), ())
            if (n, m) != (i, j) and number not in used
        ]
        for n, m in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if n <= len(one) and m <= len(other):
                same = (n, m) == (i + 1, j + 1) and one[i] == other[j]
                if there[n, m] == there[i, j] + (not same):
                    following.append(((n, m), (0, int(not same)), (0, i, j, n, m) if not same else ()))
        for place, (more, price), step in following:
            if best[place]:
                made = right + more, cost + price, (*steps, step) if step else steps
                if place not in table or (made[0], -made[1]) > (table[place][0], -table[place][1]):
                    table[place] = made
    right, _, steps = table[len(one), len(other)]
    others = list[list[tuple[int, int, int, int]]]([[]])
    for step in steps:
        if step[0]:
            others.append([])
        else:
            others[-1].append(step[1:])
    return right, right + sum(len(list(_merged(some))) for some in others)


def read_m2(lines: Iterable[str]) -> Iterator[tuple[str, list[list[TextEdit]]]]:
    """The sentences of an M² file and, for each annotator, the edits: `S tokens`, then `A begin end|||type|||correction
    |||…|||annotator`; an annotator who changes nothing says `noop`, or nothing."""
    source, edits = "", dict[str, list[TextEdit]]()
    for line in [*lines, "S "]:
        if line.startswith("S "):
            if source:
                yield source, list(edits.values()) or [[]]
            source, edits = line[2:].rstrip("\n"), {}
        elif line.startswith("A "):
            span, kind, after, *_, annotator = line[2:].rstrip("\n").split("|||")
            own = edits.setdefault(annotator, [])
            first, last = (int(number) for number in span.split())
            if kind != "noop" and first >= 0:
                tokens = list(re.finditer(r"\S+", source))
                begin = tokens[first].start() if first < len(tokens) else len(source)
                end = tokens[last - 1].end() if last > first else begin
                own.append(TextEdit(begin, end, source[begin:end], "" if after == "-NONE-" else after))
