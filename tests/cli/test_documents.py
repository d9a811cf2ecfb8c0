"""`translate --format` with files and folders: nothing is lost, and nothing is translated twice."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allyouneed.apps.translate.result import Candidate, Translation
from allyouneed.cli import documents
from allyouneed.cli.documents import DocumentCommand, translate_documents
from allyouneed.cli.options import FileOptions
from allyouneed.errors import UserError
from allyouneed.infer.decoding.notes import Note
from allyouneed.plugins import ROOT

PAGE = "".join(f"<p>Word <b>{number}</b></p>\n" for number in range(10))


@dataclass
class Upper:
    """Translates into capitals. `before`: called before each block, with its number."""

    before: Callable[[int], None] = lambda _: None
    read: list[str] = field(default_factory=list)
    calls: int = 0
    protects: bool = True
    routes: Any = field(default_factory=lambda: SimpleNamespace(detector=None))

    def translate_full(self, texts: list[str], to: Any, **options: Any) -> list[Translation]:
        self.calls += 1
        self.before(self.calls)
        self.read += texts
        return [Translation(text, [Candidate(text.upper(), 0.0)], ["a note", Note("doubt", "score")]) for text in texts]


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "FIRST_CHUNK", 3)
    monkeypatch.setattr(documents, "CHUNK", 3)


def run(model: Upper, source: Path, target: Path, format: str = "auto", **changes: Any) -> None:
    files = replace(FileOptions(input_=source, output=target), **changes)
    translate_documents(DocumentCommand(model, format, "de", None, False, {}), None, files, as_json=False)


def interrupt(number: int) -> None:
    if number == 3:
        raise KeyboardInterrupt


def test_an_interrupted_document_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "a.html.gz", tmp_path / "b.html.gz"
    source.write_bytes(gzip.compress(PAGE.encode()))
    first, second = Upper(interrupt), Upper()
    with pytest.raises(KeyboardInterrupt):
        run(first, source, target)
    assert "b.html.gz.passages: 6 passages are done; run the same command to resume" in capsys.readouterr().err
    assert not target.exists()
    with pytest.raises(UserError, match="with other settings"):
        source.write_bytes(gzip.compress(PAGE.replace("Word", "Other").encode()))
        run(second, source, target)
    source.write_bytes(gzip.compress(PAGE.encode()))
    run(second, source, target)
    notes = capsys.readouterr().err
    assert "resuming after passage 6" in notes and "a note" in notes and "score 10" in notes
    assert gzip.decompress(target.read_bytes()).decode() == PAGE.replace("Word", "WORD")
    assert len(first.read) == 6 and len(second.read) == 4, "nothing is translated twice"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html.gz", "b.html.gz"]
    with pytest.raises(UserError, match="already exists; --force overwrites it"):
        run(second, source, target)
    run(second, source, target, force=True)


@pytest.mark.parametrize("moment", ["add", "discard", "rename"])
def test_a_kill_at_the_end_loses_nothing(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is written, but not yet renamed, or its passages are still there."""
    source, target = tmp_path / "a.html", tmp_path / "b.html"
    source.write_text(PAGE)
    real = getattr(documents.ResumableOutput, moment)

    def die(self: Any, *args: Any, **options: Any) -> None:
        if moment != "add" or options.get("whole"):
            raise SystemExit
        real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(documents, "FIRST_CHUNK", 3)
        patch.setattr(documents.ResumableOutput, moment, die)
        with pytest.raises(SystemExit):
            run(Upper(), source, target)
    assert not target.exists()
    again = Upper()
    run(again, source, target)
    assert target.read_text() == PAGE.replace("Word", "WORD") and not again.read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_every_document_of_a_folder_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = tmp_path / "in", tmp_path / "out"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.html").write_text(PAGE)
    (folder / "sub" / "b.md.gz").write_bytes(gzip.compress(b"# Head\n\nText `code`\n"))
    (folder / "c.png").write_bytes(b"\x89PNG")
    (folder / "d.srt").write_text("no times")
    model = Upper()
    with pytest.raises(UserError, match=r"1 of 3 files were not translated: .*d\.srt: not SRT"):
        run(model, folder, target)
    assert "not translated, for they have another format: c.png" in capsys.readouterr().err
    assert (target / "a.html").read_text() == PAGE.replace("Word", "WORD")
    assert gzip.decompress((target / "sub" / "b.md.gz").read_bytes()) == b"# HEAD\n\nTEXT `code`\n"
    (folder / "d.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHi\n")
    again = Upper()
    run(again, folder, target)
    assert again.read == ["Hi"], "what is complete is not translated again"
    assert "is complete already" in capsys.readouterr().err
    shards = tmp_path / "shards"
    run(model, folder, shards, shard="2/3")
    assert [path.name for path in shards.rglob("*.*") if path.suffix != ".journal"] == ["d.srt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": None}, "name a file in it, or an output folder"),
        ({"format": "vtt"}, "has no documents of the format vtt"),
        ({"input_": "a.html", "shard": "1/2"}, "--shard with --format needs a folder"),
        ({"input_": "missing.html"}, "missing.html: cannot be read"),
        ({"output": "in/out"}, "is inside the input folder"),
    ],
)
def test_one_clear_message(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "in" / "a.html", tmp_path / "a.html"):
        path.write_text(PAGE)
    format = change.pop("format", "auto")
    paths = {name: tmp_path / value if name != "shard" and value else value for name, value in change.items()}
    with pytest.raises(UserError, match=message):
        run(Upper(), tmp_path / "in", tmp_path / "out", format, **paths)


DOCUMENTS = {
    "a.html": "<p>one\ntwo</p>\n<pre>x\ny</pre>\n<p>three<br>\nfour</p>\n",
    "a.md": "# Head\n\nA line\nand one more.\n\n- item\n- more\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| c | d |\n",
    "a.srt": "1\n00:00:01,000 --> 00:00:02,000\nA long line of a cue that is\nbroken into two lines here\n\n2\n"
    "00:00:03,000 --> 00:00:04,000\n- You?\n- Me.\n",
    "a.vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\nA long line of a cue that is\nbroken into two lines here\n\n",
    "a.po": 'msgid ""\nmsgstr ""\n"Language: de"\n\nmsgid "one\\n"\n"two"\nmsgstr ""\n\nmsgid "a\\nb"\nmsgstr ""',
    "a.xml": "<doc>\n<p>one\ntwo</p>\n<p>three</p>\n</doc>\n",
    "a.txt": "one\n\n  two\nthree\n",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_lines_of_a_document_end_as_they_did(name: str, tmp_path: Path) -> None:
    found = []
    for number, newline in enumerate(["\n", "\r\n"]):
        source, target = tmp_path / name, tmp_path / f"{number}-{name}"
        source.write_bytes(DOCUMENTS[name].replace("\n", newline).encode())
        run(Upper(), source, target)
        found.append(target.read_bytes().decode())
    assert found[1] == found[0].replace("\n", "\r\n") != found[0]


def test_a_text_with_mixed_line_ends_keeps_each(tmp_path: Path) -> None:
    source, target = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_bytes(b"one\r\ntwo\n\r\nthree\r")
    run(Upper(), source, target)
    assert target.read_bytes() == b"ONE\r\nTWO\n\r\nTHREE\r"


TABLE = "id,text\r\n" + "".join(f'{number},"a ""word"" {number}"\r\n' for number in range(10))


def test_an_interrupted_table_resumes(tmp_path: Path) -> None:
    source, target = tmp_path / "a.csv", tmp_path / "b.csv"
    source.write_bytes(TABLE.encode())
    command = DocumentCommand(Upper(interrupt), "csv", "de", None, False, {}, {"column": "text"})
    with pytest.raises(KeyboardInterrupt):
        translate_documents(command, None, FileOptions(input_=source, output=target), as_json=False)
    rest = Upper()
    translate_documents(replace(command, translator=rest), None, FileOptions(input_=source, output=target), False)
    assert len(rest.read) == 4
    assert target.read_bytes().decode() == TABLE.replace("word", "WORD").replace('"a ', '"A ')


def test_settings_in_a_folder_are_translated_only_if_their_format_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.json").write_text('{"theme": "dark"}')
    (folder / "b.ts").write_text("const a = 1;")
    (folder / "c.tex").write_text("Word\n")
    auto, named = Upper(), Upper()
    run(auto, folder, tmp_path / "auto")
    run(named, folder, tmp_path / "named", "json")
    assert (auto.read, named.read) == (["Word"], ["dark"])


def test_a_packed_document_is_written_as_bytes_and_never_as_text(tmp_path: Path) -> None:
    import io
    import zipfile

    packed = io.BytesIO()
    content = '<a xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"><text:p>One word</text:p></a>'
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("content.xml", content)
    source, target = tmp_path / "a.odt", tmp_path / "b.odt"
    source.write_bytes(packed.getvalue())
    run(Upper(), source, target)
    with zipfile.ZipFile(target) as file:
        assert file.read("content.xml").decode() == content.replace("One word", "ONE WORD")
    command = DocumentCommand(Upper(), "auto", "de", None, False, {})
    with pytest.raises(UserError, match=r"\.odf is no text; name an input and an output file"):
        translate_documents(command, None, FileOptions(input_=source), as_json=False)
    with pytest.raises(UserError, match=r"\.odf is no text; remove --json"):
        translate_documents(command, None, FileOptions(input_=source, output=tmp_path / "c.odt"), as_json=True)
    with pytest.raises(UserError, match=r"c\.docx: a \.odf document stays one; name the output with its suffix"):
        translate_documents(command, None, FileOptions(input_=source, output=tmp_path / "c.docx"), as_json=False)


def test_every_format_is_named_by_the_help_and_its_files_are_known_as_files() -> None:
    from typing import get_type_hints

    from allyouneed.apps.translate.documents.formats import FORMATS, SUFFIXES
    from allyouneed.cli.completion import document_formats
    from allyouneed.cli.generation import translate
    from allyouneed.cli.text.text_input import FILE_NAME

    (option,) = get_type_hints(translate, include_extras=True)["format"].__metadata__
    listed = option.help.rpartition("; or ")[2].split(", ")
    assert listed == list(FORMATS) and document_formats("") == [*FORMATS, "auto"]
    for page in ("docs/documents.md", "docs/zh/documents.md"):
        table = "".join(
            line for line in (ROOT.parents[1] / page).read_text().splitlines(True) if line.startswith("| `")
        )
        assert not [name for name in FORMATS if f"`{name}`" not in table], page
        assert not [suffix for suffix in SUFFIXES if f"`.{suffix}`" not in table], page
    assert not [suffix for suffix in SUFFIXES if not FILE_NAME.fullmatch(f"a.{suffix}")]


def test_a_file_of_values_or_a_package_is_never_read_line_by_line() -> None:
    def chosen(name: str, format: str | None = None) -> str | None:
        return documents.format_of_input(format, None, None, FileOptions(input_=Path(name)))

    assert [chosen(name) for name in ("a.docx", "a.json", "a.csv.gz", "a.html", "a.txt")] == [
        "docx", "json", "csv", None, None,
    ]  # fmt: skip
    assert chosen("a.docx", "text") == "text"
