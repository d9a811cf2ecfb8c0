"""Console output while training: a live progress line on a terminal, plain lines otherwise."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from allyouneed.errors import printable
from allyouneed.training.planning.memory import format_bytes, memory_in_use
from allyouneed.training.step import StepResult

PLAIN_EVERY = 10.0  # seconds between plain lines
UNITS = {"tokens": "tok", "target tokens": "tok"}
WINDOW = 50  # steps to average the displayed figures over


class Reporter:
    """All console output of training."""

    def __init__(self, console: Console | None = None, loss_unit: str = "tokens", perplexity: bool = True) -> None:
        """`loss_unit`: what the loss is averaged over; `perplexity`: whether to show it."""
        self.loss_unit, self.perplexity = loss_unit, perplexity
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._recent: deque[tuple[float, StepResult]] = deque(maxlen=WINDOW)
        self._total = 0
        self._device = torch.device("cpu")
        self._task: Any = None
        self._printed = 0.0
        self._pause = 0.0

    def print(self, text: str) -> None:
        self.console.print(printable(text), markup=False)

    def counter(self, what: str) -> Callable[[int], None]:
        """A callback for counted work that prints progress now and then."""
        printed = time.monotonic()

        def count(number: int) -> None:
            nonlocal printed
            if time.monotonic() - printed >= PLAIN_EVERY:
                printed = time.monotonic()
                self.print(f"{what}: {number:,}")

        return count

    def begin(self, step: int, total: int, device: torch.device) -> None:
        self._total, self._device = total, device
        self._recent.clear()
        self._printed = time.monotonic()
        if self.console.is_terminal:
            columns = (
                TextColumn("step {task.completed:,}/{task.total:,}"),
                BarColumn(None),
                TextColumn("{task.fields[text]}"),
            )
            self._live = Progress(*columns, console=self.console, refresh_per_second=4)
            self._task = self._live.add_task("train", total=total, completed=step, text="")
            self._live.start()

    def step(self, result: StepResult) -> None:
        now = time.monotonic()
        self._recent.append((now - self._pause, result))
        if self._live is not None:
            self._live.update(self._task, completed=result.step, text=self._figures())
        elif now - self._printed >= PLAIN_EVERY or result.step in (1, self._total):
            self._printed = now
            self.print(f"step {result.step:,}/{self._total:,}  {self._figures()}")

    def pause(self, seconds: float) -> None:
        """Exclude time spent on something other than training from the speed."""
        self._pause += seconds

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def speed(self) -> float | None:
        """Labels per second."""
        if len(self._recent) < 2:
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        tokens = sum(result.tokens for _, result in list(self._recent)[1:])
        return tokens / seconds if seconds > 0 else None

    def _figures(self) -> str:
        good = [m for _, m in self._recent if m.finite]
        last = self._recent[-1][1]
        parts = []
        if good:
            tokens = sum(m.tokens for m in good)
            loss = sum(m.loss * m.tokens for m in good) / tokens
            plain = sum(m.plain * m.tokens for m in good) / tokens
            parts += [f"loss {loss:.3f}", *([f"ppl {math.exp(min(plain, 20)):.2f}"] if self.perplexity else [])]
        parts.append(f"lr {last.rate:.2e}")
        speed = self.speed()
        if speed is not None:
            per_step = (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)
            parts.append(f"{speed:,.0f} {UNITS.get(self.loss_unit, self.loss_unit)}/s")
            parts.append(f"{clock((self._total - last.step) * per_step)} left")
        held = memory_in_use(self._device)
        if held is not None:
            parts.append(format_bytes(held))
        return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
