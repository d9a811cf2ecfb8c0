"""Glossaries: terms with a fixed translation, and terms that are not translated."""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from allyouneed.errors import UserError

MOST_TERMS = 100_000
MOST_SHOWN = 5  # lines named in an error message
# a letter or digit of a script that separates words by spaces
LETTER = r"[^\W_\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003134f]"

LINE_BREAK = re.compile(r"\r\n|\n|\r")
LETTERS = re.compile(LETTER)
WORD = re.compile(rf"{LETTER}++|\S")
BASE, MODULUS = 0x5DEECE66D, (1 << 61) - 1  # of hashes of words in order


class Term(NamedTuple):
    """An occurrence of a term in a text: its characters, and what replaces them."""

    start: int
    end: int
    target: str


class Glossary:
    """Source terms and their translations; a term that translates to itself is not translated.

    A term is found as a whole word, the longest one first. A term in lower case is found in any case and its
    translation follows (`house`, `House`, `HOUSE`); one with capitals as it is written, or all in capitals.
    """

    def __init__(self, terms: Mapping[str, str]) -> None:
        if not isinstance(terms, Mapping):
            raise UserError(
                f"a glossary maps terms to translations, as {{'house': 'Haus'}}; got {type(terms).__name__}"
            )
        if len(terms) > MOST_TERMS:
            raise UserError(f"a glossary has at most {MOST_TERMS:,} terms; this one has {len(terms):,}")
        self.terms: dict[str, str] = {}
        for source, target in terms.items():
            if not isinstance(source, str) or not isinstance(target, str):
                raise UserError(f"glossary: {source!r}: {target!r}: both must be strings")
            if not source.strip() or not target.strip() or re.search(r"[\r\n]", source + target):
                raise UserError(f"glossary: {source!r}: {target!r}: both must be one line that is not blank")
            self.terms[source.strip()] = target.strip()
        cased = {source: target for source, target in self.terms.items() if source != source.lower()}
        capitals = {source.upper(): target.upper() for source, target in cased.items() if len(source) > 1}
        self._cased = capitals | self.terms
        self._lower = {fold(source): target for source, target in self.terms.items() if source not in cased}
        self._cased_index, self._lower_index = TermIndex(self._cased), TermIndex(self._lower)

    @staticmethod
    def of(terms: Glossary | Mapping[str, str] | None) -> Glossary | None:
        return terms if terms is None or isinstance(terms, Glossary) else Glossary(terms)

    @staticmethod
    def parse(text: str, where: str) -> Glossary:
        """Lines of `term<TAB>translation`, or a term alone, which is not translated; blank lines are skipped. `where`:
        the name of the file, for error messages."""
        terms: dict[str, str] = {}
        wrong: list[str] = []
        for number, line in enumerate(LINE_BREAK.split(text.removeprefix("\ufeff")), 1):
            if not line.strip():
                continue
            source, *rest = (part.strip() for part in line.split("\t"))
            target = rest[0] if rest else source
            if not source or not target or len(rest) > 1:
                wrong.append(f"line {number}: expected a term, a tab and its translation, got {line[:60]!r}")
            elif terms.setdefault(source, target) != target:
                wrong.append(f"line {number}: {source!r} has two translations, {terms[source]!r} and {target!r}")
        if wrong:
            more = f"; and {len(wrong) - MOST_SHOWN:,} more" if len(wrong) > MOST_SHOWN else ""
            raise UserError(f"{where}: {'; '.join(wrong[:MOST_SHOWN])}{more}; mend the file")
        return Glossary(terms)

    @staticmethod
    def parse_csv(text: str, where: str) -> Glossary:
        """Rows of a term and its translation; further columns (languages, in the files of DeepL) are skipped."""
        try:
            rows = [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True) if any(row)]
        except csv.Error as error:
            raise UserError(f"{where}: not CSV: {error}") from None
        if wrong := [number for number, row in enumerate(rows, 1) if len(row) < 2 or "\t" in row[0] + row[1]]:
            raise UserError(f"{where}: row {wrong[0]}: expected a term, a comma and its translation")
        if broken := [number for number, row in enumerate(rows, 1) if re.search(r"[\r\n]", row[0] + row[1])]:
            raise UserError(f"{where}: row {broken[0]}: a term must be on one line")
        return Glossary.parse("\n".join(f"{row[0]}\t{row[1]}" for row in rows), where)

    @staticmethod
    def read(path: Path) -> Glossary:
        try:
            return Glossary.parse(path.read_bytes().decode(), str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the glossary: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 (byte {error.start}); save the glossary as UTF-8") from None

    def of_targets(self) -> Glossary:
        """A glossary that keeps the translations of this one, for the second step of a translation via a pivot
        language."""
        return Glossary({target: target for target in self.terms.values()})

    def find(self, text: str) -> Iterator[Term]:
        """The terms of a text, in order, not overlapping; the longest one first."""
        lower = fold(text)
        words = [word.span() for word in WORD.finditer(text)]
        cased_sizes, lower_sizes = self._cased_index.sizes(text, words), self._lower_index.sizes(lower, words)
        at = 0
        while at < len(words):
            size = max(cased_sizes[at], lower_sizes[at], 1)
            start, end = words[at][0], words[at + size - 1][1]
            found, target = text[start:end], None
            if cased_sizes[at] == size:
                target = self._cased.get(found)
            elif lower_sizes[at] == size and (plain := self._lower.get(lower[start:end])) is not None:
                target = _cased(found, plain)
            if target is not None:
                yield Term(start, end, target)
            at += size


class TermIndex:
    """Finds the longest of any number of terms that begins at each word of a text, in time proportional to the text: by
    the hashes of all that a term can begin with. If a term goes on with a word of the text, its beginning does, too, so
    that the longest beginning is found by bisection."""

    def __init__(self, terms: Iterable[str]) -> None:
        self.beginnings: dict[int, int] = {}  # the hash of the first words of a term: how many of them are a term
        self.powers = [1]
        for term in sorted(terms):  # those that a term begins with precede it
            words = [word.span() for word in WORD.finditer(term)]
            value, known = 0, 0
            for number, piece in enumerate(_pieces(term, words), 1):
                value = (value * BASE + hash(piece)) % MODULUS
                known = number if number == len(words) else self.beginnings.get(value, known)
                self.beginnings[value] = known
            while len(self.powers) < len(words):
                self.powers.append(self.powers[-1] * BASE % MODULUS)

    def sizes(self, text: str, words: Sequence[tuple[int, int]]) -> list[int]:
        """How many words the longest term has that begins at each of these words of a text; 0: none does."""
        if not self.beginnings:
            return [0] * len(words)
        sums = [0]
        for piece in _pieces(text, words):
            sums.append((sums[-1] * BASE + hash(piece)) % MODULUS)
        return [self._size(hash(text[start:end]), sums, at) for at, (start, end) in enumerate(words)]

    def _size(self, first: int, sums: Sequence[int], at: int) -> int:
        """`first`: the hash of word `at`, without the space before it, which `sums` include."""
        if first % MODULUS not in self.beginnings:
            return 0

        def beginning(count: int) -> int:
            return ((first - sums[at + 1]) * self.powers[count - 1] + sums[at + count]) % MODULUS

        most = min(len(self.powers), len(sums) - 1 - at)
        outside = bisect_left(range(2, most + 1), True, key=lambda count: beginning(count) not in self.beginnings)
        return self.beginnings[beginning(1 + outside)]


def _pieces(text: str, words: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Words, each with the space before it, but for the first."""
    last = words[0][0] if words else 0
    for _, end in words:
        yield text[last:end]
        last = end


def fold(text: str) -> str:
    """A text in lower case, character by character: each stays where it is, also a sigma at the end of a word."""
    lower = text.lower()
    if len(lower) != len(text):
        lower = "".join(char if len(char.lower()) > 1 else char.lower() for char in text)
    return lower.replace("ς", "σ")


def find_term(term: str, text: str) -> list[tuple[int, int]]:
    """Where a text has a term as a whole word; at its beginning also with a capital letter."""
    before = f"(?<!{LETTER})" if LETTERS.match(term) else ""
    after = f"(?!{LETTER})" if LETTERS.match(term[-1]) else ""
    word = re.compile(before + re.escape(term) + after)
    first = None if text.startswith(term) else word.match(text[:1].lower() + text[1:])
    return [one.span() for one in (first, *word.finditer(text)) if one is not None]


def count_term(term: str, text: str) -> int:
    """How often it is there."""
    return len(find_term(term, text))


def _cased(found: str, target: str) -> str:
    """The translation of a term in lower case, in the case of an occurrence."""
    if len(found) > 1 and found.isupper():
        return target.upper()
    return target[:1].upper() + target[1:] if found[:1].isupper() else target
