"""Process-wide settings are changed in one module, and context managers restore them."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import allyouneed
from allyouneed.runtime import process

SOURCE = Path(allyouneed.__file__).parent
CALLS = re.compile(
    r"\bgc\.(enable|disable|freeze)|setswitchinterval|set_float32_matmul_precision|set_num_threads|set_num_interop_threads"
    r"|set_stance|set_sync_debug_mode|os\.environ(\[[^]]*\] =|\.setdefault|\.update)|\"OMP_|simplefilter\(\"ignore\"\)"
)


def test_no_other_module_changes_them() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).as_posix() != "runtime/process.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if CALLS.search(line)
    ]
    assert not found


def test_the_switch_interval_and_warning_filters_are_restored() -> None:
    before, filters = sys.getswitchinterval(), list(warnings.filters)
    with process.short_switch_interval():
        assert sys.getswitchinterval() < before
    with process.ignore_warnings():
        warnings.warn("not shown", stacklevel=1)
    assert sys.getswitchinterval() == before and list(warnings.filters) == filters


def test_workers_get_their_threads() -> None:
    environment = process.worker_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3" and "PATH" in environment
