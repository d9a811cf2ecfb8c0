"""log.jsonl: a line for every step and every validation, losses in full precision. No step twice, none missing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Log:
    """Append lines; a line that cannot be written (a full disk) waits for the next time."""

    def __init__(self, path: Path | None, step: int) -> None:
        """Open the log of a run that goes on after `step`: what a killed run wrote beyond it is forgotten. Without a
        path nothing is kept: another process of the run writes it."""
        self.path = path
        self._waiting: list[str] = []
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Forget everything after this step, and a line cut off in the middle."""
        self._waiting = [line for line in self._waiting if json.loads(line)["step"] <= step]
        if self.path is None or not self.path.exists():
            return
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or _step_of(line) > step:
                    break
                end += len(line)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)

    def write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            self._waiting.append(json.dumps(entry, ensure_ascii=False) + "\n")

    def flush(self, sync: bool = False) -> None:
        """Hand all lines to the system; `sync`: to the disk."""
        if self.path is None or (not self._waiting and not sync):
            return
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("".join(self._waiting))
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, size)  # half a line must not stay
                return
        except OSError:
            return
        self._waiting = []


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # damaged: it and what follows cannot be trusted
