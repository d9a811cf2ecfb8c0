"""PDF: its text in reading order, written as another format. A PDF has no paragraphs, only letters at places: lines
that stand together are one, larger letters are a heading, and columns are read one after the other (pdfminer.six)."""

from __future__ import annotations

import io
import logging
import re
import statistics
import zipfile
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, NamedTuple

from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.apps.translate.documents.inline import encoder
from allyouneed.apps.translate.documents.parts import Document
from allyouneed.errors import UserError, near
from allyouneed.errors.extras import require

MOST_PAGES, MOST_BYTES = 2000, 256 << 20
MOST_LETTERS = 20_000_000
LARGER, SHORT = 1.15, 200  # times the usual size of letters, and characters, of a heading
HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u00ad]\n(?=[a-zà-ÿ])")


class Paragraph(NamedTuple):
    text: str
    heading: bool


def read_pdf(data: bytes, into: str = "md") -> Document:
    """`into`: the format of the translation: `md`, `html`, `text` or `docx`."""
    if into not in WRITERS:
        raise UserError(f"a PDF is translated into another format{near(into, WRITERS)} (allowed: {', '.join(WRITERS)})")
    require("pdf", "reading PDF")
    content = WRITERS[into](list(_paragraphs(data)))
    return read_document(content, into)


def _paragraphs(data: bytes) -> Iterator[Paragraph]:
    boxes: list[tuple[str, float]] = []
    letters = 0
    for page in _pages(data):
        for box in page:
            if text := box.get_text().strip():
                letters += len(text)
                boxes.append((text, _size(box)))
        if letters > MOST_LETTERS:
            raise UserError(f"more than {MOST_LETTERS:,} letters; divide the document")
    if not boxes:
        raise UserError("there is no text in this PDF: its pages are pictures; recognise their text first (OCR)")
    usual = statistics.median([size for text, size in boxes for _ in range(1 + len(text) // 50)])
    for text, size in boxes:
        joined = " ".join(HYPHEN.sub("", text).split())
        yield Paragraph(joined, size > LARGER * usual and len(joined) < SHORT)


def _pages(data: bytes) -> Iterator[list[Any]]:
    """The boxes of text of each page."""
    from pdfminer.high_level import extract_pages
    from pdfminer.layout import LAParams, LTTextBox
    from pdfminer.pdfdocument import PDFEncryptionError, PDFPasswordIncorrect, PDFTextExtractionNotAllowed

    if len(data) > MOST_BYTES or not re.search(rb"%PDF-\d", data[:1024]):
        raise UserError("not a PDF of a usual size; check the file")
    logging.getLogger("pdfminer").setLevel(logging.ERROR)
    try:
        for page in extract_pages(io.BytesIO(data), maxpages=MOST_PAGES, laparams=LAParams()):
            yield [box for box in page if isinstance(box, LTTextBox)]
    except (PDFPasswordIncorrect, PDFEncryptionError, PDFTextExtractionNotAllowed):
        raise UserError("encrypted; save it without a password") from None
    except UserError:
        raise
    except Exception as error:  # the library lets any error of the parser through
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"cannot be read as PDF ({reason}); print it to a new PDF") from None


def _size(box: Any) -> float:
    """The height of the lines of a box."""
    return statistics.median([getattr(line, "height", 0.0) for line in box] or [0.0])


def _text(found: list[Paragraph]) -> str:
    return "\n\n".join(one.text for one in found) + "\n"


def _markdown(found: list[Paragraph]) -> str:
    write = encoder(False)
    return "\n\n".join("## " * one.heading + write(one.text) for one in found) + "\n"


def _html(found: list[Paragraph]) -> str:
    lines = (
        f"<{tag}>{escape(one.text, quote=False)}</{tag}>" for one in found for tag in ("h2" if one.heading else "p",)
    )
    return (
        '<!DOCTYPE html>\n<html>\n<head><meta charset="utf-8"></head>\n<body>\n'
        + "\n".join(lines)
        + "\n</body>\n</html>\n"
    )


OFFICE = "http://schemas.openxmlformats.org"
DOCX = {
    "[Content_Types].xml": f'<Types xmlns="{OFFICE}/package/2006/content-types"><Default Extension="rels" ContentType='
    '"application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" ContentType='
    '"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{OFFICE}/package/2006/relationships"><Relationship Id="rId1" Type='
    f'"{OFFICE}/officeDocument/2006/relationships/officeDocument" Target="word/document.xml"/></Relationships>',
}
BOLD = '<w:rPr><w:b/><w:sz w:val="32"/></w:rPr>'


def _docx(found: list[Paragraph]) -> bytes:
    texts = ((BOLD * one.heading, escape(_printable(one.text), quote=False)) for one in found)
    paragraphs = "".join(f'<w:p><w:r>{bold}<w:t xml:space="preserve">{text}</w:t></w:r></w:p>' for bold, text in texts)
    body = f'<w:document xmlns:w="{OFFICE}/wordprocessingml/2006/main"><w:body>{paragraphs}</w:body></w:document>'
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in (DOCX | {"word/document.xml": body}).items():
            packed.writestr(name, '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n' + content)
    return written.getvalue()


def _printable(text: str) -> str:
    """Without the control characters that XML does not allow."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "", text)


WRITERS: dict[str, Callable[[list[Paragraph]], str | bytes]] = {
    "md": _markdown, "html": _html, "text": _text, "docx": _docx,
}  # fmt: skip
