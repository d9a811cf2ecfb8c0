"""The text of a PDF becomes Markdown, HTML, plain text or Word, in reading order."""

from __future__ import annotations

import io

import pytest

from allyouneed.apps.translate.documents import pdf
from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.errors import UserError, extras

# place, size and text of each line: a title, and two columns that are drawn line by line
LINES = [
    (72, 750, 24, "The title"), (72, 700, 11, "The left column has a hyphen-"), (320, 700, 11, "The right column *"),
    (72, 687, 11, "ated word."), (320, 687, 11, "is read after it & <so>."),
]  # fmt: skip


def make_pdf(lines: list[tuple[int, int, int, str]]) -> bytes:
    """A PDF of one page with these lines."""
    drawn = "".join(f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET\n" for x, y, size, text in lines)
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(drawn)}>>\nstream\n{drawn}endstream", "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]  # fmt: skip
    text, places = "%PDF-1.4\n", list[int]()
    for number, one in enumerate(objects, 1):
        places.append(len(text))
        text += f"{number} 0 obj\n{one}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    text += f"xref\n0 6\n0000000000 65535 f \n{table}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(text)}\n%%EOF"
    return text.encode()


WRITTEN = {
    "md": "## The title\n\nThe left column has a hyphenated word.\n\nThe right column * is read after it & &lt;so>.\n",
    "text": "The title\n\nThe left column has a hyphenated word.\n\nThe right column * is read after it & <so>.\n",
}


@pytest.mark.parametrize("into", sorted(WRITTEN))
def test_columns_are_read_one_after_the_other_and_words_are_joined(into: str) -> None:
    document = read_document(make_pdf(LINES), "pdf", into=into)
    assert document.write([str(unit.passage) for unit in document.units]) == WRITTEN[into]


def test_a_pdf_becomes_a_page_or_a_document_of_word() -> None:
    from docx import Document

    page = read_document(make_pdf(LINES), "pdf", into="html")
    assert "<h2>THE TITLE</h2>\n<p>THE LEFT" in page.write([unit.passage.upper() for unit in page.units])
    document = read_document(make_pdf(LINES), "pdf", into="docx")
    written = Document(io.BytesIO(document.data([unit.passage.upper() for unit in document.units])))
    assert [one.text for one in written.paragraphs] == [
        "THE TITLE", "THE LEFT COLUMN HAS A HYPHENATED WORD.", "THE RIGHT COLUMN * IS READ AFTER IT & <SO>.",
    ]  # fmt: skip
    assert written.paragraphs[0].runs[0].bold


@pytest.mark.parametrize(
    ("data", "into", "message"),
    [
        (b"no pdf", "md", "not a PDF"),
        (b"%PDF-1.4 broken", "md", r"cannot be read as PDF \(.*\); print it to a new PDF"),
        (make_pdf([]), "md", "there is no text in this PDF: its pages are pictures"),
        (make_pdf(LINES), "pdf", r"into another format \(allowed: md, html, text, docx\)"),
    ],
)
def test_what_has_no_text_is_refused(data: bytes, into: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_document(data, "pdf", into=into)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda extra: False)
    with pytest.raises(UserError, match=r"reading PDF needs pdfminer: pip install .*\[pdf\]"):
        pdf.read_pdf(make_pdf(LINES))


def test_damaged_pdfs_are_read_or_refused() -> None:
    whole = make_pdf(LINES)
    for start in range(0, len(whole), 29):
        try:
            read_document(whole[:start] + whole[start + 3 :], "pdf")
        except UserError:
            continue
