"""The formats of documents, by name and by the suffix of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path

from allyouneed.apps.translate.documents.html import read_html
from allyouneed.apps.translate.documents.markdown import read_markdown
from allyouneed.apps.translate.documents.parts import Builder, Document, Unit
from allyouneed.apps.translate.documents.po import read_po
from allyouneed.apps.translate.documents.subtitles import read_srt, read_vtt
from allyouneed.apps.translate.documents.xml import read_xml
from allyouneed.apps.translate.spans.spans import Passage
from allyouneed.data.files.lines import inner_suffix
from allyouneed.errors import UserError, near

BLANK_LINES = re.compile(r"(\n[ \t\r]*+\n[ \t\r\n]*+)")


def read_text(text: str, *, newlines: bool = True) -> Document:
    """Plain text is one passage; its lines and spaces are kept by the translator (split.py). Without `newlines`, a
    paragraph is one passage and becomes one line; blank lines delimit paragraphs."""
    if newlines:
        return Document([Unit(Passage(text, {}), (text,), {}, str)] if text else [])
    builder = Builder((), str)
    for number, part in enumerate(BLANK_LINES.split(text)):
        if number % 2:
            builder.skip(part)
        else:
            builder.text(part, part)
            builder.end()
    return Document(builder.parts)


READERS: dict[str, Callable[..., Document]] = {
    "html": read_html,
    "md": read_markdown,
    "srt": read_srt,
    "vtt": read_vtt,
    "po": read_po,
    "xml": read_xml,
    "text": read_text,
}
SUFFIXES = {
    "html": "html", "htm": "html", "xhtml": "html", "md": "md", "markdown": "md", "srt": "srt", "vtt": "vtt",
    "po": "po", "pot": "po", "xml": "xml", "txt": "text",
}  # fmt: skip


def format_of(name: str) -> str:
    """The format of a file, by its suffix."""
    found = known_format(name)
    if found is None:
        raise UserError(f"{name}: unknown suffix; set --format (allowed: {', '.join(READERS)})")
    return found


def known_format(name: str) -> str | None:
    """The same; None for an unknown suffix. `a.html.gz` is HTML."""
    return SUFFIXES.get(inner_suffix(Path(name)).removeprefix("."))


def read_document(text: str, format: str, **options: object) -> Document:
    """`options`: `every` of PO, the lists of tags of HTML and XML, `newlines` of XML and text."""
    if format not in READERS:
        raise UserError(f"unknown format {format!r}{near(format, READERS)} (allowed: {', '.join(READERS)})")
    known = [name for name in signature(READERS[format]).parameters if name != "text"]
    if wrong := [name for name in options if name not in known]:
        allowed = f"allowed: {', '.join(known)}" if known else "it has none"
        raise UserError(f"unknown option {wrong[0]!r} of the format {format}{near(wrong[0], known)} ({allowed})")
    return READERS[format](text, **options)
