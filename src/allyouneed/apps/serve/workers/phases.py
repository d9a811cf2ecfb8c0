"""What the workers of a server tell each other: the phase of each, as `/readyz` reports it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the folder of phases and, for prometheus_client, of metrics


class Phases:
    """Pid and phase of each of `count` workers, in files of a folder. `own`: of the worker that publishes."""

    def __init__(self, folder: Path, count: int, own: int = 0) -> None:
        self.folder, self.count, self.own = folder, count, own

    def publish(self, phase: str) -> None:
        self.write(self.own, phase)

    def write(self, worker: int, phase: str, pid: int | None = None) -> None:
        new = self.folder / f"worker-{worker}.{os.getpid()}"
        new.write_text(json.dumps({"pid": pid or os.getpid(), "status": phase}))
        new.replace(self.folder / f"worker-{worker}")

    def read(self) -> list[dict[str, Any]]:
        found = []
        for worker in range(self.count):
            try:
                found.append(json.loads((self.folder / f"worker-{worker}").read_text()))
            except (OSError, ValueError):
                found.append({"pid": None, "status": "starting"})
        return found
