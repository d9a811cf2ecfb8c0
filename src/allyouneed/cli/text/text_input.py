"""What a command reads: its arguments, the lines of a file or of standard input, or the files of a folder; and outputs
that would overwrite it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from allyouneed.cli.messages import show_notes, show_status
from allyouneed.cli.options import FileOptions
from allyouneed.cli.text.shards import Shard, files_below
from allyouneed.cli.text.streams import always_ready, count_lines, end_of, open_lines
from allyouneed.errors import UserError

# an argument that can only be a file
FILE_NAME = re.compile(
    r"\S*\.(txt|tsv|csv|jsonl?|md|markdown|x?html?|srt|vtt|pot?|xml|gz|zst|(doc|ppt|xls)[xm]|(dot|pot|xlt|pps)x|od[tspg]|"
    r"ot[tsp]|epub|pdf|xlf|xliff|tmx|ts|arb|ya?ml|properties|strings|ipynb|tex|latex)"
)
F = TypeVar("F", bound=FileOptions)
Item = tuple[str, str]  # where the text comes from, for error messages, and the text


@dataclass(frozen=True)
class InputSource:
    """The texts of a command: `interactive` (typed, answered one at a time), given as `arguments`, or lines that are
    read. `name`: of what is read line by line, else None. `path`: the file that is read. `ready`: whether the next item
    can be read without waiting."""

    items: Iterator[Item]
    total: int | None
    interactive: bool = False
    arguments: bool = False
    name: str | None = None
    path: Path | None = None
    ready: Callable[[], bool] = always_ready
    span: range | None = None  # the lines of a shard, from 0; None: all

    def arrived(self, most: int) -> list[Item]:
        """Up to `most` items: waits for the first, then takes what is there."""
        held = list(islice(self.items, 1))
        while held and len(held) < most and self.ready():
            if (item := next(self.items, None)) is None:
                break
            held.append(item)
        return held


def file_arguments(
    texts: list[str] | None, files: F, paths: bool = False, documents: bool = False
) -> tuple[list[str] | None, F]:
    """Arguments that are files: one that exists is the input; of two, the first is the input and the second the output
    if the first exists, or both have the names of files. `-` is a standard stream. `paths`: the arguments are paths, so
    that only a folder, or a list of paths, is an input. `documents`: a folder is an input."""
    if not texts or files.input_ is not None:
        return texts, files
    first, *rest = texts
    if documents and os.path.isdir(first) and len(rest) < 2 and not (rest and files.output):
        return None, replace(files, input_=Path(first), output=Path(rest[0]) if rest else files.output)
    is_input = _is_input(first, paths, files.shard is not None)
    if not rest and is_input and files.shard is None:
        if not paths:
            show_notes([f"{first} is a file: reading it; to use its name as a text, pipe it in"])
        return None, replace(files, input_=Path(first))
    if len(rest) == 1 and files.output is None:
        (second,) = rest
        both = bool(FILE_NAME.fullmatch(second)) and (os.path.isdir(first) or bool(FILE_NAME.fullmatch(first)))
        if first == "-" or is_input or both:
            return None, replace(files, input_=Path(first), output=Path(second))
    if files.shard is None and not paths:
        for text in texts:
            if what := "file" if os.path.isfile(text) else "folder" if os.path.isdir(text) else "":
                show_notes([f"{text!r} is read as a text; use --input to read the {what}"])
    return texts, files


def _is_input(name: str, paths: bool, shard: bool) -> bool:
    if paths:
        return os.path.isdir(name) or (os.path.isfile(name) and bool(FILE_NAME.fullmatch(name)))
    return os.path.isfile(name) or (os.path.isdir(name) and (shard or os.sep in name))


def open_input(texts: Sequence[str] | None, files: FileOptions, suffixes: tuple[str, ...] = ()) -> InputSource:
    """`suffixes`: of the files of a folder, if the texts are paths."""
    whole = getattr(files, "whole", False)
    if texts and files.input_ is not None:
        raise UserError("texts and --input are exclusive; give one of them")
    if texts and whole:
        raise UserError("--whole is for --input and standard input; each argument is one text already")
    shard = None if files.shard is None else Shard.parse(files.shard)
    if shard is not None and (whole or _is_stream(files.input_) or _is_stream(files.output)):
        raise UserError("--shard needs an input file or folder and an output, and reads line by line (not --whole)")
    if texts:
        return InputSource((("", text) for text in texts), len(texts), arguments=True)
    input_ = unless_standard(files.input_)
    where = input_ or "standard input"
    if input_ is not None and input_.is_dir() and suffixes:
        found = [str(path) for path in files_below(input_, suffixes)]
        source = InputSource((("", path) for path in found), len(found), name=str(where), path=input_)
    else:
        lines, ready = open_lines(input_)
        items = ((f"{where}:{number}: ", line) for number, line in enumerate(lines, 1))
        interactive = input_ is None and sys.stdin is not None and sys.stdin.isatty()
        if interactive:
            show_status("Type a text; Ctrl-D ends it." if whole else "Type a text and Enter; Ctrl-D ends.")
        path = input_ or Path("/dev/stdin")
        if whole:
            return InputSource(_join_lines(items), 1, path=path)
        source = InputSource(items, count_lines(input_), interactive, name=str(where), path=path, ready=ready)
    return source if shard is None else replace(source, span=shard.span(source.total or 0))


def _is_stream(path: Path | None) -> bool:
    return path is None or path == Path("-") or (path.exists() and not path.is_file() and not path.is_dir())


def unless_standard(path: Path | None) -> Path | None:
    return None if path == Path("-") else path


def _join_lines(items: Iterator[Item]) -> Iterator[Item]:
    lines = [line for _, line in items]
    yield "", "".join(line + end_of(line) for line in lines[:-1]) + "".join(lines[-1:])


def check_output_folder(folder: Path, output: Path | None) -> Path:
    """Refuse an output that is not a folder of its own."""
    if output is None or output.is_file() or FILE_NAME.fullmatch(output.name):
        raise UserError(f"{folder}: is a folder; name a file in it, or an output folder for all of them")
    if output.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{output}: is inside the input folder; name another folder")
    return output


def check_not_input(read: Path | None, output: Path | None) -> None:
    """Refuse to overwrite the input, also through a link."""
    if output is not None and output.is_file() and read is not None and read.exists() and output.samefile(read):
        raise UserError(f"{output}: is the input file; name another file")
