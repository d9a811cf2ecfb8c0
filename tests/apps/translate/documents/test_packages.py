"""Word, PowerPoint, Excel, OpenDocument and EPUB as their libraries write them: only words change, and what is broken
or hostile is refused with one message."""

from __future__ import annotations

import io
import random
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from allyouneed.apps.translate.documents import packages
from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.apps.translate.documents.packages import read_docx
from allyouneed.errors import UserError

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def saved(document: object) -> bytes:
    file = io.BytesIO()
    document.save(file)  # type: ignore[attr-defined]
    return file.getvalue()


def make_docx() -> bytes:
    from docx import Document

    document = Document()
    document.add_heading("The quarterly report", 0)
    paragraph = document.add_paragraph("The ")
    paragraph.add_run("red car").bold = True
    paragraph.add_run(" is very fast, and ")
    paragraph.add_run("the driver").italic = True
    paragraph.add_run(" is happy.").add_break()
    paragraph.add_run("Next line\tafter a tab")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Bread & butter", "3.50"
    document.sections[0].header.paragraphs[0].text = "A header"
    return saved(document)


def make_pptx() -> bytes:
    from pptx import Presentation

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "Welcome"
    frame = slide.placeholders[1].text_frame
    frame.text = "A "
    run = frame.paragraphs[0].add_run()
    run.text, run.font.bold = "bold", True
    frame.paragraphs[0].add_run().text = " word"
    slide.notes_slide.notes_text_frame.text = "Remember to smile."
    return saved(presentation)


def make_xlsx() -> bytes:
    from datetime import date

    from openpyxl import Workbook
    from openpyxl.comments import Comment
    from openpyxl.worksheet.table import Table

    book = Workbook()
    sheet = book.active
    assert sheet is not None
    for row in (["Product", "Price", "Day"], ["Red car", 3.5, date(2026, 1, 2)], ["He said <no>", "=SUM(B2:B2)", True]):
        sheet.append(row)
    sheet["A2"].comment = Comment("A comment", "me")
    other = book.create_sheet("Table")
    other.append(["Name", "City"])
    other.append(["the dog", "the city"])
    other.add_table(Table(displayName="T", ref="A1:B2"))
    return saved(book)


def make_odt() -> bytes:
    from odf.opendocument import OpenDocumentText
    from odf.style import Style, TextProperties
    from odf.text import H, LineBreak, Note, NoteBody, NoteCitation, P, Span

    document = OpenDocumentText()
    bold = Style(name="B", family="text")
    bold.addElement(TextProperties(fontweight="bold"))
    document.automaticstyles.addElement(bold)
    document.text.addElement(H(outlinelevel=1, text="The title"))
    paragraph = P(text="The ")
    paragraph.addElement(Span(stylename=bold, text="red car"))
    paragraph.addText(" is fast")
    note, body = Note(noteclass="footnote"), NoteBody()
    note.addElement(NoteCitation(text="1"))
    body.addElement(P(text="A footnote about cars."))
    note.addElement(body)
    paragraph.addElement(note)
    paragraph.addElement(LineBreak())
    paragraph.addText("and red.")
    document.text.addElement(paragraph)
    return saved(document)


def make_ods() -> bytes:
    from odf.opendocument import OpenDocumentSpreadsheet
    from odf.table import Table, TableCell, TableRow
    from odf.text import P

    document = OpenDocumentSpreadsheet()
    table, row = Table(name="Sheet"), TableRow()
    for text, kind in (("Red car", {"valuetype": "string"}), ("three", {"valuetype": "float", "value": "3"}),
                       ("of a formula", {"valuetype": "string", "formula": "of:=A1"})):  # fmt: skip
        cell = TableCell(**kind)
        cell.addElement(P(text=text))
        row.addElement(cell)
    table.addElement(row)
    document.spreadsheet.addElement(table)
    return saved(document)


def make_epub() -> bytes:
    from ebooklib import epub

    book = epub.EpubBook()
    book.set_title("The old book")
    book.set_language("en")
    book.add_author("Jane Doe")
    page = epub.EpubHtml(title="Chapter one", file_name="one.xhtml", lang="en")
    page.content = '<h1>Chapter one</h1><p>The <b>red</b> car<a id="x"/> is fast.</p>'
    book.add_item(page)
    book.toc = (page,)
    book.add_item(epub.EpubNcx())
    book.add_item(epub.EpubNav())
    book.spine = ["nav", page]
    file = io.BytesIO()
    epub.write_epub(file, book)
    return file.getvalue()


MAKERS: dict[str, tuple[str, Callable[[], bytes], list[str]]] = {
    "docx": ("docx", make_docx, [
        "The quarterly report", "The ·red car· is very fast, and ·the driver· is happy. ·Next line ·after a tab",
        "Bread & butter", "A header"]),
    "pptx": ("pptx", make_pptx, ["Remember to smile.", "Welcome", "A ·bold· word"]),
    "xlsx": ("xlsx", make_xlsx, [
        "A comment", "Product", "Price", "Day", "Red car", "He said <no>", "the dog", "the city"]),
    "odt": ("odf", make_odt, ["The title", "The ·red car· is fast· ·and red.", "A footnote about cars."]),
    "ods": ("odf", make_ods, ["Red car"]),
    "epub": ("epub", make_epub, [
        "The old book", "The old book", "The old book", "·Chapter one·", "Chapter one", "Chapter one",
        "The ·red· car· is fast.", "The old book", "Chapter one"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {name: make() for name, (_, make, _) in MAKERS.items()}


def plain(passage: str) -> str:
    return re.sub("[\ue000-\uf8ff]", "·", passage)


def translated(data: bytes, format: str, translate: Callable[[str], str]) -> bytes:
    document = read_document(data, format)
    return document.data([translate(str(unit.passage)) for unit in document.units], "de")


def contents(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        assert packed.testzip() is None
        return {info.filename: packed.read(info) for info in packed.infolist()}


def shuffled(seed: int) -> Callable[[str], str]:
    def translate(text: str) -> str:
        parts = [part for part in re.split("([\ue000-\uf8ff]|\\s+)", text) if part]
        random.Random(seed).shuffle(parts)
        return "".join(part if "\ue000" <= part <= "\uf8ff" else part.swapcase() for part in parts)

    return translate


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_package_of_another_library_is_read_and_comes_back_byte_for_byte(name: str, files: dict[str, bytes]) -> None:
    format, _, passages = MAKERS[name]
    assert [plain(unit.passage) for unit in read_document(files[name], format).units] == passages
    assert translated(files[name], format, str) == files[name]


def elements(xml: bytes) -> Counter[str]:
    """Its elements, but for the runs of a paragraph, whose number may change."""
    names = (one.tag.rpartition("}")[2] for one in ElementTree.fromstring(xml).iter())
    return Counter(name for name in names if name not in ("r", "t", "rPr", "b", "i"))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_whatever_the_translation_only_words_change(name: str, files: dict[str, bytes]) -> None:
    format, before = MAKERS[name][0], contents(files[name])
    kept = [one for one in before if not re.search(r"\.(xml|xhtml|ncx|opf)$", one) or "theme" in one or "rels" in one]
    for seed in range(5):
        after = contents(translated(files[name], format, shuffled(seed)))
        assert list(after) == list(before), "in the same order"
        assert any(after[one] != before[one] for one in before)
        assert all(after[one] == before[one] for one in kept)
        for one in before:
            if after[one] != before[one]:
                assert elements(after[one]) == elements(before[one])


def test_bold_words_of_a_sentence_stay_bold_in_word(files: dict[str, bytes]) -> None:
    from docx import Document

    document = Document(io.BytesIO(translated(files["docx"], "docx", str.upper)))
    runs = [(run.text, run.bold, run.italic) for run in document.paragraphs[1].runs if run.text.strip()]
    assert runs[:5] == [
        ("THE ", None, None), ("RED CAR", True, None), (" IS VERY FAST, AND ", None, None), ("THE DRIVER", None, True),
        (" IS HAPPY. ", None, None),
    ]  # fmt: skip
    assert document.tables[0].cell(0, 1).text == "3.50" and document.tables[0].cell(0, 0).text == "BREAD & BUTTER"
    assert document.sections[0].header.paragraphs[0].text == "A HEADER"
    assert 'w:lang w:val="de"' in contents(translated(files["docx"], "docx", str.upper))["word/styles.xml"].decode()


def test_slides_and_their_notes_are_translated(files: dict[str, bytes]) -> None:
    from pptx import Presentation

    slide = Presentation(io.BytesIO(translated(files["pptx"], "pptx", str.upper))).slides[0]
    runs = [(run.text, run.font.bold) for run in slide.placeholders[1].text_frame.paragraphs[0].runs]
    assert runs == [("A ", None), ("BOLD", True), (" WORD", None)]
    assert slide.notes_slide.notes_text_frame.text == "REMEMBER TO SMILE."


def test_runs_that_differ_only_in_what_a_spelling_checker_wrote_are_one() -> None:
    slide = (
        '<p:sld xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main">'
        '<a:p><a:r><a:rPr lang="en-US" dirty="0"/>'
        '<a:t>One </a:t></a:r><a:r><a:rPr lang="en-GB" b="1" err="1"/><a:t>bold</a:t></a:r><a:r><a:rPr lang="de"/>'
        '<a:t> word</a:t></a:r><a:endParaRPr lang="en-US"/></a:p></p:sld>'
    )
    data = zipped({"ppt/slides/slide1.xml": slide})
    assert [plain(unit.passage) for unit in read_document(data, "pptx").units] == ["One ·bold· word"]
    assert (
        contents(translated(data, "pptx", str.upper))["ppt/slides/slide1.xml"]
        .decode()
        .endswith(
            '<a:p><a:r><a:t>ONE </a:t></a:r><a:r><a:rPr b="1"/><a:t>BOLD</a:t></a:r><a:r><a:t> WORD</a:t></a:r>'
            '<a:endParaRPr lang="en-US"/></a:p></p:sld>'
        )
    )


def test_formulas_numbers_dates_and_the_columns_of_tables_stay(files: dict[str, bytes]) -> None:
    from openpyxl import load_workbook

    before, after = (load_workbook(io.BytesIO(data)) for data in (
        files["xlsx"], translated(files["xlsx"], "xlsx", str.upper)))  # fmt: skip
    for sheet, other in zip(before, after, strict=True):
        for row, others in zip(sheet.iter_rows(), other.iter_rows(), strict=True):
            for cell, changed in zip(row, others, strict=True):
                words = (
                    isinstance(cell.value, str)
                    and not cell.value.startswith("=")
                    and cell.value not in ("Name", "City")
                )
                assert changed.value == (cell.value.upper() if words else cell.value)
                assert changed.number_format == cell.number_format
    assert after.active["A2"].comment.text == "A COMMENT"


def test_a_shared_text_of_several_formats_keeps_them() -> None:
    shared = (
        '<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><si><t>Plain</t></si><si>'
        "<r><t>One </t></r><r><rPr><b/></rPr><t>bold</t></r><rPh><t>x</t></rPh></si></sst>"
    )
    after = contents(translated(zipped({"xl/sharedStrings.xml": shared}), "xlsx", str.upper))["xl/sharedStrings.xml"]
    assert after.decode() == shared.replace("<t>Plain", '<t xml:space="preserve">PLAIN').replace(
        "<t>One ", '<t xml:space="preserve">ONE ').replace("<t>bold", '<t xml:space="preserve">BOLD').replace(
        "<rPh><t>x</t></rPh>", "")  # fmt: skip


def test_a_book_names_its_new_language(files: dict[str, bytes]) -> None:
    after = contents(translated(files["epub"], "epub", str.upper))
    assert "<dc:language>de</dc:language>" in after["EPUB/content.opf"].decode()
    assert 'lang="de"' in after["EPUB/one.xhtml"].decode() and "<b>RED</b>" in after["EPUB/one.xhtml"].decode()
    assert next(iter(after)) == "mimetype"


def zipped(members: dict[str, str | bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return file.getvalue()


def word(body: str, **others: str | bytes) -> bytes:
    return zipped({"word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>", **others})


def run(text: str, properties: str = "") -> str:
    return f'<w:r>{properties}<w:t xml:space="preserve">{text}</w:t></w:r>'


BOLD = "<w:rPr><w:b/></w:rPr>"
FIELD = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
LINK = FIELD.format("begin") + "<w:r><w:instrText>{}</w:instrText></w:r>" + FIELD.format("separate")
PARAGRAPHS = {
    "a link": ('See <w:hyperlink r:id="1">' + run("the page", BOLD) + "</w:hyperlink>", "·See ··the page·"),
    "the field of a page number": ("Page " + LINK.format(" PAGE ") + run("7") + FIELD.format("end"), "Page ·"),
    "a field that is a link": ("See " + LINK.format('HYPERLINK "x"') + run("this") + FIELD.format("end"), "See ·this·"),
    "a field that ends elsewhere": ("See " + LINK.format("TOC"), "See ···"),
    "deleted words": ("Old<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>", "Old·"),
    "inserted words": ('<w:ins w:id="1">' + run("new") + "</w:ins> words", "·new· words"),
    "a note": ('A word<w:r><w:footnoteReference w:id="2"/></w:r>', "A word·"),
    "a formula": ('With <m:oMath xmlns:m="x"><m:r><m:t>abc</m:t></m:r></m:oMath>', "With ·"),
    "a bookmark": ('<w:bookmarkStart w:id="3" w:name="x"/>' + run("Here") + '<w:bookmarkEnd w:id="3"/>', "·Here·"),
    "a text box": ("Words<w:r><w:drawing><w:p>" + run("in a box") + "</w:p></w:drawing></w:r>", "Words·|in a box"),
    "a content control": (
        '<w:sdt><w:sdtPr><w:id w:val="1"/></w:sdtPr><w:sdtContent>' + run("held") + "</w:sdtContent></w:sdt> words",
        "·held· words"),
    "runs that only a spelling checker divides": (
        '<w:proofErr w:type="x"/>' + run("Hel", '<w:rPr><w:lang w:val="en"/></w:rPr>') + run("lo"), "Hello"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PARAGRAPHS))
def test_what_is_in_a_paragraph_of_word_survives_its_translation(name: str) -> None:
    inside, passages = PARAGRAPHS[name]
    pieces = re.split("(<w:.*>|<m:.*>)", inside, maxsplit=1)
    body = "<w:p>" + "".join(piece if piece.startswith("<") else run(piece) for piece in pieces if piece) + "</w:p>"
    data = word(body.replace("<w:document", '<w:document xmlns:r="x"'))
    document = read_docx(data)
    assert "|".join(plain(unit.passage) for unit in document.units) == passages
    assert document.data([str(unit.passage) for unit in document.units]) == data
    after = contents(translated(data, "docx", str.upper))["word/document.xml"].decode()
    assert "".join(re.findall(r"<w:t[ >][^<]*", after)).isascii()
    for tag in re.findall(
        r"<(?:w:(?:hyperlink|fldChar|instrText|del|ins|footnote|bookmark|drawing|sdt)|m:)[^>]*>", body
    ):
        assert after.count(tag) == body.count(tag)
    assert re.sub("<[^>]*>", "", after) == re.sub("<[^>]*>", "", re.sub(
        r"(?<=preserve\">)[^<]*", lambda found: found[0].upper(), body))  # fmt: skip


def test_entities_are_never_expanded_and_nothing_is_fetched() -> None:
    head = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;"><!ENTITY c SYSTEM "file:///etc/passwd">]>'
    body = f"{head}<w:document {WORD}><w:body><w:p>{run('Words &c; &b;')}</w:p></w:body></w:document>"
    data = zipped({"word/document.xml": body})
    assert translated(data, "docx", str) == data
    assert contents(translated(data, "docx", str.upper))["word/document.xml"].decode().startswith(head)
    assert "passwd" not in read_docx(data).units[0].passage


def test_macros_pictures_and_odd_names_are_copied_packed() -> None:
    others = {"word/vbaProject.bin": b"\x00macro", "../../evil": b"x", "word/media/a.png": bytes(100_000)}
    data = word("<w:p>" + run("Words") + "</w:p>", **others)
    after = contents(translated(data, "docx", str.upper))
    assert all(after[name] == content for name, content in others.items())


def flag_encrypted(data: bytes) -> bytes:
    return data.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00")


BROKEN = {
    "no zip": ("docx", b"no zip", r"not \.docx: File is not a zip file; save it again"),
    "empty": ("xlsx", b"", r"not \.xlsx: File is not a zip file"),
    "another document": ("docx", zipped({"a.txt": b"x"}), r"not \.docx: it has none of the parts of one"),
    "encrypted Word": ("docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "encrypted, or of an old Office"),
    "encrypted member": ("docx", flag_encrypted(word("")), r"word/document\.xml: cannot be read \(.*encrypted"),
    "encrypted OpenDocument": ("odf", zipped({"META-INF/manifest.xml": b"<m:encryption-data></m:encryption-data>"}),
                               "encrypted; save it without a password"),
    "a book with rights": ("epub", zipped({"META-INF/encryption.xml": b'<enc:EncryptedData Id="1">'}), "encrypted"),
    "a bomb": ("docx", word("<w:p>" + " " * 30_000_000 + "</w:p>"), r"bytes that expand to 30,0.* are not read"),
    "deep": ("docx", word("<w:x>" * 1000 + "</w:x>" * 1000), r"document\.xml: more than 200 elements inside"),
    "cut off": ("docx", zipped({"word/document.xml": b"<w:document><w:p>"}), "not well-formed XML: <w:p> has no end"),
    "crossed": ("odf", zipped({"content.xml": b"<a><b></a></b>"}), "not well-formed XML: </a> closes nothing"),
    "bad bytes": ("docx", zipped({"word/document.xml": b"<a>\xff\xfe\xff</a>"}), r"not utf-8 \(byte 3\)"),
    "an unknown encoding": ("docx", zipped({"word/document.xml": b'<?xml encoding="x-y"?><a/>'}), "unknown encoding"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_or_hostile_package_is_refused_with_one_message(name: str) -> None:
    format, data, message = BROKEN[name]
    with pytest.raises(UserError, match=message):
        read_document(data, format)


def test_a_document_of_many_members_or_much_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = word("<w:p/>", **{f"word/header{n}.xml": f"<w:hdr {WORD}/>" for n in range(5)})
    with monkeypatch.context() as patch, pytest.raises(UserError, match="more than 3 files"):
        patch.setattr(packages, "MOST_MEMBERS", 3)
        read_docx(data)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="more than 0 MB of text; divide"):
        patch.setattr(packages, "MOST_TEXT", 300)
        read_docx(data)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_damaged_package_is_read_or_refused(name: str, files: dict[str, bytes]) -> None:
    """Bytes of the file, and of its unpacked XML, are changed, lost or repeated."""
    format, chance = MAKERS[name][0], random.Random(zlib.crc32(name.encode()))
    members = contents(files[name])
    texts = [one for one in members if one.endswith(("xml", "opf", "ncx"))]
    refused = 0
    for number in range(60):
        changed = dict(members)
        one = chance.choice(texts)
        target = files[name] if number % 2 else members[one]
        start = chance.randrange(len(target))
        damaged = target[:start] + chance.choice(
            [b"", b"<", b">", b"&", b"\x00", b"</w:p>", target[start : start + 90]]
        )
        damaged += target[start + chance.randrange(3) :]
        changed[one] = damaged
        data = damaged if number % 2 else zipped(dict(changed))
        try:
            translated(data, format, shuffled(number))
        except UserError:
            refused += 1
    assert 0 < refused < 60
