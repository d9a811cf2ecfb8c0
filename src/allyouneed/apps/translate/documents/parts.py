"""A document as parts: strings that stay as they are, and units that are translated.

A unit holds a passage: the words of a paragraph, a cell or a cue, in which each tag is one private-use character. The
translator carries those characters through (carry.py). So text can never become markup, nor markup text: only the unit
knows what a character stands for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from allyouneed.apps.translate.spans.spans import Passage, Span, SpanKind
from allyouneed.data.languages import parse_name

INVALID = "\ufffd"
MOST_MARKS = 1000  # of a passage; a longer one is divided
PRIVATE = range(0xE000, 0xF900)
SPACES = " \t\r\n\f"
SPACE = re.compile(f"[{SPACES}]+")
MARK = SpanKind("tag", "mark", "")
NOUN = SpanKind("code", "noun", "")
Pair = tuple[str, bool]  # the name of a tag, and whether it closes


@dataclass(frozen=True, eq=False)
class Unit:
    """`raw`: the passage as it is in the document; `marks`: what each of its characters stands for; `encode`: text as
    it is written in this format. `ordered`: the marks must stay in their order."""

    passage: Passage
    raw: tuple[Part, ...]
    marks: Mapping[str, tuple[Part, ...]]
    encode: Callable[[str], str]
    ordered: bool = False

    def written(self, answers: Mapping[Unit, str]) -> str:
        return self.write(answers[self], answers)

    def write(self, text: str, answers: Mapping[Unit, str]) -> str:
        """The passage with this translation. Unchanged words stay as they were written, byte for byte."""
        if text == self.passage:
            return render(self.raw, answers)
        return "".join(
            render(self.marks[piece], answers) if piece in self.marks else self.encode(piece)
            for piece in self.pieces(text)
        )

    def pieces(self, text: str) -> list[str]:
        """Words and marks, in turn. Each mark is there once; properly nested if the source is."""
        if not self.marks:
            return [text]
        pattern = re.compile(f"([{''.join(self.marks)}])")
        before, after = pattern.findall(self.passage), pattern.findall(text)
        if sorted(before) != sorted(after):  # the translator keeps them; a custom one may not
            return pattern.split(self.passage)
        if before != after and (self.ordered or not nested(after, self.passage.spans)):
            rest = iter(before)
            text = pattern.sub(lambda _: next(rest), text)
        return pattern.split(text)


@dataclass(frozen=True, eq=False)
class Embedded:
    """A document inside another one: a cell of a notebook, a member of a package. `source`: as it is written there;
    `encode`: another text as it is written there."""

    raw: tuple[Part, ...]
    source: str
    encode: Callable[[str], str] = str

    def written(self, answers: Mapping[Unit, str]) -> str:
        text = render(self.raw, answers)
        return self.source if text == render(self.raw, SOURCE) else self.encode(text)


@dataclass(frozen=True, eq=False)
class ForTarget:
    """What depends on the language of a document, such as `lang="en"`. `encode`: as it is written for another one."""

    source: str
    encode: Callable[[str], str]
    raw: tuple[Part, ...] = ()

    def written(self, answers: Mapping[Unit, str]) -> str:
        return self.encode(answers[TARGET]) if TARGET in answers else self.source


Part = str | Unit | Embedded | ForTarget


class OwnLanguage:
    """The language that a document names first is its own: wherever it is named, a translation names another one."""

    def __init__(self) -> None:
        self.code = ""

    def part(self, value: str, encode: Callable[[str], str] = str) -> Part:
        named = parse_name(value).language
        self.code = self.code or named
        return ForTarget(value, lambda to: encode(language_tag(to))) if named and named == self.code else value


def language_tag(name: str) -> str:
    """The BCP 47 tag of a language: `zh-Hant`."""
    found = parse_name(name)
    return f"{found.language}-{found.script.title()}" if found.script is not None else found.language


class _Source(dict[Unit, str]):
    """Each passage as its own translation."""

    def __missing__(self, unit: Unit) -> str:
        return unit.passage


SOURCE = _Source()
TARGET = Unit(Passage("", {}), (), {}, str)  # not part of any document: its answer is the target language


def render(parts: Iterable[Part], answers: Mapping[Unit, str]) -> str:
    return "".join(part if isinstance(part, str) else part.written(answers) for part in parts)


def units(parts: Iterable[Part]) -> Iterator[Unit]:
    """All units, also those inside of marks (attributes of tags)."""
    for part in parts:
        if isinstance(part, Unit):
            yield part
        if not isinstance(part, str):
            yield from units(part.raw)


def nested(symbols: Sequence[str], spans: Mapping[str, Span]) -> bool:
    """Whether every tag that closes closes the last one that is open. Tags without a partner are no pair."""
    opened: list[str] = []
    for symbol in symbols:
        pair = spans[symbol].pair
        if pair is None:
            continue
        name, closes = pair
        if not closes:
            opened.append(name)
        elif not opened or opened.pop() != name:
            return False
    return not opened


@dataclass(frozen=True)
class Document:
    """A document that was read; `encoding`: of its file."""

    parts: list[Part]
    encoding: str = "utf-8"

    @cached_property
    def units(self) -> list[Unit]:
        return list(units(self.parts))

    def write(self, texts: Sequence[str], to: str | None = None) -> str:
        """With these translations of the passages of its units. `to`: their language, which the document then names."""
        return render(self.parts, self.answers(texts, to))

    def data(self, texts: Sequence[str], to: str | None = None) -> bytes:
        """The same, as the content of a file."""
        return self.write(texts, to).encode(self.encoding, "xmlcharrefreplace")

    def answers(self, texts: Sequence[str], to: str | None) -> dict[Unit, str]:
        found = dict(zip(self.units, texts, strict=True))
        changed = to is not None and any(text != unit.passage for unit, text in found.items())
        return {**found, TARGET: str(to)} if changed else found


@dataclass
class Builder:
    """Collects the words and marks of one passage. `symbols`: private-use characters that are not in the document."""

    symbols: Sequence[str]
    encode: Callable[[str], str]
    parts: list[Part] = field(default_factory=list)  # of the document, before the passage
    ordered: bool = False
    _items: list[Item] = field(default_factory=list)
    _written: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    _spelled: dict[str, str] = field(default_factory=dict)
    _marks: int = 0

    def text(self, raw: str, plain: str) -> None:
        """`plain`: the text as it is read."""
        self._items.append(((raw,), plain, None))

    def entity(self, raw: str, char: str) -> None:
        """A character that is written as an entity. It is written so in the translation as well, unless the passage
        also contains it as it is. A symbol such as © is a mark: models leave it out."""
        if len(char) == 1 and unicodedata.category(char) == "So":
            self.mark([raw])
            return
        self.text(raw, char)
        if len(char) == 1:
            self._spelled.setdefault(char, raw)

    def mark(
        self,
        raw: Iterable[Part],
        pair: Pair | None = None,
        written: Part | Sequence[Part] | None = None,
        noun: bool = False,
    ) -> None:
        """`written`: as it is in a translation, where that is not `raw`. `noun`: see `noun`."""
        symbol = self._span(tuple(raw), NOUN if noun else MARK, pair)
        if written is not None:
            self._written[symbol] = tuple(written) if not isinstance(written, Part) else (written,)

    def separate(self) -> None:
        """Before a mark that separates words, such as a line break: the model reads a space."""
        if self._items and not self._items[-1][1].endswith(" "):
            self._items.append(((), " ", None))

    def noun(self, raw: Iterable[Part]) -> None:
        """Something that is copied and stands for a thing in its sentence, such as code."""
        self.mark(raw, noun=True)

    def _span(self, raw: tuple[Part, ...], kind: SpanKind, pair: Pair | None) -> str:
        if self._marks == len(self.symbols):
            self.end()
        symbol = self.symbols[self._marks]
        self._marks += 1
        self._items.append((raw, symbol, Span(symbol, kind, pair=pair)))
        return symbol

    def aside(self, raw: str) -> None:
        """What is not seen: copied before the first word of a passage, a mark in it."""
        if any(plain.strip() for _, plain, _ in self._items):
            self.mark([raw])
        else:
            self.skip(raw)

    def skip(self, *raw: Part) -> None:
        """End the passage; these parts follow it and are copied."""
        self.end()
        self.parts += raw

    def end(self) -> None:
        items, self._items, self._marks = self._items, [], 0
        renamed, self._written = self._written, {}
        spelled, self._spelled = self._spelled, {}
        if not any(span is None and any(map(str.isalpha, plain)) for _, plain, span in items):
            self.parts += [part for raw, _, _ in items for part in raw]
            return
        lead, tail = _cut_space(items, 0), _cut_space(items, -1)
        passage = SPACE.sub(" ", "".join(plain for _, plain, _ in items)).replace(INVALID, "")
        marks = {span.text: raw for raw, _, span in items if span is not None} | renamed
        spans = {span.text: span for _, _, span in items if span is not None}
        whole = tuple(part for raw, _, _ in items for part in raw)
        literal = {char for raw, plain, _ in items if raw == (plain,) for char in plain}
        encode = spelling(self.encode, {char: raw for char, raw in spelled.items() if char not in literal})
        self.parts += [lead, Unit(Passage(passage, spans), whole, marks, encode, self.ordered), tail]


Item = tuple[tuple[Part, ...], str, Span | None]


def spelling(encode: Callable[[str], str], spelled: Mapping[str, str]) -> Callable[[str], str]:
    """Writes these characters as given, and the rest by `encode`."""
    if not spelled:
        return encode
    pattern = re.compile(f"([{re.escape(''.join(spelled))}])")
    return lambda text: "".join(spelled.get(part) or encode(part) for part in pattern.split(text))


def _cut_space(items: list[Item], end: int) -> str:
    """Take the white space off one end of a passage: the first item (0) or the last (-1)."""
    raw, plain, span = items[end]
    text = "".join(part for part in raw if isinstance(part, str))
    rest = text.lstrip(SPACES) if end == 0 else text.rstrip(SPACES)
    size = len(text) - len(rest)
    if span is not None or not size:
        return ""
    items[end] = (rest,), plain[size:] if end == 0 else plain[:-size], None
    return text[:size] if end == 0 else text[-size:]


def free_symbols(text: str, most: int = MOST_MARKS) -> list[str]:
    """Private-use characters that a document does not contain."""
    used = set(text)
    return [char for char in map(chr, PRIVATE) if char not in used][:most]
