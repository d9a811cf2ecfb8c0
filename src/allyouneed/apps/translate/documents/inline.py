"""The inside of a Markdown paragraph: emphasis, links and tags are marks, code and addresses are copied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html import unescape
from typing import NamedTuple

from allyouneed.apps.translate.documents.html import VOID
from allyouneed.apps.translate.documents.parts import Builder, Pair

ADDRESS = r"<(?:[A-Za-z][A-Za-z0-9+.-]{1,31}:[^\s<>]*|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)>"
VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+)"""
TAG = rf"""<(?P<close>/?)(?P<name>[A-Za-z][\w:.-]*)(?:\s+[^\s"'=<>`/]+(?:\s*=\s*{VALUE})?)*\s*/?>"""
TITLE = r"""(?:\s+(?:"[^"]*"|'[^']*'|\([^()]*\)))?"""
TARGET = rf"\]\(\s*(?:<[^<>\n]*>|(?:[^\s()]|\([^\s()]*\))*){TITLE}\s*\)"
TOKEN = re.compile(
    r"(?P<hard>(?: {2,}|\\)\r?\n[ \t]*(?:>[ \t]?)*)"
    r"|(?P<soft>[ \t]*\r?\n[ \t]*(?:>[ \t]?)*)"
    r"|(?P<escape>\\[!-/:-@\[-`{-~])"
    r"|(?P<code>(?P<ticks>`+)(?!`).{1,2000}?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<math>\$\$.{1,2000}?\$\$|(?<![\w$])\$(?=[^\s$])[^$\n]{1,500}(?<=[^\s\\])\$(?![\w$]))"
    rf"|(?P<address>{ADDRESS})"
    rf"|(?P<comment><!--.{0, 2000}?-->)|(?P<tag>{TAG})"
    r"|(?P<note>\[\^[^\[\]\s]+\])"
    rf"|(?P<open>!?\[)|(?P<target>{TARGET})|(?P<reference>\]\[[^\[\]]*\])|(?P<end>\])"
    r"|(?P<emphasis>\*{1,3}|_{1,3}|~~)"
    r"|(?P<entity>&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});)",
    re.DOTALL,
)
LABEL = 999  # characters of a label in Markdown, at most
# what would begin a block in the place of a paragraph
BLOCK = re.compile(r"(?:#{1,6}|[-+*]|={1,}|:)(?:\s|$)|>|-{3,}|~{3}|\|")
NUMBERED = re.compile(r"^(\d{1,9})([.)])(?=\s)")
# what would be markup in a translation: text that is not
LIVE = re.compile(
    r"(?P<slash>\\(?=[!-/:-@\[-`{-~]))|(?P<plain>`|\*(?!\s)|(?<!\s)\*|(?<!\w)_|_(?!\w)|~(?=~)|\](?=[(\[:]|$)|!(?=\[)|^\[(?=\^))"
    r"|(?P<tag><(?=[A-Za-z/!?]))|(?P<entity>&(?=#?\w+;))"
)


class Piece(NamedTuple):
    """`kind`: `text`, `mark`, `break` (a mark that separates words) or `noun`. `written`: as it is in the translation,
    where that is not `raw`."""

    kind: str
    raw: str
    plain: str = ""
    pair: Pair | None = None
    written: str | None = None


def add_inline(builder: Builder, text: str, labels: Mapping[str, str]) -> None:
    """Add a paragraph to a passage. `labels`: of the reference definitions of the document, in lower case."""
    for piece in pieces(text, labels):
        if piece.kind == "text":
            builder.text(piece.raw, piece.plain)
        elif piece.kind == "noun":
            builder.noun([piece.raw])
        else:
            if piece.kind == "break" or piece.raw[:3].lower() == "<br":
                builder.separate()
            builder.mark([piece.raw], piece.pair, piece.written)


class Openers:
    """Brackets and emphasis that are open: what, and the index of its piece."""

    def __init__(self) -> None:
        self.items: list[tuple[str, int]] = []
        self.places: dict[str, list[int]] = {}  # of each kind, in order

    def add(self, what: str, piece: int) -> None:
        self.places.setdefault(what, []).append(len(self.items))
        self.items.append((what, piece))

    def last(self, what: str) -> int:
        """The place of the last one of this kind; -1: there is none."""
        return (self.places.get(what) or [-1])[-1]

    def cut(self, place: int) -> None:
        """Remove this one and those after it."""
        while len(self.items) > place:
            self.places[self.items.pop()[0]].pop()


def pieces(text: str, labels: Mapping[str, str]) -> list[Piece]:
    found: list[Piece] = []
    opened = Openers()
    at = 0
    for token in TOKEN.finditer(text):
        if token.start() > at:
            found.append(Piece("text", text[at : token.start()], text[at : token.start()]))
        at = token.end()
        _add(found, opened, token, text, labels)
    return found + [Piece("text", text[at:], text[at:])] * (at < len(text))


def _add(found: list[Piece], opened: Openers, token: re.Match[str], text: str, labels: Mapping[str, str]) -> None:
    kind, raw = str(token.lastgroup), token[0]
    if token["tag"] is not None:
        kind = "tag"
    elif token["code"] is not None:
        kind = "code"
    if kind == "soft":
        found.append(Piece("text", raw, " "))
    elif kind == "escape":
        found.append(Piece("text", raw, raw[1]))
    elif kind == "entity":
        found.append(Piece("text", raw, unescape(raw)))
    elif kind in ("code", "math", "address"):
        found.append(Piece("noun", raw))
    elif kind == "tag":
        single = token["name"].lower() in VOID
        pair = None if single or raw.endswith("/>") else (token["name"].lower(), bool(token["close"]))
        found.append(Piece("noun" if raw.endswith("/>") and not single else "mark", raw, "", pair))
    elif kind in ("hard", "comment", "note"):
        found.append(Piece("break" if kind == "hard" else "mark", raw))
    elif kind == "emphasis":
        _emphasis(found, opened, token, text)
    elif kind == "open":
        opened.add("[", len(found))
        found.append(Piece("text", raw, raw))
    else:
        _close_link(found, opened, kind, raw, labels)


def _emphasis(found: list[Piece], opened: Openers, token: re.Match[str], text: str) -> None:
    raw, after = token[0], text[token.end() : token.end() + 1]
    before = text[max(0, token.start() - 1) : token.start()]
    opens, closes = bool(after) and not after.isspace(), bool(before) and not before.isspace()
    if raw[0] == "_":
        opens, closes = opens and not before.isalnum(), closes and not after.isalnum()
    place = opened.last(raw)
    if closes and place > opened.last("[") and opened.items[place][1] < len(found) - 1:
        _pair(found, opened, place, Piece("mark", raw, "", (raw, True)), raw)
        return
    if opens:
        opened.add(raw, len(found))
    found.append(Piece("text", raw, raw))


def _close_link(found: list[Piece], opened: Openers, kind: str, raw: str, labels: Mapping[str, str]) -> None:
    place = opened.last("[")
    if place < 0:
        found.append(Piece("text", raw, raw))
        return
    first = opened.items[place][1]
    label = "".join(piece.raw for piece in found[first + 1 : first + 1 + LABEL]) if labels else ""
    named = raw[2:-1] if kind == "reference" and raw != "][]" else label
    if kind != "target" and " ".join(named.split()).lower() not in labels:
        opened.cut(place)
        found.append(Piece("text", raw, raw))
        return
    # [label] and [label][] name their definition by their text, which is translated: write the label out
    written = raw if kind == "target" or named != label else f"][{label}]"
    _pair(found, opened, place, Piece("mark", raw, "", ("[", True), written), "[")


def _pair(found: list[Piece], opened: Openers, place: int, closing: Piece, name: str) -> None:
    first = opened.items[place][1]
    found[first] = Piece("mark", found[first].raw, "", (name, False))
    found.append(closing)
    opened.cut(place)


def encoder(in_table: bool) -> Callable[[str], str]:
    """Text as Markdown: nothing in it is markup."""

    def encode(text: str) -> str:
        text = LIVE.sub(_escape, text)
        text = "\\" + text if BLOCK.match(text) else NUMBERED.sub(r"\1\\\2", text)
        return text.replace("|", "\\|") if in_table else text

    return encode


def _escape(found: re.Match[str]) -> str:
    if found["tag"]:
        return "&lt;"
    return "&amp;" if found["entity"] else "\\" + found[0]


def labels_of(lines: Iterator[str]) -> dict[str, str]:
    """The labels of the reference definitions among these lines, in lower case."""
    found = (DEFINITION.match(line) for line in lines)
    return {" ".join(one[1].split()).lower(): one[1] for one in found if one is not None}


DEFINITION = re.compile(r"[ >]{0,6}\[(?!\^)([^\[\]]+)\]:\s*\S")
