"""What flows through the commands: lines in, results out, and a progress bar beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, TextIO, TypeVar

from allyouneed.cli.unfinished import beside, check_place
from allyouneed.errors import UserError

T = TypeVar("T")
OFTEN = 30.0  # seconds between two lines that say how far it has come
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
    from allyouneed.data.files.readers import raw_lines

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
    if path is None or not path.is_file():
        return None
    from allyouneed.data.files.readers import read_chunks

    found, last = 0, b"\n"
    for chunk in read_chunks(path):
        found, last = found + chunk.count(b"\n"), chunk[-1:] or last
    return found + (last != b"\n")


def json_text(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False) + "\n"


def packer(path: Path) -> Callable[[bytes], bytes]:
    """How a piece of a file of this name is stored. Packed pieces behind one another are a packed file."""
    if path.suffix == ".gz":
        import gzip

        return partial(gzip.compress, mtime=0)
    if path.suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor().compress
    return bytes


@contextmanager
def sink(path: Path | None, force: bool = True) -> Iterator[Callable[[str], None]]:
    """How to write results: to standard output, or to a file that is there when it is complete."""
    if path is None:
        yield _writer(sys.stdout)
        return
    with whole_file(path, force) as file:
        pack = packer(path)
        yield lambda text: _flushed(file, pack(text.encode()))


def _flushed(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()


def is_plain(path: Path) -> bool:
    """A pipe or a device is no plain file: it is written to as it is."""
    return path.is_file() or not path.exists()


@contextmanager
def whole_file(path: Path, force: bool = True) -> Iterator[BinaryIO]:
    """A file appears under its name when it is complete; until then the old one stays."""
    check_place(path, force)
    (part, journal), place, plain = beside(path), path.resolve(), is_plain(path)  # a link stays a link
    if plain and journal.exists():
        raise UserError(f"{path}: some of it was made from a file; finish that first, or delete {journal}")
    if plain and part.exists() and not force:
        raise UserError(f"{part}: is there already; --force replaces it, or move it away")
    work = part if plain else place
    try:
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


def progress(items: Iterator[T], total: int | None, doing: str, quiet: bool = False, done: int = 0) -> Iterator[T]:
    """How far one has come and how long it will take, on standard error: a bar when a person is there to see it, else a
    line now and then. `done`: so many of the total before."""
    if quiet:
        return items
    return _bar(items, total, doing, done) if sys.stderr.isatty() else _told(items, total, doing, done)


def _bar(items: Iterator[T], total: int | None, doing: str, done: int) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=300) as bar:
        task = bar.add_task(doing, total=total, completed=done)
        for item in items:
            yield item
            bar.advance(task)


def _told(items: Iterator[T], total: int | None, doing: str, done: int) -> Iterator[T]:
    begun = last = monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = monotonic()
        if now - last >= OFTEN:
            speed, last = number / (now - begun), now
            said = f"{doing}: {done + number:,}"
            if total is not None:
                left = timedelta(seconds=round(max(0, total - done - number) / speed))
                said += f" of {total:,} ({100 * (done + number) / max(1, total):.1f}%), about {left} left"
            print(f"{said}, {speed:,.1f} a second", file=sys.stderr, flush=True)
