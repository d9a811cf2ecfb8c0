"""Which words translate each other: IBM model 1 in both directions over a parallel text.

Brown et al. 1993, "The Mathematics of Statistical Machine Translation", equations 15 and 17: p(t|s) is estimated by
expectation maximization, each target word being explained by some source word of its sentence. Word pairs with a high
product p(t|s) p(s|t) are translations of each other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*['’]?")
HAN = re.compile(r"[\u3400-\u9fff]+")
LONGEST = 6  # characters of a Chinese word


@dataclass(frozen=True)
class Token:
    """A word of a text and where it begins and ends."""

    word: str
    start: int
    end: int


class Words:
    """Splits texts into words; Chinese by the longest match with `known` words."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.known = {word for word in known if 1 < len(word) <= LONGEST}

    def learn(self, texts: Iterable[str], least_count: int = 12, least_information: float = 4.0) -> None:
        """Add two characters that are often together and seldom apart, by their pointwise mutual information (bits)."""
        ones, twos, threes = Counter[str](), Counter[str](), Counter[str]()
        for text in texts:
            for run in HAN.findall(text):
                ones.update(run)
                twos.update(map(str.__add__, run, run[1:]))
                threes.update(run[at : at + 3] for at in range(len(run) - 2))
        total = ones.total()
        found = {
            two
            for two, count in twos.items()
            if count >= least_count and math.log2(count * total / ones[two[0]] / ones[two[1]]) > least_information
        }
        for three, count in threes.items():  # 行车 is a part of 自行车
            parts = {two for two in (three[:2], three[1:]) if two in found and count > 0.6 * twos[two]}
            if count >= least_count and parts:
                found -= parts
                found.add(three)
        self.known |= found

    def __call__(self, text: str) -> list[Token]:
        found = []
        for match in WORD.finditer(text):
            if not HAN.match(match[0]):
                # l'eau, aujourd'hui: an apostrophe ends a word, in French a short one
                at = match.start()
                for part in re.findall(r"[^'’]+['’]?", match[0]):
                    word = part.rstrip("'’")
                    found.append(Token(word, at, at + len(word)))
                    at += len(part)
                continue
            at = match.start()
            while at < match.end():
                size = next(n for n in range(LONGEST, 0, -1) if n == 1 or text[at : at + n] in self.known)
                found.append(Token(text[at : at + size], at, at + size))
                at += size
        return found


@dataclass(frozen=True)
class Lexicon:
    """p(target|source) · p(source|target) of the word pairs that occur together, in lower case."""

    scores: dict[tuple[str, str], float]
    counts: tuple[Counter[str], Counter[str]]

    def links(self, source: Sequence[Token], target: Sequence[Token], least: float) -> list[tuple[int, int]]:
        """Pairs of positions that are each other's best in these sentences, with at least this score."""
        rows = [[self.scores.get((one.word.lower(), two.word.lower()), 0.0) for two in target] for one in source]
        found = []
        for at, row in enumerate(rows):
            best = max(row, default=0.0)
            if best < least or row.count(best) > 1:
                continue
            there = row.index(best)
            if all(other[there] < best for number, other in enumerate(rows) if number != at):
                found.append((at, there))
        return found

    @cached_property
    def best(self) -> tuple[dict[str, list[tuple[float, str]]], dict[str, list[tuple[float, str]]]]:
        """The translations of each source word, and of each target word, best first."""
        here: dict[str, list[tuple[float, str]]] = {}
        there: dict[str, list[tuple[float, str]]] = {}
        for (one, two), score in self.scores.items():
            here.setdefault(one, []).append((score, two))
            there.setdefault(two, []).append((score, one))
        for table in (here, there):
            for found in table.values():
                found.sort(reverse=True)
        return here, there


def learn(pairs: Sequence[tuple[list[str], list[str]]], rounds: int = 5, least_count: int = 4) -> Lexicon:
    """`pairs`: the words of both sides, in lower case."""
    counts = Counter(w for one, _ in pairs for w in one), Counter(w for _, two in pairs for w in two)
    numbers = [
        {word: n for n, word in enumerate(sorted(w for w, c in one.items() if c >= least_count))} for one in counts
    ]
    rows, heads, tails = [], [], []  # per entry: the pair's number, source word, target word
    for row, pair in enumerate(pairs):
        ids = [
            np.array([table[w] for w in dict.fromkeys(words) if w in table], np.int32)
            for table, words in zip(numbers, pair, strict=True)
        ]
        heads.append(np.repeat(ids[0], len(ids[1])))
        tails.append(np.tile(ids[1], len(ids[0])))
        rows.append(np.full(len(ids[0]) * len(ids[1]), row, np.int32))
    head, tail, row = np.concatenate(heads), np.concatenate(tails), np.concatenate(rows)
    width = len(numbers[1])
    keys, entry = np.unique(head.astype(np.int64) * width + tail, return_inverse=True)
    own = (keys // width).astype(np.int32), (keys % width).astype(np.int32)
    product = np.ones(len(keys))
    for given, target in ((0, tail), (1, head)):
        # a target word of a sentence: all entries with its row
        slot = np.unique(row.astype(np.int64) * (max(width, len(numbers[0])) + 1) + target, return_inverse=True)[1]
        chance: NDArray[np.float64] = np.ones(len(keys))
        for _ in range(rounds):
            weight = chance[entry]
            weight /= np.bincount(slot, weight)[slot]
            expected = np.bincount(entry, weight, len(keys))
            chance = expected / np.bincount(own[given], expected)[own[given]]
        product *= chance
    words = [sorted(table, key=table.__getitem__) for table in numbers]
    kept = np.flatnonzero(product > 1e-3)
    scores = {(words[0][own[0][n]], words[1][own[1][n]]): float(product[n]) for n in kept}
    return Lexicon(scores, counts)
