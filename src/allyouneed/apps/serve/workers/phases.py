"""What the workers of a server tell each other and their supervisor: the phase of each, as `/readyz` reports it, and
that it is alive."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the folder of phases and, for prometheus_client, of metrics


SILENT = 20.0  # seconds without a sign of life after which a worker is not ready


class Phases:
    """Pid and phase of each of `count` workers, in files of a folder. `own`: of the worker that publishes."""

    def __init__(self, folder: Path, count: int, own: int = 0) -> None:
        self.folder, self.count, self.own = folder, count, own

    def publish(self, phase: str, since: float | None = None) -> None:
        """A sign of life. `since`: when this worker's engine has stopped to get on, if it has."""
        self.write(self.own, {"pid": os.getpid(), "status": phase, "beat": since or time.monotonic()})

    def write(self, worker: int, content: dict[str, Any]) -> None:
        new, known = self.folder / f"worker-{worker}.{os.getpid()}", self.folder / f"worker-{worker}"
        try:
            new.write_text(json.dumps(content))
            new.replace(known)
        except OSError:  # a full disk: none is better than an old one, by which the supervisor would end the worker
            known.unlink(missing_ok=True)

    def silence(self, worker: int, pid: int) -> float:
        """For how many seconds this process has not got on."""
        found = self._read(worker)
        return time.monotonic() - found["beat"] if found["pid"] == pid and "beat" in found else 0.0

    def read(self) -> list[dict[str, Any]]:
        found = []
        for worker in range(self.count):
            one = self._read(worker)
            silence = time.monotonic() - one.pop("beat", time.monotonic())
            if one["status"] == "ready" and silence > SILENT:
                one["status"] = f"not responding for {silence:.0f} s"
            found.append(one)
        return found

    def _read(self, worker: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / f"worker-{worker}").read_text())
        except (OSError, ValueError):
            return {"pid": None, "status": "starting"}
        return found
