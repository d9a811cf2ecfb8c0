"""Tokens of HTML and XML, after the HTML standard. Joined, they are the document, byte for byte, however broken it is.

The work is linear in the size of the document: what a scan passes over becomes a token, and where the end of something
is missing, `Ends` knows it without a search.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

# an attribute, or the end of the tag; no quantifier gives back what it took
ATTRIBUTE = re.compile(
    r"""[\s/]*+(?:(?P<close>>)|(?P<name>[^\s/>][^\s/>=]*+)(?P<equals>\s*+=\s*+(?P<value>"[^"]*+"|'[^']*+'|[^\s"'>][^\s>]*+)?+)?+)"""
)
TAG = re.compile(r"</?+(?P<name>[A-Za-z][^\s/>]*+)")
XML_TAG = re.compile(r"</?+(?P<name>[^\W\d][^\s/>]*+|:[^\s/>]*+)")
# elements whose content has no tags: only their own end tag ends it
RAW = frozenset(("script", "style", "xmp", "iframe", "noembed", "noframes", "textarea", "title"))


class Attribute(NamedTuple):
    """`name`: in lower case; `value`: as it is written, without quotes; `start`, `end`: of it with its quotes, in the
    tag."""

    name: str
    value: str
    start: int
    end: int

    @property
    def quoted(self) -> bool:
        return self.end - self.start > len(self.value)


class MarkupToken(NamedTuple):
    """`name`: of a tag, in lower case; `kind`: `empty` is `<x/>`, `other` a comment, a declaration, an instruction."""

    kind: Literal["start", "end", "empty", "text", "other"]
    raw: str
    name: str = ""
    attributes: tuple[Attribute, ...] = ()

    def attribute(self, name: str) -> str:
        """The value of an attribute; empty if there is none."""
        return next((one.value for one in self.attributes if one.name == name), "")


class Ends:
    """Where something ends in a text. A search from behind, made once, tells whether there is an end at all."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.last: dict[str, int] = {}

    def has(self, end: str, at: int) -> bool:
        if end not in self.last:
            self.last[end] = self.text.rfind(end)
        return at <= self.last[end]

    def find(self, end: str, at: int) -> int:
        """The offset after the next `end`; 0 if there is none."""
        return self.text.find(end, at) + len(end) if self.has(end, at) else 0


def tokens(text: str, xml: bool = False) -> list[MarkupToken]:
    """The tokens of a document. `xml`: scripts and styles are elements like others."""
    found: list[MarkupToken] = []
    ends, size = Ends(text), len(text)
    begin = at = 0  # of the text that is being read, and where the next tag may begin
    while (opens := text.find("<", at)) >= 0:
        token = _markup(text, opens, ends, xml)
        if token is None:
            at = opens + 1
            continue
        if begin < opens:
            found.append(MarkupToken("text", text[begin:opens]))
        found.append(token)
        begin = at = opens + len(token.raw)
        if token.kind == "start" and token.name in RAW and not xml:
            close = re.compile(rf"</{token.name}(?=[\s/>])", re.IGNORECASE).search(text, at)
            at = size if close is None else close.start()
    if begin < size:
        found.append(MarkupToken("text", text[begin:]))
    return found


def _markup(text: str, at: int, ends: Ends, xml: bool) -> MarkupToken | None:
    """What begins with `<` at this offset; None if that is text."""
    following = text[at + 1 : at + 2]
    if following == "!":
        return MarkupToken("other", text[at : _declaration_end(text, at, ends, xml) or len(text)])
    if following == "?":
        return MarkupToken("other", text[at : (xml and ends.find("?>", at)) or ends.find(">", at) or len(text)])
    if not ends.has(">", at):
        return None
    tag = (XML_TAG if xml else TAG).match(text, at)
    if tag is not None:
        return _tag(text, at, tag, ends)
    return MarkupToken("other", text[at : ends.find(">", at)]) if following == "/" else None


def _declaration_end(text: str, at: int, ends: Ends, xml: bool) -> int:
    """After a comment, a CDATA section or a declaration; 0: it has no end."""
    if text.startswith("<!--", at):
        short = re.compile("<!---?>").match(text, at)
        return short.end() if short is not None and not xml else ends.find("-->", at + 4)
    if text.startswith("<![CDATA[", at):
        return ends.find("]]>", at) or ends.find(">", at)
    end = ends.find(">", at)
    subset = text.find("[", at, end)
    return (subset >= 0 and ends.find("]>", subset)) or end


def _tag(text: str, at: int, tag: re.Match[str], ends: Ends) -> MarkupToken:
    attributes: list[Attribute] = []
    place = tag.end()
    while (found := ATTRIBUTE.match(text, place)) is not None:
        place = found.end()
        if found["close"]:
            kind: Literal["start", "end", "empty"] = "end" if text[at + 1] == "/" else "start"
            kind = "empty" if kind == "start" and found[0].endswith("/>") else kind
            return MarkupToken(kind, text[at:place], tag["name"].lower(), tuple(attributes))
        value = found["value"] or ""
        if found["equals"] and not value and text[place : place + 1] in ("'", '"'):  # a quote that is never closed
            return MarkupToken("other", text[at : ends.find(">", place) or len(text)])
        plain = value[1:-1] if value[:1] in ("'", '"') else value
        start, end = found.span("value") if value else (place, place)
        attributes.append(Attribute(found["name"].lower(), plain, start - at, end - at))
    return MarkupToken("other", text[at:])
