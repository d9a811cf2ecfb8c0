"""HTML: the text of each block is a passage, inline tags are marks in it, code and what must not be translated is
copied, and the attributes that people read are translated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import unescape

from allyouneed.infer.translation.documents.parts import Builder, Document, Part, free_symbols
from allyouneed.infer.translation.documents.tokens import Token, tokens


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
ATTRIBUTE = re.compile(r"""([^\s"'<>/=]+)(\s*=\s*)("[^"]*"|'[^']*'|[^\s"'>]+)""")


def read_html(text: str) -> Document:
    return Document(read_html_parts(text, free_symbols(text)))


def read_html_parts(text: str, symbols: Sequence[str]) -> list[Part]:
    """A part of a document that does not contain these symbols."""
    return _Reader(text, symbols).read()


def encode(text: str) -> str:
    """Text as HTML: nothing in it is markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\u00a0", "&nbsp;")


class _Reader:
    def __init__(self, text: str, symbols: Sequence[str]) -> None:
        self.tokens = iter(tokens(text))
        self.symbols = symbols
        self.builder = Builder(self.symbols, encode)
        self.copied: list[str] = []  # an element that is copied, so far
        self.open: list[str] = []  # elements inside of it, and itself
        self.inline = True

    def read(self) -> list[Part]:
        for token in self.tokens:
            if self.open:
                self._copy(token)
            elif token.kind == "text":
                self.builder.text(token.raw, unescape(token.raw))
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

    def _tag(self, token: Token) -> None:
        opens = token.kind == "start" and token.name not in VOID
        if opens and _is_copied(token):
            self.open, self.copied = [token.name], [token.raw]
            self.inline = token.name not in BLOCKS
            return
        raw = list(self._translated(token))
        if token.name in BLOCKS:
            self.builder.skip(*raw)
        elif opens or token.kind == "end":
            self.builder.mark(raw, (token.name, token.kind == "end"))
        elif token.name in VOID:
            if token.name == "br":
                self.builder.separate()
            self.builder.mark(raw)
        else:
            self.builder.noun(raw)  # a placeholder: <x id="7"/>

    def _copy(self, token: Token) -> None:
        """A token in an element that is copied, up to its end tag, or the next element that ends it."""
        if token.kind == "start" and token.name in CLOSES_ITSELF and self.open == [token.name]:
            self._end_copy()
            self._tag(token)
            return
        self.copied.append(token.raw)
        if token.kind == "start" and token.name not in VOID:
            self.open.append(token.name)
        elif token.kind == "end" and token.name in self.open:
            while self.open.pop() != token.name:
                pass
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

    def _translated(self, token: Token) -> Iterator[Part]:
        """A tag, with units for the attributes that are read by people."""
        at = 0
        if token.kind != "end" and not _is_marked_copied(token):
            for found in ATTRIBUTE.finditer(token.raw):
                if found[1].lower() in ATTRIBUTES:
                    yield token.raw[at : found.start(3)]
                    yield from self._attribute(found[3])
                    at = found.end()
        yield token.raw[at:]

    def _attribute(self, raw: str) -> Iterator[Part]:
        quote = raw[0] if raw[0] in "\"'" else ""
        value = raw[1:-1] if quote else raw
        escape = "&#39;" if quote == "'" else "&quot;"

        def write(text: str) -> str:
            text = encode(text).replace(quote or '"', escape)
            return text if quote else f'"{text}"'

        builder = Builder(self.symbols, write)
        builder.text(value, unescape(value))
        builder.end()
        yield from (quote, *builder.parts, quote)


def _is_copied(token: Token) -> bool:
    return token.name in COPIED or _is_marked_copied(token)


def _is_marked_copied(token: Token) -> bool:
    found = dict(token.attributes)
    return (found.get("translate") or "").lower() == "no" or "notranslate" in (found.get("class") or "").lower().split()
