"""Documents through the translator that comes with the package, in Python and on the command line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.errors import UserError

DOCUMENTS = {
    "html": (
        '<p>The <a href="/c?x=1&amp;y">red car</a> is fast.</p><pre>The car</pre><img alt="The car is red.">',
        '<p>Das <a href="/c?x=1&amp;y">rote Auto</a> ist schnell.</p><pre>The car</pre><img alt="Das Auto ist rot.">',
    ),
    "md": (
        "# The car is red\n\nThe **red**\ncar is [fast](x.html).\n\n```\nThe car\n```\n",
        "# Das Auto ist rot\n\nDas **rote** Auto ist [schnell](x.html).\n\n```\nThe car\n```\n",
    ),
    "srt": (
        "1\n00:00:01,000 --> 00:00:02,000\nThe red car\n\n2\n00:00:02,000 --> 00:00:03,000\nis very fast.\n",
        "1\n00:00:01,000 --> 00:00:02,000\nDas rote Auto\n\n2\n00:00:02,000 --> 00:00:03,000\nist sehr schnell.\n",
    ),
    "vtt": (
        "WEBVTT\n\n00:01.000 --> 00:02.000 align:start\n<v Tom>The car is fast.\n",
        "WEBVTT\n\n00:01.000 --> 00:02.000 align:start\n<v Tom>Das Auto ist schnell.\n",
    ),
    "po": (
        '#, c-format\nmsgid "The car is fast."\nmsgstr ""\n\nmsgid "Yes"\nmsgstr "Jawohl"\n',
        '#, c-format\nmsgid "The car is fast."\nmsgstr "Das Auto ist schnell."\n\nmsgid "Yes"\nmsgstr "Jawohl"\n',
    ),
    "xml": (
        "<d><t>The <b>red</b> car is fast.</t></d>",
        "<d><t>Das <b>rote</b> Auto ist schnell.</t></d>",
    ),
    "xliff": (
        '<xliff><file><trans-unit><source>The <g id="1">red</g> car is fast.</source></trans-unit></file></xliff>',
        '<xliff><file target-language="de"><trans-unit><source>The <g id="1">red</g> car is fast.</source>'
        '<target state="translated" state-qualifier="mt-suggestion">Das <g id="1">rote</g> Auto ist schnell.</target>'
        "</trans-unit></file></xliff>",
    ),
    "ts": (
        "<TS><message><source>The car is fast.</source><translation type='unfinished'/></message></TS>",
        "<TS language=\"de\"><message><source>The car is fast.</source><translation type='unfinished'>"
        "Das Auto ist schnell.</translation></message></TS>",
    ),
    "tmx": (
        '<tmx><body><tu><tuv xml:lang="en"><seg>The car is fast.</seg></tuv></tu></body></tmx>',
        '<tmx><body><tu><tuv xml:lang="en"><seg>The car is fast.</seg></tuv><tuv xml:lang="de"><seg>'
        "Das Auto ist schnell.</seg></tuv></tu></body></tmx>",
    ),
    "json": ('{"id": 7, "a": ["The car is fast."]}', '{"id": 7, "a": ["Das Auto ist schnell."]}'),
    "yaml": ("en:\n  a: The car is fast. # x\n", "de:\n  a: Das Auto ist schnell. # x\n"),
    "properties": ("a = The car is fast.\n", "a = Das Auto ist schnell.\n"),
    "strings": ('"a" = "The car is fast.";\n', '"a" = "Das Auto ist schnell.";\n'),
    "ipynb": (
        '{"cells": [{"cell_type": "markdown", "source": ["The **red** car is fast."]}], "nbformat": 4}',
        '{"cells": [{"cell_type": "markdown", "source": ["Das **rote** Auto ist schnell."]}], "nbformat": 4}',
    ),
    "tex": (
        "\\section{The car}\nThe \\textbf{red} car is fast.\\footnote{The car is red.} % x\n",
        "\\section{Das Auto}\nDas \\textbf{rote} Auto ist schnell.\\footnote{Das Auto ist rot.} % x\n",
    ),
    "text": ("The car is fast.\n\n  The car is red.\n", "Das Auto ist schnell.\n\n  Das Auto ist rot.\n"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> ayn.Translator:
    return ayn.load()  # type: ignore[return-value]


@pytest.mark.parametrize("format", sorted(DOCUMENTS))
def test_a_document_is_translated_and_its_markup_is_kept(model: ayn.Translator, format: str) -> None:
    source, target = DOCUMENTS[format]
    assert model.translate_document(source, "de", format=format).text == target


def test_a_document_of_word_is_translated_and_its_bold_words_stay_bold(model: ayn.Translator) -> None:
    from docx import Document

    document = Document()
    paragraph = document.add_paragraph("The ")
    paragraph.add_run("red car").bold = True
    paragraph.add_run(" is fast.")
    file = io.BytesIO()
    document.save(file)
    found = model.translate_document(file.getvalue(), "de", format="docx")
    runs = Document(io.BytesIO(found.data)).paragraphs[0].runs
    assert [(run.text, run.bold) for run in runs] == [("Das ", None), ("rote Auto", True), (" ist schnell.", None)]
    assert found.text == "Das rote Auto ist schnell." and found.passages == 1 and found.source == "en"


def test_terms_of_a_glossary_are_in_the_translation(model: ayn.Translator) -> None:
    terms = {"car": "Kraftwagen"}
    assert "Kraftwagen" in model.translate("The car is fast.", "de", glossary=terms)
    assert model.translate("Car", "de", glossary=terms) == "Kraftwagen"
    page = model.translate_document("<p>The <b>car</b> is fast.</p>", "de", format="html", glossary=terms)
    assert "<b>Kraftwagen</b>" in page.text
    via_english = model.translate("汽车很快。", "de", from_="zh", glossary={"汽车": "Kraftwagen"})
    assert "Kraftwagen" in via_english
    with pytest.raises(UserError, match="a glossary requires protected spans"):
        model.translate("The car", "de", glossary=terms, protect=False)


def test_documents_take_one_language_and_no_options_of_lines(model: ayn.Translator) -> None:
    source, target = DOCUMENTS["md"]
    assert model.translate_document(target, format="md").text.startswith("# ")  # into English, by default
    with pytest.raises(UserError, match="align, protect: not for documents"):
        model.translate_document(source, "de", format="md", protect=False, align=True)
    several = model.translate_document("<p>The <b>red</b> car is fast.</p>", "de", format="html", beam=4, best=3)
    assert len(several.others) == 2 and several.source == "en"
    assert all(one.startswith("<p>") and one.count("<b>") == 1 for one in several.others)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(["translate", *words])
    return int(done.value.code or 0)


def test_files_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = DOCUMENTS["html"]
    page, done, terms = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "terms.tsv"
    page.write_bytes(source.replace("</p>", "</p>\r\n").encode())
    assert run(str(page), str(done), "--format", "auto", "--to", "de") == 0
    assert done.read_bytes() == target.replace("</p>", "</p>\r\n").encode()
    terms.write_text("car\tKraftwagen\n", encoding="utf-8")
    options = ["--glossary", str(terms), "--to", "de"]
    assert run("--format", "html", "<b>The car</b> is fast.", *options) == 0
    assert "Kraftwagen" in capsys.readouterr().out
    broken = tmp_path / "a.srt"
    broken.write_text("no times")
    terms.write_text("car\t\n")
    for words, message in [
        (["--input", str(broken), "--format", "auto"], f"{broken}: not SRT"),
        (["--format", "auto", "text"], "--format auto needs an input file"),
        (["--format", "doc", "text"], "unknown format 'doc'"),
        (["--format", "html", "--input", str(page), "--output", str(page)], "is the input file"),
        (["--glossary", str(terms), "text"], "line 1: expected a term"),
        (["--all", "text"], "--all is for PO, XLIFF and TS files"),
    ]:
        assert run(*words) == 2
        assert message in capsys.readouterr().err
    assert page.read_bytes().startswith(b"<p>The")
