"""Tokens of HTML and XML. Joined, they are the document, byte for byte, however broken it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

REFERENCE = re.compile(r"&#?\w+;?")
Attributes = Sequence[tuple[str, str | None]]


class Token(NamedTuple):
    """`name`: of a tag, in lower case; `kind`: `empty` is `<x/>`, `other` a comment, a declaration, an instruction."""

    kind: Literal["start", "end", "empty", "text", "other"]
    raw: str
    name: str = ""
    attributes: Attributes = ()


def tokens(text: str, xml: bool = False) -> list[Token]:
    """The tokens of a document. `xml`: scripts and styles are elements like others."""
    if not text:
        return []
    parser = _Tokenizer(text, xml)
    parser.feed(text)
    parser.close()
    found: list[Token] = []
    begun = [*parser.found, (len(text), Token("other", ""))]
    if begun[0][0] > 0:
        found.append(Token("other", text[: begun[0][0]]))
    for (start, token), (end, _) in pairwise(begun):
        raw = text[start:end]
        if token.kind == "text" and token.raw != raw:  # something that the parser passes over
            reference = REFERENCE.match(raw)
            size = len(token.raw) if raw.startswith(token.raw) else 0
            size = size or (0 if reference is None else reference.end())
            found += [Token("text", raw[:size])] * bool(size) + [Token("other", raw[size:])] * (size < len(raw))
        elif raw:
            found.append(token._replace(raw=raw))
    return found


class _Tokenizer(HTMLParser):
    """Collects each token with the offset where it begins."""

    def __init__(self, text: str, xml: bool) -> None:
        super().__init__(convert_charrefs=False)
        self.xml = xml
        self.found: list[tuple[int, Token]] = []
        self._lines = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]

    def _add(self, token: Token) -> None:
        line, column = self.getpos()
        self.found.append((self._lines[line - 1] + column, token))

    def set_cdata_mode(self, elem: str, *args: Any, **options: Any) -> None:
        if not self.xml:
            super().set_cdata_mode(elem, *args, **options)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(Token("start", "", tag, attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add(Token("empty", "", tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        self._add(Token("end", "", tag))

    def handle_data(self, data: str) -> None:
        self._add(Token("text", data))

    def handle_entityref(self, name: str) -> None:
        self._add(Token("text", ""))

    def handle_charref(self, name: str) -> None:
        self._add(Token("text", ""))

    def handle_comment(self, data: str) -> None:
        self._add(Token("other", ""))

    def handle_decl(self, decl: str) -> None:
        self._add(Token("other", ""))

    def handle_pi(self, data: str) -> None:
        self._add(Token("other", ""))

    def unknown_decl(self, data: str) -> None:
        self._add(Token("other", ""))
