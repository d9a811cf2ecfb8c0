"""Glossaries: terms with a fixed translation, and terms that are not translated."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
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
        self._exact = {form: target for source, target in self.terms.items() for form, target in _forms(source, target)}
        self._exact |= self.terms
        self._lower = {source: target for source, target in self.terms.items() if source == source.lower()}
        lengths: dict[str, set[int]] = {}
        for form in self._exact:
            lengths.setdefault(_first_word(form), set()).add(len(form))
        self._lengths = {word: sorted(some, reverse=True) for word, some in lengths.items()}

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
        last = 0
        for word in WORD.finditer(text):
            start = word.start()
            if start < last:
                continue
            for size in self._lengths.get(word[0].lower(), ()):
                found = text[start : start + size]
                target = self._target(found) if len(found) == size else None
                if target is not None and not _goes_on(text, start + size):
                    yield Term(start, start + size, target)
                    last = start + size
                    break

    def _target(self, found: str) -> str | None:
        target = self._exact.get(found)
        if target is None and (lower := self._lower.get(found.lower())) is not None:
            return _cased(found, lower)
        return target


def _first_word(term: str) -> str:
    """What a term is looked up by, in lower case: its first word, or its first character if that is no letter."""
    found = WORD.match(term)
    return "" if found is None else found[0].lower()


def _goes_on(text: str, end: int) -> bool:
    """Whether a word goes on at this offset."""
    return LETTERS.match(text, end) is not None and LETTERS.match(text, end - 1) is not None


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


def _forms(source: str, target: str) -> Iterator[tuple[str, str]]:
    """A term with capitals, all in capitals: in headings."""
    if source != source.lower() and len(source) > 1:
        yield source.upper(), target.upper()


def _cased(found: str, target: str) -> str:
    """The translation of a term in lower case, in the case of an occurrence."""
    if len(found) > 1 and found.isupper():
        return target.upper()
    return target[:1].upper() + target[1:] if found[:1].isupper() else target
