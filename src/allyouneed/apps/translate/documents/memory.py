"""Translation memory: sentences that people have translated before, in files of TMX 1.4.

An exact match is taken instead of the model's translation; one that is nearly the same is offered in a note. A tag in a
sentence counts as a place: `Das <ph x="1"/>Auto`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from allyouneed.apps.translate.documents.formats import decode
from allyouneed.apps.translate.documents.html import names
from allyouneed.apps.translate.documents.walker import Element, Elements
from allyouneed.apps.translate.documents.xml import encode
from allyouneed.apps.translate.spans.spans import Passage
from allyouneed.data.languages import parse_name
from allyouneed.errors import UserError, quote

PLACES = range(0xF0000, 0xF0000 + 1000)  # characters for the tags of a sentence
PLACE = re.compile(f"[{chr(PLACES[0])}-{chr(PLACES[-1])}]")
CODES = names("ph bpt ept it ut")
WORD = re.compile(r"\w+")
LEAST = 0.75  # likeness that is offered
TRIED, COMMON = 20, 2000  # sentences that are compared, and sentences of a word that is looked up
MOST_BYTES = 256 << 20


class Match(NamedTuple):
    """A sentence of a memory, its translation, and how alike it is, from 0 to 1."""

    source: str
    target: str
    likeness: float

    @property
    def note(self) -> str:
        return f"the memory has {quote(self.source)} ({self.likeness:.0%} alike): {quote(self.target, 400)}"


@dataclass
class TranslationMemory:
    """`segments`: for each pair of languages, translations by their source."""

    segments: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    units: list[dict[str, str]] = field(default_factory=list)  # the segments of each unit, by language

    @staticmethod
    def read(path: Path) -> TranslationMemory:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot read the memory: {error.strerror}; name a TMX file") from None
        try:
            return TranslationMemory.parse(content)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @staticmethod
    def parse(content: bytes) -> TranslationMemory:
        if len(content) > MOST_BYTES:
            raise UserError(f"larger than {MOST_BYTES >> 20} MB; divide the memory")
        elements = Elements(decode(content, "tmx")[0])
        if next(elements.all("tmx"), None) is None:
            raise UserError("not TMX: there is no <tmx>; export the memory as TMX")
        memory = TranslationMemory()
        for one in elements.all("tu"):
            unit: dict[str, str] = {}
            for variant in elements.children(one):
                language = elements.attribute(variant, "xml:lang") or elements.attribute(variant, "lang")
                segment = next((child for child in elements.children(variant) if child.name == "seg"), None)
                if segment is not None and language:
                    unit[parse_name(language).language] = _segment(elements, segment)
            if len(unit) > 1:
                memory.units.append(unit)
        return memory

    def add(self, texts: Iterable[str], translations: Iterable[str], here: str, there: str) -> None:
        """Add sentences and their translations."""
        here, there = parse_name(here).language, parse_name(there).language
        known = self._between(here, there)
        for text, translation in zip(texts, translations, strict=True):
            key, places = _places(text)
            if any(map(str.isalpha, key)) and known.get(key) is None:
                target = "".join(places.get(char, char) for char in translation)
                self.units.append({here: key, there: target})
                known[key] = target

    def _between(self, here: str, there: str) -> dict[str, str]:
        pair = here, there
        if pair not in self.segments:
            both = [unit for unit in self.units if here in unit and there in unit]
            self.segments[pair] = {unit[here]: unit[there] for unit in reversed(both)}  # the first one holds
        return self.segments[pair]

    def find(self, text: str, here: str | None, there: str | None) -> Match | None:
        """The sentence that is most like a text; `likeness` is 1 if it is the same."""
        if here is None or there is None:
            return None
        here, there = parse_name(here).language, parse_name(there).language
        known = self._between(here, there)
        key, places = _places(text)
        if (target := known.get(key)) is not None and sorted(PLACE.findall(target)) == sorted(PLACE.findall(key)):
            back = {place: symbol for symbol, place in places.items()}
            whole = "".join(back.get(char, char) for char in target)
            size = len(text) - len(text.lstrip())
            return Match(text, text[:size] + whole + text[len(text.rstrip()) :], 1.0)
        words = WORD.findall(key.lower())
        best = Match("", "", 0.0)
        for source in self._near(here, there, words):
            compared = SequenceMatcher(None, words, WORD.findall(source.lower()), autojunk=False)
            if compared.quick_ratio() > best.likeness and (ratio := compared.ratio()) > best.likeness:
                best = Match(_plain(source), _plain(known[source]), min(ratio, 0.99))
        return best if best.likeness >= LEAST else None

    def _near(self, here: str, there: str, words: list[str]) -> Iterator[str]:
        """Sentences that share most words with a text."""
        index, shared = self._index(here, there), Counter[str]()
        for word in set(words):
            if len(found := index.get(word, ())) <= COMMON:
                shared.update(found)
        return (source for source, _ in shared.most_common(TRIED))

    @cached_property
    def _indices(self) -> dict[tuple[str, str], dict[str, list[str]]]:
        return {}

    def _index(self, here: str, there: str) -> dict[str, list[str]]:
        if (here, there) not in self._indices:
            found: dict[str, list[str]] = {}
            for source in self._between(here, there):
                for word in set(WORD.findall(source.lower())):
                    found.setdefault(word, []).append(source)
            self._indices[here, there] = found
        return self._indices[here, there]

    def write(self) -> str:
        """The memory as TMX."""
        first = next(iter(self.units[0])) if self.units else "*all*"
        lines = [
            '<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4">\n<header creationtool="allyouneed" '
            'creationtoolversion="1" segtype="paragraph" o-tmf="tmx" adminlang="en" datatype="plaintext" '
            f'srclang="{first}"/>\n<body>\n'
        ]
        for unit in self.units:
            variants = "".join(
                f'<tuv xml:lang="{language}"><seg>{_written(text)}</seg></tuv>' for language, text in unit.items()
            )
            lines.append(f"<tu>{variants}</tu>\n")
        return "".join([*lines, "</body>\n</tmx>\n"])


def _places(text: str) -> tuple[str, dict[str, str]]:
    """A text with a place for each tag, in order; and the place of each character that stands for one."""
    if not isinstance(text, Passage) or not text.spans:
        return text.strip(), {}
    symbols = [char for char in text if char in text.spans][: len(PLACES)]
    places = {symbol: chr(PLACES[number]) for number, symbol in enumerate(symbols)}
    return "".join(places.get(char, char) for char in text).strip(), places


def _plain(text: str) -> str:
    return PLACE.sub("", text)


def _written(text: str) -> str:
    return PLACE.sub(lambda one: f'<ph x="{ord(one[0]) - PLACES[0] + 1}"/>', encode(text))


def _segment(elements: Elements, segment: Element) -> str:
    """The text of a segment. Its tags are numbered by `x`, else in order."""
    from html import unescape

    found: list[str] = []
    count = 0

    def add(first: int, after: int) -> None:
        nonlocal count
        for number, one in elements.inside(first, after):
            token = elements.tokens[number]
            if one is None:
                found.append(unescape(token.raw) if token.kind == "text" else "")
                continue
            whole = one.name in CODES or one.first + 1 == one.after
            given = elements.attribute(one, "x") if whole else ""
            place = int(given[:4]) - 1 if given.isdecimal() else count
            found.append(chr(PLACES[min(max(place, 0), len(PLACES) - 1)]))
            count += 1
            if not whole:
                add(one.first + 1, one.after - 1)
                found.append(chr(PLACES[min(count, len(PLACES) - 1)]))
                count += 1

    add(segment.first + 1, max(segment.first + 1, segment.after - 1))
    return re.sub(r"\s+", " ", "".join(found)).strip()
