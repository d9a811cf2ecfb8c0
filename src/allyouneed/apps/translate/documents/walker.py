"""Vocabularies of XML in which some elements are paragraphs: Office Open XML (ECMA-376) and OpenDocument (ISO 26300).

A paragraph is a passage; its formatting, links, notes and fields are marks in it. A vocabulary is a table of names.
Nothing is parsed into a tree and written again: every byte outside of a translated passage stays as it is, and entities
are never expanded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import NamedTuple

from allyouneed.apps.translate.documents.html import names
from allyouneed.apps.translate.documents.parts import Builder, Pair, Part, Unit, free_symbols, render
from allyouneed.apps.translate.documents.tokens import tokens
from allyouneed.apps.translate.documents.xml import encode
from allyouneed.errors import UserError

DEEPEST = 200  # elements inside of each other
DEEPEST_FIELD = 5
# of a run: no formatting
PROPERTIES = re.compile(
    r"<\w*:?(?:lang|noProof|proofErr)\b[^>]*/>"
    r"|(?<=[\"\w])\s(?:lang|altLang|dirty|err|smtClean|smtId|noProof)=\"[^\"]*\"(?=[^<]*>)"
)
PREFIX = re.compile(r"<([\w.-]+:)")
IDENTIFIER = re.compile(r'\bw:id="([^"]*)"')


@dataclass(frozen=True)
class Vocabulary:
    """Names of elements, in lower case. `prefixes`: of these names, by namespace. `blocks` are passages, `copied` are
    not read; in a block, `pairs` enclose words, `nouns` stand for a thing, `breaks` separate words, `dropped` are not
    in a translation; whatever else there is stays a mark. `runs` have one formatting and `texts` in them have all
    words; without `runs`, words are directly in the block."""

    prefixes: Mapping[str, str]
    blocks: frozenset[str]
    pairs: frozenset[str]
    nouns: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    runs: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


_WORD, _DRAWING, _SHEET = (f"schemas.openxmlformats.org/{name}/main" for name in (
    "wordprocessingml/2006", "drawingml/2006", "spreadsheetml/2006"))  # fmt: skip
OFFICE = Vocabulary(
    prefixes={f"http://{_WORD}": "w:", f"http://{_DRAWING}": "a:", f"http://{_SHEET}": "x:"}
    | {f"http://purl.oclc.org/ooxml/{name}/main": short for name, short in
       (("wordprocessingml", "w:"), ("drawingml", "a:"), ("spreadsheetml", "x:"))},
    blocks=names("w:p a:p x:si x:is x:text"),
    pairs=names("w:hyperlink w:ins w:moveto w:smarttag w:fldsimple w:sdt w:dir w:bdo w:customxml"),
    nouns=names("a:fld m:omath m:omathpara"),
    breaks=names("w:br w:cr w:tab w:ptab a:br"),
    dropped=names("w:prooferr w:lastrenderedpagebreak w:softhyphen x:rph x:phoneticpr"),
    copied=names("w:del w:movefrom"),
    runs=names("w:r a:r x:r"),
    texts=names("w:t a:t x:t"),
)  # fmt: skip
OPEN = Vocabulary(
    prefixes={f"urn:oasis:names:tc:opendocument:xmlns:{name}:1.0": f"{name}:" for name in ("text", "table", "office")},
    blocks=names("text:p text:h"),
    pairs=names("text:span text:a text:meta text:ruby text:ruby-base"),
    nouns=names(
        "text:page-number text:page-count text:date text:time text:chapter text:sequence text:bookmark-ref "
        "text:reference-ref text:sequence-ref text:note-ref text:variable-set text:variable-get text:user-field-get "
        "text:file-name text:author-name text:author-initials text:expression text:database-display text:placeholder"
    ),
    breaks=names("text:s text:tab text:line-break"),
    dropped=names("text:soft-page-break"),
    copied=names("text:tracked-changes text:changed-region office:scripts"),
)


class Element(NamedTuple):
    """An element of a document: its first token and the one after its last."""

    name: str
    first: int
    after: int


class Elements:
    """The elements of an XML document, by the number of their first token. Names have the prefixes that the vocabulary
    gives to the namespaces of the document."""

    def __init__(self, text: str, prefixes: Mapping[str, str] = {}) -> None:
        self.tokens = tokens(text, xml=True)
        given: dict[str, str] = {}
        for token in self.tokens:
            for one in token.attributes:
                if one.name == "xmlns" or one.name.startswith("xmlns:"):
                    given.setdefault(one.name[6:] + ":" * (len(one.name) > 6), one.value)
        self.renamed = {prefix: prefixes[value] for prefix, value in given.items() if value in prefixes}
        self.afters: dict[int, int] = {}
        opened: list[int] = []
        for number, token in enumerate(self.tokens):
            if token.kind == "start":
                opened.append(number)
            elif token.kind == "end":
                if not opened or self.tokens[opened[-1]].name != token.name:
                    raise UserError(f"not well-formed XML: {token.raw[:40]} closes nothing; save it again")
                self.afters[opened.pop()] = number + 1
            elif token.kind == "empty":
                self.afters[number] = number + 1
            if len(opened) > DEEPEST:
                raise UserError(f"more than {DEEPEST} elements inside of each other; save it again")
        if opened:
            raise UserError(f"not well-formed XML: {self.tokens[opened[-1]].raw[:40]} has no end; save it again")

    def at(self, number: int) -> Element | None:
        """The element that begins here; None for text and whatever else has no name."""
        after = self.afters.get(number)
        if after is None:
            return None
        prefix, colon, local = self.tokens[number].name.rpartition(":")
        return Element(self.renamed.get(prefix + colon, prefix + colon) + local, number, after)

    def inside(self, first: int, after: int) -> Iterator[tuple[int, Element | None]]:
        """What follows each other between two tokens: elements, and the numbers of tokens that are in none."""
        while first < after:
            found = self.at(first)
            yield first, found
            first = first + 1 if found is None else found.after

    def children(self, one: Element) -> list[Element]:
        found = (child for _, child in self.inside(one.first + 1, one.after - 1))
        return [child for child in found if child is not None]

    def all(self, name: str) -> Iterator[Element]:
        return (one for number in self.afters if (one := self.at(number)) is not None and one.name == name)

    def raw(self, first: int, after: int) -> str:
        return "".join(token.raw for token in self.tokens[first:after])

    def text(self, one: Element) -> str:
        """The characters of an element."""
        inside = self.tokens[one.first + 1 : one.after - 1]
        return unescape("".join(token.raw for token in inside if token.kind == "text"))

    def attribute(self, one: Element, name: str) -> str:
        return unescape(self.tokens[one.first].attribute(name))


class RunFormat(str):
    """The properties of the runs that follow, in place of a mark."""


END = RunFormat()  # those before hold again


@dataclass(frozen=True, eq=False)
class RunUnit(Unit):
    """A paragraph of runs. `base`: the properties of most of its words; `run`: the beginning and the end of a run."""

    base: str = ""
    run: tuple[str, str, str] = ("", "", "")

    def write(self, text: str, answers: Mapping[Unit, str]) -> str:
        if text == self.passage:
            return render(self.raw, answers)
        formats, written, (begins, middle, ends) = [self.base], list[str](), self.run
        for piece in self.pieces(text):
            parts = self.marks.get(piece)
            if parts is None:
                written += [begins, formats[-1], middle, self.encode(piece), ends] * bool(piece)
            elif parts and isinstance(parts[0], RunFormat):
                if parts[0] is not END:
                    formats.append(parts[0])
                elif len(formats) > 1:
                    formats.pop()
            else:
                written.append(render(parts, answers))
        return "".join(written)


@dataclass
class Item:
    """A piece of a paragraph. `plain`: its words; None: it is a mark. `written`: as it is in a translation. `style`:
    the properties of its run."""

    raw: list[Part]
    plain: str | None = None
    style: str = ""
    written: list[Part] | None = None
    pair: Pair | None = None
    kind: str = ""  # noun, break, or a field: begin, separate, end
    code: str = ""  # of a field


class Walker:
    """Reads one document of a vocabulary. `kept`: paragraphs that are not translated."""

    def __init__(self, text: str, vocabulary: Vocabulary, kept: frozenset[str] = frozenset()) -> None:
        self.words, self.kept = vocabulary, kept
        self.elements = Elements(text, vocabulary.prefixes)
        self.symbols = free_symbols(text)

    def read(self) -> list[Part]:
        return self._outside(0, len(self.elements.tokens))

    def _outside(self, first: int, after: int) -> list[Part]:
        """Tokens outside of paragraphs."""
        parts: list[Part] = []
        while first < after:
            one = self.elements.at(first)
            if one is not None and one.name in self.words.blocks:
                parts += self._block(one)
                first = one.after
            elif one is not None and (one.name in self.words.copied or self._is_value(one)):
                parts.append(self.elements.raw(one.first, one.after))
                first = one.after
            else:
                parts.append(self.elements.tokens[first].raw)
                first += 1
        return parts

    def _is_value(self, one: Element) -> bool:
        """Whether this is a cell that has a number, a date or a formula."""
        if one.name != "table:table-cell":
            return False
        kind = self.elements.attribute(one, "office:value-type")
        return kind not in ("", "string") or bool(self.elements.attribute(one, "table:formula"))

    def _block(self, block: Element) -> list[Part]:
        raw, tag = self.elements.raw, self.elements.tokens[block.first].raw
        first, head = block.first + 1, block.first + 1
        if block.first + 1 == block.after:
            return [raw(block.first, block.after)]
        if (one := self.elements.at(first)) is not None and one.name.endswith(":ppr"):
            head = one.after
        builder = Builder(self.symbols, encode, [raw(block.first, head)])
        items = merged(list(self._items(head, block.after - 1)))
        letters = Counter[str]()
        for item in items:
            letters[item.style] += sum(map(str.isalpha, item.plain or ""))
        base = max(letters, key=lambda style: letters[style], default="")
        if "".join(item.plain or "" for item in items) in self.kept:
            return [raw(block.first, block.after)]
        self._build(builder, items, base)
        builder.skip(self.elements.tokens[block.after - 1].raw)
        if not self.words.runs:
            return builder.parts
        name = found[1] if (found := PREFIX.match(tag)) is not None else ""
        space = "" if block.name.startswith("a:") else ' xml:space="preserve"'
        only = block.name.startswith("x:") and not base and not any(map(letters.get, letters.keys() - {base}))
        run = (f"<{name}r>", f"<{name}t{space}>", f"</{name}t></{name}r>")
        run = ("", run[1], f"</{name}t>") if only else run
        return [
            RunUnit(part.passage, part.raw, part.marks, part.encode, False, base, run)
            if isinstance(part, Unit)
            else part
            for part in builder.parts
        ]

    def _build(self, builder: Builder, items: Sequence[Item], base: str) -> None:
        current = base

        def change(style: str) -> None:
            nonlocal current
            if current != base:
                builder.mark((), ("format", True), END)
            if style != base:
                builder.mark((), ("format", False), RunFormat(style))
            current = style

        for item in items:
            if item.plain is not None:
                if item.plain.strip() and item.style != current:
                    change(item.style)
                builder.text("".join(map(str, item.raw)), item.plain)
                continue
            if item.pair is not None:
                change(base)
            if item.kind == "break":
                builder.separate()
            if item.kind == "end of text":
                change(base)
                builder.skip(*item.raw)
            else:
                builder.mark(item.raw, item.pair, item.written, noun=item.kind == "noun")
        change(base)

    def _items(self, first: int, after: int) -> Iterator[Item]:
        """The pieces of a paragraph, up to this token."""
        words, raw = self.words, self.elements.raw
        for number, one in self.elements.inside(first, after):
            if one is None:
                text = self.elements.tokens[number].raw
                if self.elements.tokens[number].kind != "text" or words.runs:
                    yield Item([text], "" if words.runs else None)
                else:
                    yield Item([text], unescape(text))
            elif one.name in words.runs:
                yield from self._run(one)
            elif one.name in words.texts:
                yield self._text(one, "")
            elif one.name in words.dropped:
                yield Item([raw(one.first, one.after)], "")
            elif one.name in words.pairs:
                opens, closes = self._ends(one)
                name = f"{one.name} {one.first}"
                yield Item([raw(one.first, opens)], pair=(name, False))
                yield from self._items(opens, closes)
                yield Item([raw(closes, one.after)], pair=(name, True))
            elif one.name == "a:endpararpr":
                yield Item([raw(one.first, one.after)], kind="end of text")
            elif one.name in words.copied:
                yield Item([raw(one.first, one.after)])
            else:
                kind = "noun" if one.name in words.nouns else "break" if one.name in words.breaks else ""
                parts: list[Part] = [raw(one.first, one.after)] if kind else self._outside(one.first, one.after)
                yield Item(parts, kind=kind, pair=self._range(one))

    def _range(self, one: Element) -> Pair | None:
        """A range that begins or ends here: of a bookmark, a comment."""
        local = one.name.rpartition(":")[2]
        for end in ("start", "end"):
            if local.endswith(end) and (found := IDENTIFIER.search(self.elements.tokens[one.first].raw)) is not None:
                return f"{local.removesuffix(end)} {found[1]}", end == "end"
        return None

    def _ends(self, one: Element) -> tuple[int, int]:
        """Where the content of a pair begins, after its properties, and where it ends."""
        first = one.first + 1
        if first == one.after:
            return first, first
        for child in self.elements.children(one):
            if child.name == "w:sdtcontent" and child.first + 1 < child.after:
                return child.first + 1, child.after - 1
            if not child.name.endswith("pr"):
                break
            first = child.after
        return first, one.after - 1

    def _text(self, one: Element, style: str) -> Item:
        return Item([self.elements.raw(one.first, one.after)], self.elements.text(one), style)

    def _run(self, run: Element) -> Iterator[Item]:
        """The texts of a run, and its other content, each in a run of its own."""
        words, raw, token = self.words, self.elements.raw, self.elements.tokens
        first, style = run.first + 1, ""
        one = self.elements.at(first) if first < run.after else None
        if one is not None and one.name.endswith(":rpr"):
            first, style = one.after, PROPERTIES.sub("", raw(one.first, one.after))
        begins = raw(run.first, first)
        style = "" if re.fullmatch(r"<[\w:]+(?:/>|></[\w:]+>)", style) else style
        ends = token[run.after - 1].raw if first < run.after else ""
        items: list[Item] = []
        for number, one in self.elements.inside(first, max(first, run.after - 1)):
            if one is None:
                items.append(Item([token[number].raw], "", style))
            elif one.name in words.texts:
                items.append(self._text(one, style))
            elif one.name == "w:nobreakhyphen":
                items.append(Item([raw(one.first, one.after)], "\u2011", style))
            elif one.name in words.dropped:
                items.append(Item([raw(one.first, one.after)], "", style))
            else:
                parts = self._outside(one.first, one.after)
                kind, code = "break" if one.name in words.breaks else "", ""
                if one.name == "w:fldchar":
                    kind = self.elements.attribute(one, "w:fldchartype")
                elif one.name == "w:instrtext":
                    kind, code = "code", self.elements.text(one)
                items.append(Item(parts, None, style, [begins, *parts, ends], kind=kind, code=code))
        items = items or [Item([], "", style)]
        items[0].raw.insert(0, begins)
        items[-1].raw.append(ends)
        yield from items


def merged(items: list[Item]) -> list[Item]:
    """With each field that ends in this paragraph as one mark; the text of a link that is a field as words."""
    found: list[Item] = []
    begins: list[int] = []  # of fields that are open
    for item in items:
        if item.kind == "begin":
            begins.append(len(found))
        found.append(item)
        if item.kind != "end" or not begins:
            continue
        begin = begins.pop()
        if len(begins) > DEEPEST_FIELD:
            continue  # one of those around it contains it
        field, middle = found[begin:], None
        code = "".join(one.code for one in field)
        if code.split()[:1] == ["HYPERLINK"]:
            middle = next((n for n, one in enumerate(field) if one.kind == "separate"), None)
        if middle is None:
            found[begin:] = [_joined(field, "noun", None)]
        else:
            name = f"field {begin}"
            found[begin:] = [_joined(field[: middle + 1], "", (name, False)), *field[middle + 1 : -1],
                             _joined(field[-1:], "", (name, True))]  # fmt: skip
    for number, item in enumerate(found):
        if item.kind in ("code", "separate", "begin", "end"):
            found[number] = _joined([item], "", None)
    return found


def _joined(items: Sequence[Item], kind: str, pair: Pair | None) -> Item:
    raw = [part for item in items for part in item.raw]
    written = [part for item in items for part in (item.raw if item.written is None else item.written)]
    return Item(raw, None, items[0].style, written, pair, kind)
