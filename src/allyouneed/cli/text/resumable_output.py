"""An output file written in blocks that a command resumes after a kill at any moment, without losing or repeating any.

`out.txt.part` holds what was written, `out.txt.journal` how much of it is valid: one line with the settings, then one
line per block that has reached the disk. On resume, bytes after the last journaled block are truncated. When the output
is complete, the part file gets its name and the journal is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from allyouneed.cli.messages import show_notes
from allyouneed.errors import UserError
from allyouneed.files import sync

HEAD = b'{"settings": '  # the first bytes of a journal
SAMPLED = 1 << 16  # bytes at both ends of a file that go into a model's fingerprint


@dataclass(frozen=True)
class ResumePoint:
    """One line of the journal: `lines` read so far, with digest `read`; `asked` of them had a result; the results are
    `size` bytes. `whole`: the output is complete. (The names are those of the file.)"""

    lines: int = 0
    asked: int = 0
    size: int = 0
    read: str = ""
    whole: bool = False


class ResumableOutput:
    """`settings`: what determines the content; a run with other settings is not resumed. `force`: replace an existing
    file. `restart`: discard an interrupted run. `keep`: keep the journal of a complete file, so that the same run finds
    it complete. `unit`: what the blocks consist of, for messages; empty: an interruption is not reported."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        force: bool = False,
        restart: bool = False,
        keep: bool = False,
        unit: str = "line",
    ) -> None:
        self.path, self.settings, self.force, self.restart = path, dict(settings), force, restart
        self.keep, self.unit = keep, unit
        check_output(path)
        self.target = path.resolve()  # a link stays a link
        self.part, self.journal = partial_paths(path)
        self.point = self.start = ResumePoint()
        self._files: list[int] = []

    def __enter__(self) -> Self:
        if self.part.exists() and not self.journal.exists():  # a journal is created first and deleted last
            raise UserError(f"{self.part}: has no journal, so it cannot be resumed; move it away")
        with _named_errors(self.path):
            self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._files.append(self._log)
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        found = self._lock_and_read()
        if found is not None and found.whole and not self.restart:  # complete, at most not renamed yet
            written = self.part if self.part.exists() else self.target
            if written.exists():
                if written.stat().st_size != found.size:
                    raise UserError(f"{written}: has changed since it was complete; move it away, or --restart --force")
                self.point = self.start = found
                return
            found = None  # deleted in the meantime
        if self._exists():
            if found is None:
                self.journal.unlink()
            raise UserError(f"{self.path}: already exists; --force overwrites it, or name another file")
        if found is None or self.restart:
            with _named_errors(self.path):
                os.ftruncate(self._log, 0)
                _write(self._log, _json_line({"settings": self.settings}))
        else:
            self.point = self.start = found
        with _named_errors(self.path):
            self._out = os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666)
            self._files.append(self._out)
            if os.fstat(self._out).st_size < self.point.size:
                raise UserError(f"{self.part}: shorter than its journal says; --restart begins again")
            os.ftruncate(self._out, self.point.size)
            os.lseek(self._out, 0, os.SEEK_END)

    def _exists(self) -> bool:
        return self.path.exists() and not self.force

    def _lock_and_read(self) -> ResumePoint | None:
        """The last point of the same run; None: nothing was written. A concurrent or different run is an error."""
        from allyouneed.files.system import lock

        if not lock(self._log):
            raise UserError(f"{self.path}: another process is writing it; wait until it has finished")
        settings, point, torn = read_journal(self.journal)
        os.ftruncate(self._log, os.fstat(self._log).st_size - torn)
        if settings is None:
            return None
        changed = {key for key in {*settings, *self.settings} if settings.get(key) != self.settings.get(key)}
        if changed and not self.unit and not point.size:
            return None
        if changed and not self.restart:
            listed = ", ".join(f"{key} was {setting_text(key, settings.get(key))}" for key in sorted(changed))
            done = f"{point.lines:,} {self.unit or 'document'}s"
            raise UserError(
                f"{self.path}: {done} were written with other settings ({listed}); use the same settings to resume, or "
                "--restart to begin again"
            )
        return point

    def add(self, text: bytes, lines: int, asked: int, read: str, whole: bool = False) -> None:
        """Append a block and journal it; the other arguments: see `ResumePoint`."""
        point = ResumePoint(lines, asked, self.point.size + len(text), read, whole)
        with _named_errors(self.path):
            _write(self._out, text)
            _write(self._log, _json_line(asdict(point)))
        self.point = point

    def finish(self, end: bytes = b"") -> None:
        """Append `end` and give the file its name."""
        if self._exists():
            raise UserError(
                f"{self.path}: was created by another process meanwhile; move it away, or --force overwrites it"
            )
        self.add(end, self.point.lines, self.point.asked, self.point.read, whole=True)
        self.rename()

    def rename(self) -> None:
        """Give the complete part file its final name."""
        with _named_errors(self.path):
            if self.part.exists():
                self.part.replace(self.target)
                sync(self.target.parent)
            if not self.keep:
                self.journal.unlink()

    def blocks(self) -> bytes:
        """What is written so far."""
        return self.part.read_bytes()[: self.point.size]

    def discard(self) -> None:
        """Delete part file and journal: what they hold is no longer needed."""
        self.point = ResumePoint(whole=True)
        self.part.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.point.whole:
            point = read_journal(self.journal)[1]  # an interrupt may have come between journal and `self.point`
            if not point.lines:
                self.part.unlink(missing_ok=True)
                self.journal.unlink(missing_ok=True)
            if self.unit and (kind is KeyboardInterrupt or point != self.start):
                done = f"{point.lines:,} {self.unit}s are done" if point.lines else f"no {self.unit} is done yet"
                command = "the same command" + (" without --restart" if self.restart else "")
                show_notes([f"{self.path}: {done}; run {command} to resume"])
        self._close()

    def _close(self) -> None:
        for file in self._files:
            os.close(file)


def read_journal(path: Path) -> tuple[dict[str, Any] | None, ResumePoint, int]:
    """Settings and last point of a journal, and the number of bytes of an incomplete last line."""
    written = path.read_bytes()
    *lines, torn = written.split(b"\n")
    try:
        if not written.startswith(HEAD) and not HEAD.startswith(written):
            raise ValueError
        head, *points = map(json.loads, lines or [b'{"settings": null}'])
        return head["settings"], ResumePoint(**points[-1]) if points else ResumePoint(), len(torn)
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}: not a journal of allyouneed; move it away") from None


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the output."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None


def partial_paths(path: Path) -> tuple[Path, Path]:
    """The part file and the journal of an output."""
    target = path.resolve()
    return target.with_name(target.name + ".part"), target.with_name(target.name + ".journal")


def check_output(path: Path, force: bool = True) -> None:
    """Refuse a path that cannot be written."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it")
    if not path.resolve().parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")
    if path.is_file() and not force:
        raise UserError(f"{path}: already exists; --force overwrites it, or name another file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{path}: cannot write: Permission denied; name another file")


def _write(file: int, data: bytes) -> None:
    """Write all of it and flush it to the disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _json_line(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode() + b"\n"


def setting_text(key: str, value: Any) -> str:
    return "not set" if value is None else "another" if key in ("model", "input") else str(value)


def model_fingerprint(folder: Path) -> str:
    """A digest that identifies a model wherever its folder is: names, sizes, and both ends of every file."""
    digest = hashlib.sha256()
    for path in _model_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED))
            file.seek(max(0, size - SAMPLED))
            digest.update(file.read())
    return digest.hexdigest()


def _model_files(folder: Path) -> Iterator[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    yield from (path for path in found if path.is_file() and path.suffix != ".md")
