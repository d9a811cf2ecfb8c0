"""All jobs of gpu.py in one call: they compile side by side, each in a process of its own, and measure one after
another. What they say is printed as it comes; at the end all tables."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

GRACE = 5  # seconds to end in


def session(script: Path, given: argparse.Namespace) -> None:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {"same": ["same", "--fusions"], "gpt2": ["gpt2", "--steps", "12", "--turns", "3", "--profile"]}
        if given.fusions:
            jobs["gpt2"].append("--fusions")
            jobs["kernels"] = ["kernels"]
        if given.pairs is not None:
            jobs["translation"] = ["translation", "--pairs", given.pairs, "--steps", "40", "--turns", "3", "--profile"]
        meeting = folder / "meeting"
        meeting.mkdir()
        # `same` measures nothing, so no other job waits for it
        waits = ["--meet", str(meeting), str(len(jobs) - 1), "--patience", str(given.limit * 0.7)]
        children: dict[str, subprocess.Popen[str]] = {}
        # each of them would compile with as many processes as there are cores
        around = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 2) // 3)), **os.environ}
        for job, options in jobs.items():
            command = [sys.executable, str(script), *options, "--save", str(folder / f"{job}.md"), *waits]
            children[job] = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=around,
            )
        threads = [threading.Thread(target=_repeat, args=(job, child, begin)) for job, child in children.items()]
        for thread in threads:
            thread.start()
        _wait(children, meeting, begin + given.limit)
        for thread in threads:
            thread.join(GRACE)
        print(f"\nafter {time.monotonic() - begin:.0f} s\n")
        for job, child in children.items():
            found = folder / f"{job}.md"
            print(f"## {job}{'' if child.returncode == 0 else f' (ended with {child.returncode})'}\n")
            print(found.read_text(encoding="utf-8") if found.exists() else "nothing was measured\n")
    if any(child.returncode for child in children.values()):
        sys.exit(1)


def _repeat(job: str, child: subprocess.Popen[str], begin: float) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        print(f"{time.monotonic() - begin:5.0f} {job}: {line}", end="", flush=True)


def _wait(children: dict[str, subprocess.Popen[str]], meeting: Path, end: float) -> None:
    """Until all have ended, or the time is over. Who ends without having met the others is not waited for."""
    gone: set[str] = set()
    while len(gone) < len(children) and time.monotonic() < end:
        for job, child in children.items():
            if job not in gone and child.poll() is not None:
                gone.add(job)
                if child.returncode and job != "same":
                    tempfile.mkdtemp(dir=meeting)
        time.sleep(0.2)
    for child in children.values():
        if child.poll() is None:  # it has children that compile
            os.killpg(child.pid, signal.SIGTERM)
    for child in children.values():
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
