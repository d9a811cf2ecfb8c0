"""Read somebody else's file in a process of its own that cannot take much memory or time: if it tries, the process ends
and no test does."""

from __future__ import annotations

import sys
from pathlib import Path

import warm_python

MEMORY, SECONDS = 3 << 30, 60  # of addresses: torch itself maps about half of it
READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from allyouneed.errors import UserError
from allyouneed.interop.load import load
try:
    load(sys.argv[1])
except UserError as error:
    print(error)
"""


def load_within_bounds(path: Path) -> str:
    """Why the folder or file is refused; empty where it is read."""
    ended = warm_python.run(
        [sys.executable, "-c", READ, str(path), str(MEMORY)], capture_output=True, timeout=SECONDS, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return str(ended.stdout).strip()
