"""How far a request goes: what bench/serve/walk.py counts stays within limits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import warm_python

ROOT = Path(__file__).parents[3]
CALLS, FILES, RECORDS = 509, 66, 5


def test_a_chat_completion_of_three_tokens_passes_few_calls_files_and_records() -> None:
    """In a process of its own: counting changes the profile function of threads."""
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = warm_python.run(
        [sys.executable, str(ROOT / "bench" / "serve" / "walk.py"), "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["records"]) <= RECORDS, found["records"]
    assert found["calls"] <= CALLS and found["files"] <= FILES
