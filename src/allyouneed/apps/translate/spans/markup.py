"""Marks (tags, emphasis, emoji) in a translation: placed where the words around them went, by cross-attention."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from allyouneed.apps.translate.spans.spans import MARK, Span
from allyouneed.apps.translate.splitting.edits import Edit
from allyouneed.data.languages import EAST_ASIAN

TAG = re.compile(r"<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*)")
MARKS = re.compile(MARK)


class Mark(NamedTuple):
    """A mark taken out of a text at an offset; `left`, `right`: whether a space was there."""

    symbol: str
    offset: int
    left: bool
    right: bool


@dataclass
class Node:
    """A pair of marks and what is between, or a single mark. `region`: characters of the source between them."""

    opening: Mark | None
    closing: Mark | None
    children: list[Node] = field(default_factory=list)

    @property
    def region(self) -> tuple[int, int]:
        first = self.opening or self.closing
        last = self.closing or self.opening
        assert first is not None and last is not None
        return first.offset, last.offset


def _key(span: Span) -> tuple[str, bool | None]:
    """What a mark opens or closes, and which of the two; None: either (`**`), or neither for an empty name."""
    text = span.text
    if span.pair is not None:
        return span.pair
    if span.kind.name == "tag" and (tag := TAG.match(text)) is not None:
        return tag["name"].lower(), bool(tag["close"])
    if span.kind.name == "link":
        return "link", text.startswith("]")
    return (text, None) if span.kind.name == "emphasis" else ("", None)


def partners(template: str, spans: Mapping[str, Span]) -> dict[str, str]:
    """The other mark of each pair in a template: `<b>` and `</b>`, `**` and `**`."""
    found: dict[str, str] = {}
    opened: list[tuple[str, str]] = []
    counts = Counter[str]()  # of the names of those that are open
    for symbol in MARKS.findall(template):
        name, closes = _key(spans[symbol])
        if not name:
            continue
        if closes is False or not counts[name]:
            if not closes:
                opened.append((name, symbol))
                counts[name] += 1
            continue
        last = ""
        while last != name:
            last, other = opened.pop()
            counts[last] -= 1
        found |= {other: symbol, symbol: other}
    return found


def place(
    text: str,
    marks: Sequence[Mark],
    spans: Mapping[str, Span],
    weights: Tensor,
    source: Sequence[tuple[int, int]],
    target: Sequence[tuple[int, int]],
) -> list[Edit]:
    """Insertions that put every mark into a translation, properly nested.

    `weights` (target tokens, source tokens): cross-attention. `source`, `target`: (begin, end) characters of tokens.
    A pair encloses the run of target words that attend most to the words it enclosed; a single mark follows the word
    that attends most to the word before it.
    """
    nodes = _nest(marks, spans)
    return list(_insert(text, nodes, spans, weights, source, target, 0, len(target)))


def _nest(marks: Sequence[Mark], spans: Mapping[str, Span]) -> list[Node]:
    other = partners("".join(mark.symbol for mark in marks), spans)
    nodes: list[Node] = []
    inside: list[Node] = []
    for mark in marks:
        if inside and inside[-1].opening is not None and other.get(inside[-1].opening.symbol) == mark.symbol:
            inside.pop().closing = mark
            continue
        node = Node(mark, None)
        (inside[-1].children if inside else nodes).append(node)
        if mark.symbol in other:
            inside.append(node)
    return nodes


def _insert(
    text: str,
    nodes: Sequence[Node],
    spans: Mapping[str, Span],
    weights: Tensor,
    source: Sequence[tuple[int, int]],
    target: Sequence[tuple[int, int]],
    low: int,
    high: int,
) -> Iterator[Edit]:
    """The insertions of sibling nodes among the target tokens from `low` to `high`."""
    taken = [False] * len(target)
    placed: list[tuple[int, int, int, Node]] = []  # first and last token, order, node
    pairs = [(n, node) for n, node in enumerate(nodes) if node.closing is not None]
    singles = [(n, node) for n, node in enumerate(nodes) if node.closing is None]
    for number, node in pairs:
        begin, end = _run(text, weights, source, target, node.region, low, high, taken)
        if begin == end:
            begin = end = _after(text, weights, source, target, node.region[0], low, high, taken)
        taken[begin:end] = [True] * (end - begin)
        placed.append((begin, end, number, node))
    for number, node in singles:
        at = _after(text, weights, source, target, node.region[0], low, high, taken)
        placed.append((at, at, number, node))
    for begin, end, _, node in sorted(placed, key=lambda one: one[:3]):
        assert node.opening is not None
        if node.closing is None:
            yield _single(text, _end_of(target, begin, low), node.opening, spans)
            continue
        first, last = (target[begin][0], target[end - 1][1]) if begin < end else (_end_of(target, begin, low),) * 2
        first += len(text[first:last]) - len(text[first:last].lstrip())
        yield Edit(first, first, spans[node.opening.symbol].text)
        yield from _insert(text, node.children, spans, weights, source, target, begin, end)
        yield Edit(last, last, spans[node.closing.symbol].text)


def _end_of(target: Sequence[tuple[int, int]], token: int, low: int) -> int:
    """Where a mark before this token goes: at the end of the token before it."""
    if token > low:
        return target[token - 1][1]
    return target[token][0] if token < len(target) else (target[-1][1] if target else 0)


def _run(
    text: str,
    weights: Tensor,
    source: Sequence[tuple[int, int]],
    target: Sequence[tuple[int, int]],
    region: tuple[int, int],
    low: int,
    high: int,
    taken: Sequence[bool],
) -> tuple[int, int]:
    """The free run of target tokens, whole words, with the most attention to the tokens of a source region: the
    subarray with the largest sum of attention above one half."""
    inside = [n for n, (begin, end) in enumerate(source) if begin < region[1] and end > region[0] and begin < end]
    if not inside:
        return low, low
    gains = (weights[:, inside].sum(-1) / weights.sum(-1).clamp(min=1e-9) - 0.5).tolist()
    best, best_run, total, start = 0.0, (low, low), 0.0, low
    for token in range(low, high):
        if taken[token]:
            total, start = 0.0, token + 1
            continue
        if total <= 0:
            total, start = 0.0, token
        total += gains[token]
        if total > best:
            best, best_run = total, (start, token + 1)
    begin, end = best_run
    if begin == end:  # no token attends mostly to the region; take the one that does so most
        begin = max((t for t in range(low, high) if not taken[t]), key=lambda t: gains[t], default=low)
        end = min(begin + 1, high)
    while begin > low and not taken[begin - 1] and begin < end and _joined(text, target[begin][0]):
        begin -= 1
    while end < high and not taken[end] and begin < end and _joined(text, target[end][0]):
        end += 1
    return begin, end


def _after(
    text: str,
    weights: Tensor,
    source: Sequence[tuple[int, int]],
    target: Sequence[tuple[int, int]],
    offset: int,
    low: int,
    high: int,
    taken: Sequence[bool],
) -> int:
    """The token before which a single mark goes: after the word that attends most to the word before it."""
    before = [n for n, (begin, end) in enumerate(source) if begin < end <= offset]
    if not before or low == high:
        return low
    token = low + int(weights[low:high, before[-1]].argmax()) + 1
    while token < high and (_joined(text, target[token][0]) or (taken[token] and taken[token - 1])):
        token += 1
    return token


def _joined(text: str, offset: int) -> bool:
    """Whether a word goes on at this offset."""
    around = text[max(0, offset - 1) : offset + 1]
    return len(around) == 2 and around.isalnum() and not EAST_ASIAN.search(around)


def _single(text: str, offset: int, mark: Mark, spans: Mapping[str, Span]) -> Edit:
    """The insertion of a single mark with its spaces, unless there are some already or the script has none."""
    before, after = text[:offset][-1:], text[offset:][:1]
    left = " " if mark.left and before and not before.isspace() and not EAST_ASIAN.match(before) else ""
    right = " " if mark.right and after and after.isalnum() and not EAST_ASIAN.match(after) else ""
    return Edit(offset, offset, left + spans[mark.symbol].text + right)
