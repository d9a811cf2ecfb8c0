"""Limits of the system: open files, the size of a file. One message and exit code 2, and no half-written output."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hostile_files
from allyouneed.cli import system_error
from allyouneed.files import write_file, write_folder


def limited(limit: int, soft: int, hard: int, *command: str) -> subprocess.CompletedProcess[str]:
    def lower() -> None:
        resource.setrlimit(limit, (soft, hard))

    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, preexec_fn=lower, check=False
    )


@pytest.mark.parametrize("command", [("translate", "hello"), ("train", "recipe.yaml"), ("serve", "model")])
def test_too_few_open_files_are_one_message(command: tuple[str, ...]) -> None:
    found = limited(resource.RLIMIT_NOFILE, 16, 16, "-m", "allyouneed", *command)
    assert found.returncode == 2, found.stderr
    assert found.stderr == "allyouneed: this process may open 16 files; it needs 64 (ulimit -n 64)\n"


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    script = (
        "import resource; from allyouneed.runtime.process import allow_open_files; allow_open_files(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert limited(resource.RLIMIT_NOFILE, 32, 128, "-c", script).stdout == "(128, 128)\n"


def test_a_file_that_may_not_grow_is_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    hostile_files.foreign(tmp_path / "model")
    command = ("-m", "allyouneed", "export", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "hf")
    found = limited(resource.RLIMIT_FSIZE, 1024, 1024, *command)
    assert found.returncode == 2, found.stderr
    assert "File too large; files may not be larger here (ulimit -f)" in found.stderr
    assert found.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_errors_of_the_system_are_recognised_in_libraries_too() -> None:
    full = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert system_error(full) == "the output: No space left on device"
    assert "ulimit -n" in (system_error(OSError(errno.EMFILE, "Too many open files", "a")) or "")
    assert system_error(OSError(errno.EIO, "Input/output error")) is None
    assert system_error(ValueError("os error")) is None


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_an_error_of_writing_names_the_file(write: Callable[..., None], tmp_path: Path) -> None:
    def fill(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as caught:
        write(tmp_path / "out", fill)
    assert system_error(caught.value) == f"{tmp_path / 'out'}: No space left on device"
    assert not any(tmp_path.iterdir())
