"""HTML: the text of each block is a passage, inline tags are marks in it, code and what must not be translated is
copied, and the attributes that people read are translated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import unescape

from allyouneed.apps.translate.documents.parts import Builder, Document, OwnLanguage, Part, free_symbols
from allyouneed.apps.translate.documents.tokens import MarkupToken, tokens


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VOID = names("area base br col embed hr img input link meta param source track wbr")
BLOCKS = names(
    "address article aside blockquote body caption center col colgroup dd details dialog dir div dl dt "
    "fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend "
    "li link main menu meta nav noframes ol optgroup option p pre search section select summary table tbody td "
    "textarea tfoot th thead title tr ul base iframe object video audio track source param "
)
COPIED = names("script style pre code textarea kbd samp var svg math template iframe object video audio")
UNSEEN = names("script style template svg")  # a passage goes on after them, without a word for them
# a new one ends the one before it
CLOSES_ITSELF = names("p li dt dd tr td th option optgroup")
ATTRIBUTES = frozenset(("title", "alt", "placeholder", "aria-label"))
LANGUAGES = ("lang", "xml:lang")
DESCRIPTION = re.compile(r"description|(?:og|twitter):(?:title|description|image:alt)")
ENTITY = re.compile(r"(&(?:#[0-9]{1,9}|#[xX][0-9A-Fa-f]{1,8}|[A-Za-z][A-Za-z0-9]{1,31});?)")


def read_html(
    text: str,
    *,
    splitting_tags: Iterable[str] = (),
    non_splitting_tags: Iterable[str] = (),
    ignore_tags: Iterable[str] = (),
) -> Document:
    """`splitting_tags` delimit passages as block elements do, `non_splitting_tags` are marks inside of one, and the
    content of `ignore_tags` is copied."""
    splits, stays, ignored = (lower_names(some) for some in (splitting_tags, non_splitting_tags, ignore_tags))
    return Document(_Reader(text, free_symbols(text), (BLOCKS | splits) - stays, COPIED | ignored).read())


def read_html_parts(
    text: str, symbols: Sequence[str], language: OwnLanguage | None = None, xml: bool = False
) -> list[Part]:
    """A part of a document that does not contain these symbols. `language`: of the document; `xml`: it is XHTML, where
    `<a id="x"/>` is an anchor, and no placeholder."""
    return _Reader(text, symbols, BLOCKS, COPIED, language, xml).read()


def lower_names(tags: Iterable[str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in tags)


def add_text(builder: Builder, raw: str) -> None:
    """Add text with entities to a passage."""
    for number, part in enumerate(ENTITY.split(raw)):
        if number % 2 == 0 or (plain := unescape(part)) == part:
            builder.text(part, part)  # words, or an entity that is none
        else:
            builder.entity(part, plain)


def encode(text: str) -> str:
    """Text as HTML: nothing in it is markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\u00a0", "&nbsp;")


class _Reader:
    """`blocks`: elements that delimit passages; `copies`: those whose content is copied."""

    def __init__(
        self,
        text: str,
        symbols: Sequence[str],
        blocks: frozenset[str],
        copies: frozenset[str],
        language: OwnLanguage | None = None,
        xml: bool = False,
    ) -> None:
        self.tokens = iter(tokens(text))
        self.language, self.xml = language or OwnLanguage(), xml
        self.symbols, self.blocks, self.copies = symbols, blocks, copies
        self.builder = Builder(self.symbols, encode)
        self.copied: list[str] = []  # an element that is copied, so far
        self.open: list[str] = []  # elements inside of it, and itself
        self.counts = Counter[str]()  # of their names
        self.inline = True

    def read(self) -> list[Part]:
        for token in self.tokens:
            if self.open:
                self._copy(token)
            elif token.kind == "text":
                add_text(self.builder, token.raw)
            elif token.kind == "other":
                if token.raw.startswith("<!--"):
                    self.builder.mark([token.raw])
                else:
                    self.builder.skip(token.raw)
            else:
                self._tag(token)
        self._end_copy()
        self.builder.end()
        return self.builder.parts

    def _tag(self, token: MarkupToken) -> None:
        opens = token.kind == "start" and token.name not in VOID
        if opens and (token.name in self.copies or _is_marked_copied(token)):
            self.open, self.counts, self.copied = [token.name], Counter([token.name]), [token.raw]
            self.inline = token.name not in self.blocks
            return
        raw = list(self._translated(token))
        if token.name in self.blocks:
            self.builder.skip(*raw)
        elif opens or token.kind == "end":
            self.builder.mark(raw, (token.name, token.kind == "end"))
        elif token.name in VOID or self.xml:
            if token.name == "br":
                self.builder.separate()
            self.builder.mark(raw)
        else:
            self.builder.noun(raw)  # a placeholder: <x id="7"/>

    def _copy(self, token: MarkupToken) -> None:
        """A token in an element that is copied, up to its end tag, or the next element that ends it."""
        if token.kind == "start" and token.name in CLOSES_ITSELF and self.open == [token.name]:
            self._end_copy()
            self._tag(token)
            return
        self.copied.append(token.raw)
        if token.kind == "start" and token.name not in VOID:
            self.open.append(token.name)
            self.counts[token.name] += 1
        elif token.kind == "end" and self.counts[token.name]:
            last = ""
            while last != token.name:
                last = self.open.pop()
                self.counts[last] -= 1
            if not self.open:
                self._end_copy(token.name)

    def _end_copy(self, name: str = "") -> None:
        if not self.copied:
            return
        raw, self.copied, self.open = "".join(self.copied), [], []
        if not self.inline:
            self.builder.skip(raw)
        elif name in UNSEEN:
            self.builder.mark([raw])
        else:
            self.builder.noun([raw])

    def _translated(self, token: MarkupToken) -> Iterator[Part]:
        """A tag, with units for the attributes that are read by people."""
        at = 0
        if token.kind != "end" and not _is_marked_copied(token):
            for found in token.attributes:
                if found.name in LANGUAGES and found.value:
                    start, end = found.start + found.quoted, found.end - found.quoted
                    yield token.raw[at:start]
                    yield self.language.part(found.value, encode)
                    at = end
                if (found.name in ATTRIBUTES or (found.name == "content" and _describes(token))) and found.value:
                    yield token.raw[at : found.start]
                    yield from self._attribute(token.raw[found.start : found.end])
                    at = found.end
        yield token.raw[at:]

    def _attribute(self, raw: str) -> Iterator[Part]:
        quote = raw[0] if raw[0] in "\"'" else ""
        value = raw[1:-1] if quote else raw
        escape = "&#39;" if quote == "'" else "&quot;"

        def write(text: str) -> str:
            text = encode(text).replace(quote or '"', escape)
            return text if quote else f'"{text}"'

        builder = Builder(self.symbols, write)
        if quote:
            add_text(builder, value)
        else:
            builder.text(value, unescape(value))
        builder.end()
        yield from (quote, *builder.parts, quote)


def _describes(token: MarkupToken) -> bool:
    """Whether this is a `meta` element whose content people read, in lists of results and in previews."""
    named = token.attribute("name") or token.attribute("property")
    return token.name == "meta" and bool(DESCRIPTION.fullmatch(named.lower()))


def _is_marked_copied(token: MarkupToken) -> bool:
    named = unescape(token.attribute("class")).lower().split()
    return unescape(token.attribute("translate")).lower() == "no" or "notranslate" in named
