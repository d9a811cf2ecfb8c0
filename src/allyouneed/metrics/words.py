"""Word and character error rate of transcripts, in percent; insertions can make it exceed 100."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

from allyouneed.errors import UserError


def edits(found: Sequence[str], expected: Sequence[str]) -> int:
    """Edit distance: substitutions, insertions and deletions (Levenshtein 1966)."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(expected))}
    columns = np.array([numbers[word] for word in expected], np.int64)
    steps = np.arange(len(expected) + 1)
    row = steps.copy()  # a row of the table at a time
    for word in found:
        above = row + 1
        above[1:] = np.minimum(above[1:], row[:-1] + (columns != numbers.get(word, -1)))
        row = np.minimum.accumulate(above - steps) + steps  # insertions: the least of all to the left, one per step
    return int(row[-1])


def word_error_rate(found: Sequence[str], expected: Sequence[str], as_written: bool = False) -> float:
    """The rate over all texts together. Case and punctuation are ignored unless `as_written`."""
    return error_rate(found, expected, lambda text: (text if as_written else plain(text)).split())


def character_error_rate(found: Sequence[str], expected: Sequence[str], as_written: bool = False) -> float:
    """Per character, for languages written without spaces; spaces do not count."""
    return error_rate(found, expected, lambda text: list("".join((text if as_written else plain(text)).split())))


def plain(text: str) -> str:
    """Lower case; everything but letters, marks, digits and apostrophes inside words becomes a space."""
    lower = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    kept = "".join(char if unicodedata.category(char)[0] in "LMN" or char == "'" else " " for char in lower)
    return " ".join(word.strip("'") for word in kept.split())


def error_rate(found: Sequence[str], expected: Sequence[str], split: Callable[[str], list[str]]) -> float:
    """Edits per expected unit of all texts together, in percent; `split` gives the units of a text."""
    if len(found) != len(expected):
        raise UserError(f"{len(found)} transcripts but {len(expected)} references; the numbers must be equal")
    wanted = [split(text) for text in expected]
    total = sum(map(len, wanted))
    if not total:
        raise UserError("nothing to evaluate: the references contain no words")
    return 100 * sum(edits(split(text), words) for text, words in zip(found, wanted, strict=True)) / total
