"""What flows through the commands: lines in, results out, and a progress bar beside them."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from allyouneed.errors import UserError

T = TypeVar("T")
SHOWN = 3  # notes of one kind before they are only counted


def lines(path: Path | None) -> Iterator[str]:
    """The lines of a file or of standard input, none dropped: bytes that are not UTF-8 are replaced, and said."""
    if path is not None and not path.exists():
        raise UserError(f"{path}: no such file; check the path")
    if path is not None and path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it")
    if path is None and sys.stdin is None:
        raise UserError("there is no standard input; give texts or --input")
    return _decoded(path)


def _decoded(path: Path | None) -> Iterator[str]:
    from allyouneed.data.readers import raw_lines

    where = path or "standard input"
    empty = path is not None and path.is_file() and path.stat().st_size == 0
    raws = iter(()) if empty else _raw_input() if path is None else raw_lines(path)
    number = broken = 0
    for number, raw in enumerate(raws, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError:
            broken += 1
            if broken <= SHOWN:
                print(f"note: {where}:{number}: not UTF-8; the bad bytes are replaced", file=sys.stderr)
            yield raw.decode("utf-8", "replace")
    if broken > SHOWN:
        print(f"note: {where}: {broken} lines in all were not UTF-8", file=sys.stderr)
    if not number:
        print(f"note: {where} is empty", file=sys.stderr)


def _raw_input() -> Iterator[bytes]:
    for number, line in enumerate(sys.stdin.buffer):  # each as it comes: somebody may be typing
        line = line if number else line.removeprefix(b"\xef\xbb\xbf")
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def count_lines(path: Path | None) -> int | None:
    """How much there is to do, where a look at the file tells."""
    if path is None or not path.is_file() or path.suffix in (".gz", ".zst"):
        return None
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def json_text(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False) + "\n"


@contextmanager
def sink(path: Path | None) -> Iterator[Callable[[str], None]]:
    """How to write results: to standard output, or to a file that is there when it is complete."""
    if path is None:
        yield _writer(sys.stdout)
        return
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        try:
            yield _writer(text)
        finally:
            text.detach()  # the file is closed where it was opened


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file appears under its name when it is complete; until then the old one stays."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it")
    place = path.resolve()  # a link stays a link
    if not place.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    plain = path.is_file() or not path.exists()  # a pipe or a device is written to as it is
    work = place.with_name(place.name + ".part") if plain else place
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        file = work.open("wb")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another file") from None
    try:
        with file:
            yield file
        if plain:
            work.replace(place)
    except BaseException:
        if plain and work.stat().st_size:
            print(f"note: what was finished is in {work}", file=sys.stderr)
        elif plain:
            work.unlink()
        raise


def _writer(file: TextIO) -> Callable[[str], None]:
    def write(text: str) -> None:
        file.write(text)
        file.flush()

    return write


def progress(items: Iterator[T], total: int | None, doing: str, quiet: bool = False) -> Iterator[T]:
    """A progress bar on standard error while they come, when a person is there to see it."""
    if quiet or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total=total)
