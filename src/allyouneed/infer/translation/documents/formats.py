"""The formats of documents, by name and by the suffix of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from allyouneed.errors import UserError, near
from allyouneed.infer.translation.documents.html import read_html
from allyouneed.infer.translation.documents.markdown import read_markdown
from allyouneed.infer.translation.documents.parts import Document, Unit
from allyouneed.infer.translation.documents.po import read_po
from allyouneed.infer.translation.documents.subtitles import read_srt, read_vtt
from allyouneed.infer.translation.documents.xml import read_xml
from allyouneed.infer.translation.spans import Passage


def read_text(text: str) -> Document:
    """Plain text is one passage; its lines and spaces are kept by the translator (split.py)."""
    return Document([Unit(Passage(text, {}), (text,), {}, str)] if text else [])


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
    suffix = PurePath(name).suffix.lower().removeprefix(".")
    if suffix not in SUFFIXES:
        raise UserError(f"{name}: unknown suffix; set --format (allowed: {', '.join(READERS)})")
    return SUFFIXES[suffix]


def read_document(text: str, format: str, **options: object) -> Document:
    """`options`: `every` of PO, the lists of tags of XML."""
    if format not in READERS:
        raise UserError(f"unknown format {format!r}{near(format, READERS)} (allowed: {', '.join(READERS)})")
    return READERS[format](text, **options)
