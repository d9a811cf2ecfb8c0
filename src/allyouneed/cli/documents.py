"""`translate --format`: whole documents instead of lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import FileOptions
from allyouneed.cli.streams import json_text, open_output
from allyouneed.cli.text_commands import LineNotes, check_not_input
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.translation.documents.translate import DocumentTranslation

Translate = Callable[[str, str], "DocumentTranslation"]  # of a document and its format
MARKUP = (".html", ".htm", ".xhtml", ".srt", ".vtt", ".po", ".pot", ".xml")


def translate_documents(
    translate: Translate, format: str, texts: list[str] | None, files: FileOptions, as_json: bool
) -> None:
    """Each argument is a document; or a file is, or standard input."""
    if files.shard is not None or files.restart:
        raise UserError("--shard and --restart are for files that are translated line by line; remove --format")
    output = None if files.output in (None, Path("-")) else files.output
    check_not_input(files.input_, output)
    done = []
    for where, text in _documents(texts, files):
        try:
            done.append((where, translate(text, _format(format, files.input_))))
        except UserError as error:
            raise UserError(f"{where}: {error}" if where and not str(error).startswith(where) else str(error)) from None
    with open_output(output, files.force) as write:
        for where, one in done:
            if as_json:
                write(json_text({"translation": one.text, "passages": one.passages, "notes": one.notes}))
                continue
            write(one.text + "\n" * bool(texts))
            notes = LineNotes(where or "text")
            notes.add(None, one.notes)
            notes.end()


def note_lines(files: FileOptions) -> None:
    """Without --format, a file is translated line by line."""
    if files.input_ is not None and files.input_.suffix.lower() in MARKUP:
        show_notes([f"{files.input_} is translated line by line; --format auto keeps its structure"])


def _format(name: str, path: Path | None) -> str:
    from allyouneed.infer.translation.documents.formats import format_of

    if name != "auto":
        return name
    if path is None or path == Path("-"):
        raise UserError("--format auto needs an input file; name the format")
    return format_of(str(path))


def _documents(texts: list[str] | None, files: FileOptions) -> Iterator[tuple[str, str]]:
    """Each document, and where it comes from."""
    if texts and files.input_ is not None:
        raise UserError("texts and --input are exclusive; give one of them")
    if texts:
        yield from (("", text) for text in texts)
        return
    path = files.input_
    try:
        if path is None or path == Path("-"):
            where, data = "standard input", sys.stdin.buffer.read()
        else:
            where, data = str(path), path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}; name a file") from None
    try:
        yield where, data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start}); convert it first") from None
