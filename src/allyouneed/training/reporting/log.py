"""log.jsonl: one line per step and per validation, losses in full precision. No step twice, none missing. Also for
TensorBoard, if asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from allyouneed.errors.extras import missing
from allyouneed.training.step import StepResult


class Log:
    """Appends lines; a line that cannot be written (a full disk) is retried at the next flush."""

    def __init__(self, path: Path | None, step: int) -> None:
        """Open the log of a run resumed after `step`; later entries of a killed run are removed. Without a path nothing
        is written: another process does."""
        self.path = path
        self._waiting: list[str] = []
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Remove everything after this step, and a truncated last line."""
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
        """Write pending lines; `sync`: fsync as well."""
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
                os.truncate(self.path, size)  # remove a partial line
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
        return float("inf")  # damaged: drop it and what follows


def step_entry(one: StepResult) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": one.step, "epoch": one.positions[0].epoch, "tokens": one.tokens, "rate": one.rate}
    if not one.finite:
        return entry | {"loss": None, "skipped": "not finite"}
    return entry | {"loss": one.loss, "plain": one.plain, "norm": one.norm}


class TensorBoard:
    """Optional TensorBoard writer."""

    def __init__(self, folder: Any, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("tensorboard", "tensorboard: true") from None
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def step(self, one: StepResult, speed: float | None) -> None:
        figures = {"loss": one.loss, "perplexity": one.perplexity, "rate": one.rate, "norm": one.norm}
        for name, value in (figures | ({"tokens_per_second": speed} if speed else {})).items():
            self.writer.add_scalar(f"train/{name}", value, one.step)

    def valid(self, step: int, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.writer.add_scalar(f"valid/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
