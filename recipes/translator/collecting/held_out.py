"""Test and validation sets, which no training text may contain."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pairs import HAN, letters_and_digits, read_corpus

from allyouneed.errors import UserError
from collecting.sentences import split

# letters and digits of a sentence, with Chinese characters and without
LEAST = {True: 10, False: 24}  # to be found within a text
KEY = {True: 8, False: 18}  # to be looked up by


class HeldOut:
    """Finds held-out sentences in a text, in any case and punctuation.

    A sentence of LEAST letters and digits is found anywhere in a text, a shorter one only if it is the whole text.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.whole: set[str] = set()
        self.by_key: dict[str, list[str]] = {}
        for line in lines:
            found = split(line, "zh" if _chinese(line) else "en")
            self.whole.update(filter(None, map(letters_and_digits, (line, *found))))
        for plain in self.whole:
            chinese = _chinese(plain)
            if len(plain) >= LEAST[chinese]:
                self.by_key.setdefault(plain[: KEY[chinese]], []).append(plain)

    @classmethod
    def load(cls, data: Path, corpora: Path) -> HeldOut:
        """`data`: mt/*/*.{test,valid}*.tsv.gz; `corpora`: */ud-pud.tsv.zst. All their columns are held out."""
        files = [*sorted(data.glob("mt/*/*.tsv.gz")), *sorted(corpora.glob("*/ud-pud.tsv.zst"))]
        sets = [path for path in files if path.name == "ud-pud.tsv.zst" or re.search(r"\.(test|valid)", path.name)]
        if not sets:
            raise UserError(f"no test sets to keep out: {data}/mt/*/*.test.tsv.gz, {corpora}/*/ud-pud.tsv.zst")
        return cls(text for path in sets for text in _columns(path))

    def within(self, text: str, words: bool = False) -> bool:
        """`words`: a text may be a short sentence of a test set, as single words are."""
        plain = letters_and_digits(text)
        if plain in self.whole and not words:
            return True
        size = KEY[_chinese(plain)]
        return any(
            plain.startswith(sentence, at)
            for at in range(len(plain) - size + 1)
            for sentence in self.by_key.get(plain[at : at + size], ())
        )


def _chinese(text: str) -> bool:
    return HAN.search(text) is not None


def _columns(path: Path) -> Iterator[str]:
    if path.suffix == ".zst":
        for pair in read_corpus(path):
            yield from pair
        return
    with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield from line.rstrip("\r\n").split("\t")
