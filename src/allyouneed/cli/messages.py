"""Messages on standard error: notes and status lines, which `--quiet` hides, and the warnings of the library."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from allyouneed.errors import printable
from allyouneed.files import missing_folder

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def is_quiet() -> bool:
    return _quiet.get()


@contextmanager
def quieted(quiet: bool) -> Iterator[None]:
    """Hide notes, status lines and progress; errors are still printed."""
    before = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(before)


def show_status(text: str) -> None:
    """A line on standard error, if it can be written: a server does not end because its log is full."""
    if not is_quiet():
        with suppress(OSError):
            print(printable(text), file=sys.stderr, flush=True)


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        show_status(f"note: {note}")


@contextmanager
def created_folders_as_note(out: Path) -> Iterator[None]:
    """Say which folder above `out` was created inside: it may be a typing error."""
    missing = missing_folder(out)
    yield
    if missing is not None and missing.exists():
        show_notes([f"created the folder {missing}"])


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print warnings of the library as notes."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", UserWarning)

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if "allyouneed" in Path(filename).parts:
                show_notes([str(message)])
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        yield
