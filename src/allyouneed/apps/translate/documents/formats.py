"""The formats of documents, by name and by the suffix of a file. A reader is imported when a document needs it."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from allyouneed.data.files.lines import inner_suffix
from allyouneed.errors import UserError, near

if TYPE_CHECKING:
    from allyouneed.apps.translate.documents.parts import Document


class DocumentFormat(NamedTuple):
    """`reader`: module and function of this package; `data`: it reads bytes, not text."""

    reader: str
    suffixes: str
    data: bool = False


FORMATS = {
    "html": DocumentFormat("html:read_html", "html htm xhtml"),
    "md": DocumentFormat("markdown:read_markdown", "md markdown"),
    "srt": DocumentFormat("subtitles:read_srt", "srt"),
    "vtt": DocumentFormat("subtitles:read_vtt", "vtt"),
    "po": DocumentFormat("po:read_po", "po pot"),
    "xml": DocumentFormat("xml:read_xml", "xml"),
    "text": DocumentFormat("text:read_text", "txt"),
    "csv": DocumentFormat("table:read_csv", "csv"),
    "tsv": DocumentFormat("table:read_tsv", "tsv"),
    "docx": DocumentFormat("packages:read_docx", "docx docm dotx", data=True),
    "pptx": DocumentFormat("packages:read_pptx", "pptx pptm potx ppsx", data=True),
    "xlsx": DocumentFormat("packages:read_xlsx", "xlsx xlsm xltx", data=True),
    "odf": DocumentFormat("packages:read_odf", "odt ods odp odg ott ots otp", data=True),
    "epub": DocumentFormat("packages:read_epub", "epub", data=True),
    "xliff": DocumentFormat("bilingual:read_xliff", "xlf xliff"),
    "tmx": DocumentFormat("bilingual:read_tmx", "tmx"),
    "ts": DocumentFormat("bilingual:read_ts", "ts"),
    "json": DocumentFormat("values:read_json", "json arb"),
    "yaml": DocumentFormat("values:read_yaml", "yaml yml"),
    "properties": DocumentFormat("values:read_properties", "properties"),
    "strings": DocumentFormat("values:read_strings", "strings"),
    "ipynb": DocumentFormat("values:read_notebook", "ipynb"),
    "tex": DocumentFormat("latex:read_latex", "tex latex"),
    "pdf": DocumentFormat("pdf:read_pdf", "pdf", data=True),
}
READERS = {name: one.reader for name, one in FORMATS.items()}
BY_LINES = ("html", "md", "srt", "vtt", "po", "xml", "text")  # whose files are translated line by line if not named
SUFFIXES = {suffix: name for name, one in FORMATS.items() for suffix in one.suffixes.split()}


def format_of(name: str) -> str:
    """The format of a file, by its suffix."""
    found = known_format(name)
    if found is None:
        raise UserError(f"{name}: unknown suffix; set --format (allowed: {', '.join(READERS)})")
    return found


def known_format(name: str) -> str | None:
    """The same; None for an unknown suffix. `a.html.gz` is HTML."""
    return SUFFIXES.get(inner_suffix(Path(name)).removeprefix("."))


def decode(data: bytes, format: str) -> tuple[str, str]:
    """A text and its encoding: UTF-8, unless a byte order mark or the declaration of an XML file names another one, or
    the format has one of its own."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or (data.startswith(b"<?xml") and FORMATS[format].data is False):
        from allyouneed.apps.translate.documents.packages import decode_xml

        return decode_xml(data)
    try:
        return data.decode(), "utf-8"
    except UnicodeDecodeError as error:
        if format == "properties":
            return data.decode("latin-1"), "latin-1"
        raise UserError(f"not UTF-8 (byte {error.start}); convert it first") from None


def read_document(content: str | bytes, format: str, **options: object) -> Document:
    """`content`: the bytes of a file; or a text, of a format that is one. `options`: `every` of PO, XLIFF and TS, the
    lists of tags of HTML and XML, `newlines` of XML and text, `column` and `header` of CSV and TSV."""
    if format not in FORMATS:
        raise UserError(f"unknown format {format!r}{near(format, FORMATS)} (allowed: {', '.join(FORMATS)})")
    chosen = FORMATS[format]
    module, _, name = chosen.reader.partition(":")
    read = getattr(import_module(f"{__package__}.{module}"), name)
    known = [name for name in signature(read).parameters if name not in ("text", "data")]
    if wrong := [name for name in options if name not in known]:
        allowed = f"allowed: {', '.join(known)}" if known else "it has none"
        raise UserError(f"unknown option {wrong[0]!r} of the format {format}{near(wrong[0], known)} ({allowed})")
    if isinstance(content, str):
        if chosen.data:
            raise UserError(f".{format} is no text; give its bytes, or a file")
        return cast("Document", read(content, **options))
    if chosen.data:
        return cast("Document", read(content, **options))
    from dataclasses import replace

    text, encoding = decode(content, format)
    return cast("Document", replace(read(text, **options), encoding=encoding))
