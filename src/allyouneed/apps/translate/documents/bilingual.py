"""Files of sources and their translations: XLIFF 1.2 and 2, TMX, and the TS files of Qt. As in PO, only what has no
translation, or a draft of one, is translated; everything else stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape

from allyouneed.apps.translate.documents.html import names
from allyouneed.apps.translate.documents.parts import (
    TARGET,
    Builder,
    Document,
    ForTarget,
    OwnLanguage,
    Part,
    Unit,
    free_symbols,
    language_tag,
)
from allyouneed.apps.translate.documents.walker import Element, Elements
from allyouneed.apps.translate.documents.xml import encode
from allyouneed.data.languages import parse_name
from allyouneed.errors import UserError

PAIRS = names("g mrk pc sub hi it")
CODES = names("ph bpt ept x bx ex cp sc ec sm em ut byte")  # what is in them is code
DRAFTS = names("new needs-translation needs-l10n needs-adaptation initial")  # states of a target
XLIFF = "urn:oasis:names:tc:xliff:document:2"


class _PairReader:
    def __init__(self, text: str, root: str, name: str) -> None:
        self.elements = Elements(text)
        if text.strip() and next(self.elements.all(root), None) is None:
            raise UserError(f"not {name}: there is no <{root}>; check the suffix, or set --format")
        self.symbols = free_symbols(text)
        self.edits: dict[int, tuple[int, list[Part]]] = {}  # first token: the one after the last, and what is there

    def document(self) -> Document:
        parts: list[Part] = []
        at = 0
        while at < len(self.elements.tokens):
            after, found = self.edits.get(at, (at, []))
            parts += found
            if after == at:
                parts.append(self.elements.tokens[at].raw)
                after += 1
            at = after
        return Document(parts)

    def child(self, one: Element, name: str) -> Element | None:
        return next((child for child in self.elements.children(one) if child.name == name), None)

    def insert(self, before: int, *parts: Part) -> None:
        """Parts before this token."""
        token = self.elements.tokens[before].raw
        self.edits[before] = before + 1, [*parts, token]

    def replace(self, one: Element, parts: list[Part]) -> None:
        self.edits[one.first] = one.after, parts

    def words(self, source: Element, opens: str, closes: str) -> list[Part]:
        """The content of a source, to be written between these; nothing if there are no words in it."""
        builder = Builder(self.symbols, encode)
        self._add(builder, source.first + 1, max(source.first + 1, source.after - 1))
        builder.end()
        found = [part for part in builder.parts if part]
        if not any(isinstance(part, Unit) for part in found):
            return []
        return [opens, *found, closes]

    def _add(self, builder: Builder, first: int, after: int) -> None:
        for number, one in self.elements.inside(first, after):
            token = self.elements.tokens[number]
            if one is None and token.kind == "text":
                builder.text(token.raw, unescape(token.raw))
            elif one is None:
                builder.mark([token.raw])
            elif one.name in CODES or one.first + 1 == one.after:
                builder.mark([self.elements.raw(one.first, one.after)], noun=one.name in ("ph", "x"))
            else:
                pair = f"{one.name} {one.first}"
                builder.mark([token.raw], (pair, False))
                self._add(builder, one.first + 1, one.after - 1)
                builder.mark([self.elements.tokens[one.after - 1].raw], (pair, True))

    def indent(self, number: int) -> str:
        """The white space before a token."""
        before = self.elements.tokens[number - 1]
        return before.raw if number and before.kind == "text" and not before.raw.strip() else ""

    def name_target(self, one: Element, attribute: str) -> None:
        """Name the target language in a start tag, also where it was not named."""
        token = self.elements.tokens[one.first]
        found = next((a for a in token.attributes if a.name == attribute), None)
        if found is not None and found.value:  # as it is: the translations that are there are in this language
            return
        end = found.start if found is not None else len(token.raw) - (2 if token.raw.endswith("/>") else 1)
        value = "{}" if found is not None else f" {_cased(attribute)}={{}}"
        written = ForTarget(token.raw[end : found.end] if found is not None else "",
                            lambda to: value.format(f'"{language_tag(to)}"'))  # fmt: skip
        rest = token.raw[found.end :] if found is not None else token.raw[end:]
        self.edits[one.first] = one.first + 1, [token.raw[:end], written, rest]


def _cased(attribute: str) -> str:
    return {"trglang": "trgLang"}.get(attribute, attribute)


def read_xliff(text: str, every: bool = False) -> Document:
    """Sources without a target, or whose state says that it is none yet; all of them with `every`."""
    reader = _PairReader(text, "xliff", "XLIFF")
    elements = reader.elements
    second = any(elements.attribute(one, "xmlns").startswith(XLIFF) for one in elements.all("xliff"))
    for one in elements.all("xliff" if second else "file"):
        reader.name_target(one, "trglang" if second else "target-language")
    state = 'state="translated"' if second else 'state="translated" state-qualifier="mt-suggestion"'
    for one in elements.all("segment" if second else "trans-unit"):
        source, target = reader.child(one, "source"), reader.child(one, "target")
        if (
            source is None
            or elements.attribute(one, "translate") == "no"
            or elements.attribute(one, "approved") == "yes"
        ):
            continue
        status = elements.attribute(one if second or target is None else target, "state")
        done = target is not None and bool(elements.text(target).strip()) and status not in DRAFTS
        if done and not every:
            continue
        opens = "<target>" if second else f"<target {state}>"
        parts = reader.words(source, opens, "</target>")
        if not parts:
            continue
        if second:
            _set_state(reader, one)
        if target is not None:
            reader.replace(target, parts)
        else:
            last = reader.child(one, "seg-source") or source
            reader.insert(last.after, reader.indent(source.first), *parts)
    return reader.document()


def _set_state(reader: _PairReader, one: Element) -> None:
    """A segment of XLIFF 2 is translated now."""
    token = reader.elements.tokens[one.first]
    found = next((a for a in token.attributes if a.name == "state"), None)
    if found is None:
        raw = f'{token.raw[:-1]} state="translated">'
    else:
        raw = f'{token.raw[: found.start]}"translated"{token.raw[found.end :]}'
    reader.edits[one.first] = one.first + 1, [raw]


def read_ts(text: str, every: bool = False) -> Document:
    """Translations of Qt that are empty or unfinished; they stay unfinished until a person has looked at them."""
    reader = _PairReader(text, "ts", "a TS file of Qt")
    elements = reader.elements
    for one in elements.all("ts"):
        reader.name_target(one, "language")
    for one in elements.all("message"):
        source, target = reader.child(one, "source"), reader.child(one, "translation")
        if source is None or target is None:
            continue
        state = elements.attribute(target, "type")
        if state in ("vanished", "obsolete") or not (
            every or state == "unfinished" or not elements.text(target).strip()
        ):
            continue
        tag = elements.tokens[target.first].raw
        begins, ends = (tag[:-2] + ">" if tag.endswith("/>") else tag), "</translation>"
        forms = [child for child in elements.children(target) if child.name == "numerusform"]
        if not forms:
            if parts := reader.words(source, begins, ends):
                reader.replace(target, parts)
            continue
        for form in forms:
            if parts := reader.words(source, "<numerusform>", "</numerusform>"):
                reader.replace(form, parts)
    return reader.document()


@dataclass(frozen=True, eq=False)
class Variant(Unit):
    """A translation that is added to a unit of TMX, unless it has one in this language. `known`: its languages."""

    known: tuple[str, ...] = ()
    indent: str = ""

    def write(self, text: str, answers: Mapping[Unit, str]) -> str:
        to = answers.get(TARGET)
        if to is None or parse_name(to).language in self.known:
            return ""
        return f'{self.indent}<tuv xml:lang="{language_tag(to)}"><seg>{super().write(text, answers)}</seg></tuv>'


def read_tmx(text: str) -> Document:
    """Each unit gets a translation of the first of its segments that is in the source language."""
    reader, own = _PairReader(text, "tmx", "TMX"), OwnLanguage()
    elements = reader.elements
    header = next(elements.all("header"), None)
    if header is not None and elements.attribute(header, "srclang") not in ("", "*all*"):
        own.part(elements.attribute(header, "srclang"))
    for one in elements.all("tu"):
        variants = [child for child in elements.children(one) if child.name == "tuv"]
        spoken = [
            parse_name(elements.attribute(tuv, "xml:lang") or elements.attribute(tuv, "lang")).language
            for tuv in variants
        ]
        chosen = next((n for n, language in enumerate(spoken) if language == own.code), 0)
        source = reader.child(variants[chosen], "seg") if variants else None
        parts = [] if source is None else reader.words(source, "", "")
        last = variants[-1].after if variants else 0
        indent = reader.indent(variants[-1].first) if variants else ""
        added: list[Part] = [
            Variant(part.passage, part.raw, part.marks, part.encode, part.ordered, tuple(spoken), indent)
            for part in parts
            if isinstance(part, Unit)
        ]
        if len(added) == 1:  # a segment that has too many marks is left out
            reader.insert(last, *added)
    return reader.document()
