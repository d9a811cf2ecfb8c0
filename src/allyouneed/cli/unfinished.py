"""A file that is written piece by piece, and gone on with after a kill at any moment: nothing of it is lost, nothing is
there twice.

`out.txt.part` holds what has been written, `out.txt.journal` says how much of it counts: a line about who writes it and
how, then a line for each piece that is safe on the disk. What stands behind the last of those pieces is cut off. When
all is there the file gets its name, and the journal goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from allyouneed.errors import UserError
from allyouneed.files import sync

HEAD = b'{"settings": '  # how a journal begins
GLIMPSE = 1 << 16  # bytes at both ends of a file by which it is known again


@dataclass(frozen=True)
class Mark:
    """How far it has come: `lines` were read, whose digest is `read`; `asked` of them were questions; what came of them
    are `size` bytes. `whole`: there will be no more."""

    lines: int = 0
    asked: int = 0
    size: int = 0
    read: str = ""
    whole: bool = False


class Unfinished:
    """`settings`: what decides the content; work that was begun with other ones is not gone on with. `force`: replace a
    file of this name. `restart`: begin anew, whatever was done."""

    def __init__(self, path: Path, settings: Mapping[str, Any], force: bool = False, restart: bool = False) -> None:
        self.path, self.settings, self.force, self.restart = path, dict(settings), force, restart
        check_place(path)
        self.place = path.resolve()  # a link stays a link
        self.part, self.journal = beside(path)
        self.mark = self.begun = Mark()
        self._files: list[int] = []

    def __enter__(self) -> Self:
        if self.part.exists() and not self.journal.exists():  # of ours the journal comes first and goes last
            raise UserError(f"{self.part}: no work of ours goes on there; move it away")
        with _saying(self.path):
            self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._files.append(self._log)
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def _begin(self) -> None:
        begun = self._alone()
        if begun is not None and begun.whole and not self.restart:  # only its name was missing, or not even that
            self.mark = self.begun = begun
            return
        if self._taken():
            if begun is None:
                self.journal.unlink()
            raise UserError(f"{self.path}: is there already; --force replaces it, or name another file")
        if begun is None or self.restart:
            with _saying(self.path):
                os.ftruncate(self._log, 0)
                _write(self._log, _line({"settings": self.settings}))
        else:
            self.mark = self.begun = begun
        with _saying(self.path):
            self._out = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666)
            self._files.append(self._out)
            if os.fstat(self._out).st_size < self.mark.size:
                raise UserError(f"{self.part}: some of it is missing; --restart begins anew")
            os.ftruncate(self._out, self.mark.size)
            os.lseek(self._out, 0, os.SEEK_END)

    def _taken(self) -> bool:
        return self.path.exists() and not self.force

    def _alone(self) -> Mark | None:
        """How far the same work has come; None: it has not begun. Two at once, or another work, are refused."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            pass
        else:
            try:
                fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.path}: somebody else is writing it; wait until that is over") from None
        settings, mark, torn = self._read()
        os.ftruncate(self._log, os.fstat(self._log).st_size - torn)
        if settings is None:
            return None
        other = {key for key in {*settings, *self.settings} if settings.get(key) != self.settings.get(key)}
        if other and not self.restart:
            changes = ", ".join(f"{key} was {_shown(key, settings.get(key))}" for key in sorted(other))
            raise UserError(
                f"{self.path}: {mark.lines:,} lines were done in another way ({changes}); go on in that way, "
                "or --restart begins anew"
            )
        return mark

    def _read(self) -> tuple[dict[str, Any] | None, Mark, int]:
        """Settings and the last mark of the journal, and how many bytes of a line that was never written to its end."""
        written = self.journal.read_bytes()
        *lines, torn = written.split(b"\n")
        try:
            if not written.startswith(HEAD) and not HEAD.startswith(written):
                raise ValueError
            head, *marks = map(json.loads, lines or [b'{"settings": null}'])
            return head["settings"], Mark(**marks[-1]) if marks else Mark(), len(torn)
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{self.journal}: no journal of ours; move it away") from None

    def add(self, text: bytes, lines: int, asked: int, read: str, whole: bool = False) -> None:
        """One more piece, and how far one has come with it: see `Mark`."""
        mark = Mark(lines, asked, self.mark.size + len(text), read, whole)
        with _saying(self.path):
            _write(self._out, text)
            _write(self._log, _line(asdict(mark)))
        self.mark = mark

    def finish(self, end: bytes = b"") -> None:
        """All is there, with this at its end."""
        if self._taken():
            raise UserError(f"{self.path}: somebody else has made it meanwhile; move it away, or --force replaces it")
        self.add(end, self.mark.lines, self.mark.asked, self.mark.read, whole=True)
        self.name()

    def name(self) -> None:
        """Give it its name."""
        with _saying(self.path):
            if self.part.exists():
                self.part.replace(self.place)
                sync(self.place.parent)
            self.journal.unlink()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.mark.whole:
            mark = self._read()[1]  # somebody may have come between it and us
            if not mark.lines:
                self.part.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
            if kind is KeyboardInterrupt or mark != self.begun:
                done = f"{mark.lines:,} lines are done" if mark.lines else "no line is done yet"
                goes = "the same command" + (" without --restart" if self.restart else "")
                print(f"note: {self.path}: {done}; {goes} goes on there", file=sys.stderr)
        self._close()

    def _close(self) -> None:
        for file in self._files:
            os.close(file)


@contextmanager
def _saying(path: Path) -> Iterator[None]:
    """What the system refuses is said with the name of the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def beside(path: Path) -> tuple[Path, Path]:
    """What has been written of a file, and the journal about it."""
    place = path.resolve()
    return place.with_name(place.name + ".part"), place.with_name(place.name + ".journal")


def check_place(path: Path, force: bool = True) -> None:
    """Refuse what is no place for a file."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    if path.is_file() and not force:
        raise UserError(f"{path}: is there already; --force replaces it, or name another file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{path}: cannot be written: Permission denied; name another file")


def _write(file: int, data: bytes) -> None:
    """All of it, down to the disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _line(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode() + b"\n"


def _shown(key: str, value: Any) -> str:
    return "not given" if value is None else "another" if key == "model" else str(value)


def glimpse(folder: Path) -> str:
    """By this a model is known again, wherever its folder lies: names, sizes, and both ends of every file."""
    seen = hashlib.sha256()
    for path in _files(folder):
        size = path.stat().st_size
        seen.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            seen.update(file.read(GLIMPSE))
            file.seek(max(0, size - GLIMPSE))
            seen.update(file.read())
    return seen.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    yield from (path for path in found if path.is_file() and path.suffix != ".md")
