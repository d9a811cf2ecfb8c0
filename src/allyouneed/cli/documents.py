"""`translate --format`: whole documents instead of lines.

A document that is written to a file is translated in blocks of passages. Their translations are kept beside the output
(`page.html.passages`, see resumable_output.py) until the document is complete, so that an interrupted command resumes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.cli.commands import recorded_options
from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import FileOptions
from allyouneed.cli.text.resumable_output import ResumableOutput, partial_paths
from allyouneed.cli.text.shards import Shard, files_below
from allyouneed.cli.text.streams import compressor, is_regular, json_text, open_output, progress
from allyouneed.cli.text.text_input import check_not_input, check_output_folder
from allyouneed.cli.text_commands import CHUNK, FIRST_CHUNK, LineNotes
from allyouneed.data.files.lines import PACKED_SUFFIXES, inner_suffix, read_chunks
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.translate.documents.parts import Document

TABLES = ("csv", "tsv")
DRAFTS = ("po", "xliff", "ts")  # formats that have translations already
OFTEN_OTHER = ("json", "yaml", "ts")  # of a folder: mostly settings and programs
SHOWN = 3  # files named in a message


@dataclass(frozen=True)
class DocumentCommand:
    """`format`: a name, or `auto`; `every`: of PO; `options`: of `translate_full`; `table`: of CSV and TSV. `saved`:
    the memory that translations are added to."""

    translator: Any
    format: str
    to: str | None
    from_: str | None
    every: bool
    options: Mapping[str, Any]
    table: Mapping[str, Any] = field(default_factory=dict)
    saved: Path | None = None

    def reading(self, format: str, output: Path | None = None) -> dict[str, Any]:
        if format in TABLES:
            return dict(self.table)
        if format == "pdf" and output is not None:
            from allyouneed.apps.translate.documents.formats import known_format

            into = known_format(output.name) or inner_suffix(output).removeprefix(".")
            return {"into": into}
        return {"every": True} if self.every and format in DRAFTS else {}


def format_of_input(
    format: str | None, column: list[str] | None, header: bool | None, files: FileOptions
) -> str | None:
    """The format of an input file that is never translated line by line; of other inputs, `format`."""
    named = ""
    if files.input_ is not None:
        from allyouneed.apps.translate.documents.formats import BY_LINES, known_format

        named = known_format(files.input_.name) or ""
        named = "" if named in BY_LINES else named
    if (column or header is not None) and format not in (*TABLES, "auto") and named not in TABLES:
        raise UserError("--column and --header are for tables; set --format csv or tsv, or remove them")
    numbered = bool(column) and all(name.isdecimal() for name in column or ())
    if header is False and not numbered:
        raise UserError("--no-header: the columns have no names; set --column to a number, from 1")
    if header is None and numbered:
        show_notes(["the first row has the names of the columns and is not translated; --no-header if it has none"])
    return named if format is None and named else format


def translate_documents(command: DocumentCommand, texts: list[str] | None, files: FileOptions, as_json: bool) -> None:
    """Each argument is a document; or a file is, or each file of a folder, or standard input."""
    if texts and files.input_ is not None:
        raise UserError("texts and --input are exclusive; give one of them")
    folder = files.input_ is not None and files.input_.is_dir()
    if files.shard is not None and not folder:
        raise UserError("--shard with --format needs a folder: its files are shared out")
    output = None if files.output in (None, Path("-")) else files.output
    if folder:
        _translate_folder(command, files, as_json)
    elif output is not None and is_regular(output) and files.input_ not in (None, Path("-")):
        _translate_file(command, replace(files, output=output), as_json)
    else:
        if files.restart:
            raise UserError("--restart is for an input and an output file; remove it")
        _translate_at_once(command, texts, replace(files, output=output), as_json)


def note_lines(files: FileOptions) -> None:
    """Note that a file is translated line by line without --format."""
    if files.input_ is None:
        return
    from allyouneed.apps.translate.documents.formats import known_format

    if known_format(files.input_.name) not in (None, "md", "text") and files.input_.suffix not in PACKED_SUFFIXES:
        show_notes([f"{files.input_} is translated line by line; --format auto keeps its structure"])


def _translate_at_once(command: DocumentCommand, texts: list[str] | None, files: FileOptions, as_json: bool) -> None:
    done = []
    check_not_input(files.input_, files.output)
    for where, text in _documents(texts, files):
        format = _format(command, files.input_)
        _check_written(format, files.output, as_json, at_once=True)
        with _named(where):
            reading = command.reading(format, files.output)
            one = command.translator.translate_document(
                text, command.to, format=format, from_=command.from_, reading=reading, **command.options
            )
        done.append((where, one))
    with open_output(files.output, files.force) as write:
        for where, one in done:
            write(_json(one.text, one.passages, one.notes) if as_json else one.text + "\n" * bool(texts))
            _show_notes(where or "text", () if as_json else one.notes)


def _translate_folder(command: DocumentCommand, files: FileOptions, as_json: bool) -> None:
    """Each document of a folder becomes a file of the same name in the output folder. One that cannot be translated
    does not hold up the others."""
    from allyouneed.apps.translate.documents.formats import known_format

    assert files.input_ is not None
    folder, output = files.input_, check_output_folder(files.input_, files.output)
    shard = Shard(1, 1) if files.shard is None else Shard.parse(files.shard)
    found = files_below(folder)
    wanted = [path for path in found if known_format(path.name) in _formats(command.format)]
    if not wanted:
        raise UserError(f"{folder}: has no documents of the format {command.format}; set another --format")
    if others := [path for path in found if path not in set(wanted)]:
        names = ", ".join(str(path.relative_to(folder)) for path in others[:SHOWN])
        more = f" and {len(others) - SHOWN:,} more" if len(others) > SHOWN else ""
        show_notes([f"{folder}: not translated, for they have another format: {names}{more}"])
    failed: list[str] = []
    mine = [path for number, path in enumerate(wanted) if number % shard.count == shard.index - 1]
    for number, path in enumerate(mine, 1):
        target = output / path.relative_to(folder)
        if known_format(path.name) == "pdf":
            target = target.with_suffix(".md")
        target.parent.mkdir(parents=True, exist_ok=True)
        doing = f"translating {path.relative_to(folder)} ({number} of {len(mine)})"
        try:
            _translate_file(command, replace(files, input_=path, output=target, shard=None), as_json, doing, keep=True)
        except UserError as error:
            failed.append(str(error))
    if failed:
        more = f"; and {len(failed) - SHOWN:,} more" if len(failed) > SHOWN else ""
        raise UserError(
            f"{len(failed):,} of {len(mine):,} files were not translated: {'; '.join(failed[:SHOWN])}{more}"
        )


def _formats(name: str) -> frozenset[str]:
    from allyouneed.apps.translate.documents.formats import READERS

    return frozenset(READERS) - {*OFTEN_OTHER} if name == "auto" else frozenset([name])


def _translate_file(
    command: DocumentCommand, files: FileOptions, as_json: bool, doing: str = "translating", keep: bool = False
) -> None:
    """Translate a file into a file, resuming an interrupted run."""
    from allyouneed.apps.translate.documents.formats import read_document

    path, output = files.input_, files.output
    assert path is not None and output is not None
    check_not_input(path, output)
    format = _format(command, path)
    _check_written(format, output, as_json)
    content = _read(path)
    with _named(str(path)):
        document = read_document(content, format, **command.reading(format, output))
    settings = recorded_options() | {"json": as_json, "input": hashlib.sha256(content).hexdigest()}
    passages = output.with_name(output.name + ".passages")
    with ResumableOutput(output, settings, files.force, files.restart, keep, unit="") as whole:
        if whole.point.whole:
            for left in partial_paths(passages):
                left.unlink(missing_ok=True)
            whole.rename()
            if keep:
                show_notes([f"{output}: is complete already"])
            return
        with ResumableOutput(passages, settings, restart=files.restart, unit="passage") as out, _named(str(path)):
            content, notes = _resume(command, document, format, out, as_json, doing)
            whole.add(compressor(output)(content), 1, 1, "", whole=True)
            out.discard()
        whole.rename()
    _show_notes(str(path), () if as_json else notes)


def _resume(
    command: DocumentCommand, document: Document, format: str, out: ResumableOutput, as_json: bool, doing: str
) -> tuple[bytes, list[str]]:
    """The translated document and the notes about it."""
    from allyouneed.apps.translate.documents.translate import named_target, passage_text, target_language
    from allyouneed.infer.decoding.notes import Note

    passages = [unit.passage for unit in document.units]
    to = target_language(command.translator, passages, command.to, command.from_)
    done = [json.loads(line) for line in out.blocks().split(b"\n") if line]
    if out.point.lines:
        show_notes([f"{out.path}: resuming after passage {out.point.lines:,}"])

    def rest() -> Iterator[None]:
        while len(done) < len(passages):
            first, size = len(done), min(CHUNK, max(FIRST_CHUNK, len(done)))
            some, options = passages[first : first + size], dict(command.options)
            if count := options.get("context"):
                options["preceding"] = passages[max(0, first - count) : first]
            found = command.translator.translate_full(some, to, from_=command.from_, first=first, **options)
            block = [
                {"text": one.text, "notes": [(note, getattr(note, "kind", "")) for note in one.notes]} for one in found
            ]
            done.extend(block)
            out.add("".join(map(json_text, block)).encode(), len(done), len(done), "")
            yield from (None for _ in block)

    for _ in progress(rest(), len(passages), doing, done=len(done)):
        pass
    texts = [passage_text(source, one["text"], format) for source, one in zip(passages, done, strict=True)]
    notes: list[str] = [Note(note, kind) if kind else note for one in done for note, kind in one["notes"]]
    named = named_target(command.translator, to)
    _save(command, passages, texts, named)
    if as_json:
        return _json(document.write(texts, named), len(passages), notes).encode(), notes
    return document.data(texts, named), notes


def _save(command: DocumentCommand, passages: Sequence[str], texts: Sequence[str], to: str | None) -> None:
    """Add the passages of a document and their translations to a memory."""
    if command.saved is None or not passages:
        return
    from allyouneed.apps.translate.documents.memory import TranslationMemory
    from allyouneed.apps.translate.documents.translate import named_source
    from allyouneed.files import write_text

    here = named_source(command.translator, passages, command.from_)
    if here is None or to is None:
        raise UserError("--save-memory: the language of the document is not known; set --from and --to")
    memory = TranslationMemory.read(command.saved) if command.saved.exists() else TranslationMemory()
    memory.add(passages, texts, here, to)
    write_text(command.saved, memory.write())


def _json(text: str, passages: int, notes: list[str]) -> str:
    return json_text({"translation": text, "passages": passages, "notes": notes})


def _check_written(format: str, output: Path | None, as_json: bool, at_once: bool = False) -> None:
    """Refuse to write a packed document as text or under another suffix. `at_once`: not from a file into a file."""
    from allyouneed.apps.translate.documents.formats import FORMATS, known_format

    written = format if format != "pdf" or output is None else known_format(output.name) or ""
    other = format if output is None else known_format(output.name) or format
    if format != "pdf" and other != format and (FORMATS[format].data or FORMATS[other].data) and not as_json:
        raise UserError(f"{output}: a .{format} document stays one; name the output with its suffix")
    if written != "pdf" and written in FORMATS and FORMATS[written].data and (as_json or at_once):
        hint = "remove --json" if as_json else "name an input and an output file"
        raise UserError(f".{written} is no text; {hint}: allyouneed translate in.{format} out.{written}")


def _show_notes(where: str, found: Any) -> None:
    notes = LineNotes(where)
    notes.add(None, found)
    notes.end()


def _format(command: DocumentCommand, path: Path | None) -> str:
    from allyouneed.apps.translate.documents.formats import format_of

    if command.format != "auto":
        return command.format
    if path is None or path == Path("-"):
        raise UserError("--format auto needs an input file; name the format")
    return format_of(str(path))


def _documents(texts: list[str] | None, files: FileOptions) -> Iterator[tuple[str, str | bytes]]:
    """Each document, and where it comes from."""
    if texts:
        yield from (("", text) for text in texts)
    elif files.input_ is None or files.input_ == Path("-"):
        yield "standard input", sys.stdin.buffer.read()
    else:
        yield str(files.input_), _read(files.input_)


def _read(path: Path) -> bytes:
    try:
        return b"".join(read_chunks(path))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}; name a file") from None


class _named:
    """Errors about a document name it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if isinstance(error, UserError) and self.where and not str(error).startswith(self.where):
            raise UserError(f"{self.where}: {error}") from None
