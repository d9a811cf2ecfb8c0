"""File locks and flushed folders, on systems that have them and on those that do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from allyouneed.files import system

OTHER = "import sys; from allyouneed.files.system import lock; print(lock(open(sys.argv[1], 'r+b')))"


def lock_elsewhere(path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", OTHER, str(path)], env=environment, capture_output=True, text=True)
    return done.stdout.strip()


def test_one_process_at_a_time_has_the_lock_until_it_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert system.lock(file) and lock_elsewhere(path) == "False"
    assert lock_elsewhere(path) == "True"


def test_without_fcntl_windows_locks_are_tried_and_then_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "lock").open("wb") as file:
        monkeypatch.setitem(sys.modules, "msvcrt", None)
        assert system.lock(file)
        tried = list[tuple[int, int]]()

        def locking(handle: int, mode: int, count: int) -> None:
            tried.append((os.lseek(handle, 0, os.SEEK_CUR), count))
            if len(tried) > 1:
                raise OSError("taken")

        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
        assert system.lock(file) and not system.lock(file)
        assert tried == [(1 << 40, 1)] * 2 and file.tell() == 0


def test_folders_are_not_flushed_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    flushed = list[int]()
    monkeypatch.setattr(system.os, "fsync", flushed.append)
    system.sync(tmp_path), system.sync(tmp_path / "file")
    assert len(flushed) == 2
    monkeypatch.setattr(system, "os", SimpleNamespace(**{**vars(os), "name": "nt"}))
    system.sync(tmp_path), system.sync(tmp_path / "file")
    assert len(flushed) == 3
