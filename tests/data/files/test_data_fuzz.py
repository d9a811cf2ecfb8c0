"""Whatever is in a file of data, its reader gives examples with a report, or one message, within bounded memory and
time; nothing is lost silently."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import data_fuzz
import warm_python

SECONDS = 1800


def fuzz(folder: Path, count: int, seed: int) -> None:
    """The process may end in a library that gets no memory: the mutant it was at is then named."""
    paths = os.pathsep.join([*sys.path, str(Path(data_fuzz.__file__).parent)])
    ended = warm_python.run(
        [sys.executable, data_fuzz.__file__, str(folder), str(count), str(seed)],
        capture_output=True,
        timeout=SECONDS,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    now = folder / "now"
    at = now.read_text() if now.exists() else "making the subjects"
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}\nat {at}"
    assert "'read'" in ended.stdout and "'refused'" in ended.stdout


def test_damaged_files_of_every_reader_give_a_report_or_a_message(tmp_path: Path) -> None:
    fuzz(tmp_path, 200, seed=1)


@pytest.mark.slow
def test_ten_thousand_damaged_files_of_every_reader(tmp_path: Path) -> None:
    fuzz(tmp_path, 10_000, seed=2)
