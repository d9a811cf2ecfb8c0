"""Lines in, results out, and a progress bar on standard error."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, Self, TextIO, TypeVar

from allyouneed.cli.messages import is_quiet, show_notes, show_status
from allyouneed.cli.text.resumable_output import check_output, partial_paths
from allyouneed.data.files.lines import CHUNK, PACKED_SUFFIXES, raw_lines, read_chunks, trim_lines
from allyouneed.errors import UserError, printable

T = TypeVar("T")
REPORT_SECONDS = 30.0  # between two progress lines where there is no terminal
SHOWN = 3  # notes of one kind before they are only counted


class ReadLine(str):
    """A line that was read, without its `end`."""

    end: str

    def __new__(cls, text: str, end: str) -> Self:
        made = super().__new__(cls, text)
        made.end = end
        return made


class Pipe:
    """The lines of a pipe, socket or terminal, as they arrive."""

    def __init__(self, handle: int) -> None:
        self.handle, self.lines, self.rest, self.ended = handle, deque[bytes](), b"", False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self.lines and not self.ended:
            self._read()
        if not self.lines:
            raise StopIteration
        return self.lines.popleft()

    def ready(self) -> bool:
        """Whether `next` returns, or ends, without waiting."""
        while not self.lines and not self.ended:
            try:
                if not select.select([self.handle], [], [], 0)[0]:
                    return False
            except (OSError, ValueError):  # a system that cannot tell: wait for whole chunks
                return True
            self._read()
        return True

    def _read(self) -> None:
        try:
            data = os.read(self.handle, CHUNK)
        except BlockingIOError:  # another process has made it non-blocking
            select.select([self.handle], [], [])
            return
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.ended = not data
        if self.ended and self.rest:
            lines.append(self.rest)
        self.lines += lines


def always_ready() -> bool:
    return True


def read_lines(path: Path | None) -> Iterator[str]:
    """The lines of a file or of standard input; invalid UTF-8 is replaced, with a note."""
    return open_lines(path)[0]


def open_lines(path: Path | None) -> tuple[Iterator[str], Callable[[], bool]]:
    """The lines of a file or of standard input, and whether the next one can be read without waiting."""
    if path is not None and not path.exists():
        raise UserError(f"{path}: no such file; check the path")
    if path is not None and path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it")
    if path is None and sys.stdin is None:
        raise UserError("standard input is closed; give texts or --input")
    if path is not None and (path.is_file() or path.suffix in PACKED_SUFFIXES):
        empty = path.is_file() and path.stat().st_size == 0
        return _decoded(iter(()) if empty else raw_lines(path, keep_returns=True), str(path)), always_ready
    name = "standard input" if path is None else str(path)
    handle = _stdin_handle() if path is None else os.open(path, os.O_RDONLY)
    if handle is None:
        return _decoded(trim_lines(sys.stdin.buffer, name, keep_returns=True), name), always_ready
    pipe = Pipe(handle)
    return _decoded(trim_lines(pipe, name, keep_returns=True), name), pipe.ready


def _stdin_handle() -> int | None:
    """The file descriptor of standard input if lines may have to be waited for; None for a file."""
    try:
        handle = sys.stdin.fileno()
    except (OSError, ValueError):  # not a file of the system
        return None
    return None if stat.S_ISREG(os.fstat(handle).st_mode) else handle


def _decoded(raws: Iterator[bytes], where: str) -> Iterator[str]:
    number = broken = 0
    for number, raw in enumerate(raws, 1):
        try:
            yield _line(raw.decode("utf-8"))
        except UnicodeDecodeError:
            broken += 1
            if broken <= SHOWN:
                show_notes([f"{where}:{number}: not UTF-8; invalid bytes replaced"])
            yield _line(raw.decode("utf-8", "replace"))
    if broken > SHOWN:
        show_notes([f"{where}: {broken} lines in total were not UTF-8"])
    if not number:
        show_notes([f"{where} is empty"])


def _line(text: str) -> str:
    return ReadLine(text[:-1], "\r\n") if text.endswith("\r") else text


def end_of(text: str) -> str:
    """How a line that was read ends, and the lines that are written for it."""
    return text.end if isinstance(text, ReadLine) else "\n"


def count_lines(path: Path | None) -> int | None:
    """The number of lines of a regular file; None for anything else."""
    if path is None or not path.is_file():
        return None
    found, last = 0, b"\n"
    for chunk in read_chunks(path):
        found, last = found + chunk.count(b"\n"), chunk[-1:] or last
    return found + (last != b"\n")


def json_text(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False) + "\n"


def compressor(path: Path) -> Callable[[bytes], bytes]:
    """How a block of a file of this name is compressed. Concatenated compressed blocks are a valid file."""
    if path.suffix == ".gz":
        import gzip

        return partial(gzip.compress, mtime=0)
    if path.suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor().compress
    return bytes


@contextmanager
def open_output(path: Path | None, force: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that writes results: to standard output, or to a file that appears when it is complete."""
    if path is None:
        yield _writer(sys.stdout)
        return
    with atomic_file(path, force) as file:
        compress = compressor(path)
        yield lambda text: _write_flushed(file, compress(text.encode()))


def _write_flushed(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()


def is_regular(path: Path) -> bool:
    """Whether it is neither a pipe nor a device: those are written to directly."""
    return path.is_file() or not path.exists()


@contextmanager
def atomic_file(path: Path, force: bool = True) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is complete; until then an old one stays."""
    check_output(path, force)
    (part, journal), target, regular = partial_paths(path), path.resolve(), is_regular(path)  # a link stays a link
    if regular and journal.exists():
        raise UserError(f"{path}: an interrupted run is writing it; finish that run first, or delete {journal}")
    if regular and part.exists() and not force:
        raise UserError(f"{part}: already exists; --force overwrites it, or move it away")
    work = part if regular else target
    try:
        file = work.open("wb")
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}; name another file") from None
    try:
        with file:
            yield file
        if regular:
            work.replace(target)
    except BaseException:
        if regular and work.stat().st_size:
            show_notes([f"the finished part is in {work}"])
        elif regular:
            work.unlink()
        raise


def _writer(file: TextIO) -> Callable[[str], None]:
    shown = printable if file.isatty() else str  # a pipe gets every character, a terminal no escape codes

    def write(text: str) -> None:
        file.write(shown(text))
        file.flush()

    return write


def progress(items: Iterator[T], total: int | None, doing: str, quiet: bool = False, done: int = 0) -> Iterator[T]:
    """Pass the items on and report progress on standard error: a bar on a terminal, else a line every 30 seconds.
    `done`: how many of `total` were finished before."""
    if quiet or is_quiet():
        return items
    return _with_bar(items, total, doing, done) if sys.stderr.isatty() else _with_lines(items, total, doing, done)


def _with_bar(items: Iterator[T], total: int | None, doing: str, done: int) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=300) as bar:
        task = bar.add_task(doing, total=total, completed=done)
        for item in items:
            yield item
            bar.advance(task)


def _with_lines(items: Iterator[T], total: int | None, doing: str, done: int) -> Iterator[T]:
    start = last = monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = monotonic()
        if now - last >= REPORT_SECONDS:
            speed, last = number / (now - start), now
            line = f"{doing}: {done + number:,}"
            if total is not None:
                left = timedelta(seconds=round(max(0, total - done - number) / speed))
                line += f" of {total:,} ({100 * (done + number) / max(1, total):.1f}%), about {left} left"
            show_status(f"{line}, {speed:,.1f} per second")
