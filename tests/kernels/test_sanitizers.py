"""The native interpreter under AddressSanitizer and UndefinedBehaviorSanitizer: no input makes it leave its memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allyouneed.kernels.cpu import build as native

SUPPORT = Path(__file__).parent.parent / "support"


def sanitized(tmp_path: Path, argument: str) -> subprocess.CompletedProcess[str]:
    """native_fuzz.py in a process whose memory is all allocated by the sanitizer."""
    compiler = native.compiler()
    runtimes = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        runtimes.append(found.stdout.strip())
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]),
    }
    command = [sys.executable, str(SUPPORT / "native_fuzz.py"), argument]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_no_input_makes_the_interpreter_leave_its_memory(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        assert native.wait_for_build() is None
        return
    caught = sanitized(tmp_path, "canary")
    assert caught.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in caught.stderr, caught.stderr[-2000:]
    found = sanitized(tmp_path, "400")
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.startswith("400 of each kind")
