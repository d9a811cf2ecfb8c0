"""Whatever is in a file, its reader gives a model or a `UserError`, within bounded memory and time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import reader_fuzz
import warm_python

SECONDS = 900


def fuzz(folder: Path, count: int) -> None:
    """The process may end in a library that gets no memory: the mutant it was at is then named."""
    paths = os.pathsep.join([*sys.path, str(Path(reader_fuzz.__file__).parent)])
    ended = warm_python.run(
        [sys.executable, reader_fuzz.__file__, str(folder), str(count)],
        capture_output=True,
        timeout=SECONDS,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
    )
    now = folder / "now"
    at = now.read_text() if now.exists() else "making the subjects"
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}\nat {at}"
    assert "'read'" in ended.stdout and "'refused'" in ended.stdout


def test_mutated_files_of_every_reader_are_read_or_refused(tmp_path: Path) -> None:
    fuzz(tmp_path, 3)


@pytest.mark.slow
def test_many_mutated_files_of_every_reader_are_read_or_refused(tmp_path: Path) -> None:
    fuzz(tmp_path, 40)
