"""The formats of documents, by name and by the suffix of a file. A reader is imported when a document needs it."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, cast

from allyouneed.data.files.lines import inner_suffix
from allyouneed.errors import UserError, near

if TYPE_CHECKING:
    from allyouneed.apps.translate.documents.parts import Document

# module and function of this package
READERS = {
    "html": "html:read_html",
    "md": "markdown:read_markdown",
    "srt": "subtitles:read_srt",
    "vtt": "subtitles:read_vtt",
    "po": "po:read_po",
    "xml": "xml:read_xml",
    "text": "text:read_text",
    "csv": "table:read_csv",
    "tsv": "table:read_tsv",
}
SUFFIXES = {
    "html": "html", "htm": "html", "xhtml": "html", "md": "md", "markdown": "md", "srt": "srt", "vtt": "vtt",
    "po": "po", "pot": "po", "xml": "xml", "txt": "text",
    "csv": "csv", "tsv": "tsv",
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
    """`options`: `every` of PO, the lists of tags of HTML and XML, `newlines` of XML and text, `column` and `header` of
    CSV and TSV."""
    if format not in READERS:
        raise UserError(f"unknown format {format!r}{near(format, READERS)} (allowed: {', '.join(READERS)})")
    module, _, name = READERS[format].partition(":")
    read = getattr(import_module(f"{__package__}.{module}"), name)
    known = [name for name in signature(read).parameters if name != "text"]
    if wrong := [name for name in options if name not in known]:
        allowed = f"allowed: {', '.join(known)}" if known else "it has none"
        raise UserError(f"unknown option {wrong[0]!r} of the format {format}{near(wrong[0], known)} ({allowed})")
    return cast("Document", read(text, **options))
