"""How many words of a transcript are wrong, in percent; more than 100 where more are wrong than there should be."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

from allyouneed.errors import UserError


def edits(found: Sequence[str], expected: Sequence[str]) -> int:
    """The fewest words to change, add or take away to make one of the other (Levenshtein 1966)."""
    row = list(range(len(expected) + 1))
    for n, word in enumerate(found, 1):
        before, row[0] = row[0], n
        for m, wanted in enumerate(expected, 1):
            before, row[m] = row[m], min(row[m] + 1, row[m - 1] + 1, before + (word != wanted))
    return row[-1]


def word_error_rate(found: Sequence[str], expected: Sequence[str], as_written: bool = False) -> float:
    """Of all texts together. Upper case and punctuation are no errors, unless `as_written`."""
    return _rate(found, expected, lambda text: (text if as_written else plain(text)).split())


def character_error_rate(found: Sequence[str], expected: Sequence[str], as_written: bool = False) -> float:
    """The same of characters, for what is written without spaces; spaces do not count."""
    return _rate(found, expected, lambda text: list("".join((text if as_written else plain(text)).split())))


def plain(text: str) -> str:
    """Lower case, and a space for all that is no letter, mark, digit or apostrophe inside a word."""
    lower = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    kept = "".join(char if unicodedata.category(char)[0] in "LMN" or char == "'" else " " for char in lower)
    return " ".join(word.strip("'") for word in kept.split())


def _rate(found: Sequence[str], expected: Sequence[str], cut: Callable[[str], list[str]]) -> float:
    if len(found) != len(expected):
        raise UserError(f"{len(found)} transcripts but {len(expected)} expected ones; there must be one for each")
    there = [cut(text) for text in expected]
    total = sum(map(len, there))
    if not total:
        raise UserError("there is nothing to evaluate: the expected texts hold no words")
    return 100 * sum(edits(cut(here), wanted) for here, wanted in zip(found, there, strict=True)) / total
