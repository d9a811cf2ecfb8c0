"""What a person sees while training: a live line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from allyouneed.train.memory import in_use, size
from allyouneed.train.step import Measured

PLAIN_EVERY = 10.0  # seconds between plain lines
UNITS = {"tokens": "tok", "target tokens": "tok"}
WINDOW = 50  # steps the shown figures are averaged over


class Reporter:
    """Everything training says goes through here."""

    def __init__(self, console: Console | None = None, counted: str = "tokens", perplexity: bool = True) -> None:
        """`loss_unit`: what the loss is a mean over; `perplexity`: the loss has one."""
        self.loss_unit, self.perplexity = counted, perplexity
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._recent: deque[tuple[float, Measured]] = deque(maxlen=WINDOW)
        self._total = 0
        self._device = torch.device("cpu")
        self._task: Any = None
        self._said = 0.0
        self._pause = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def counter(self, what: str) -> Callable[[int], None]:
        """A callback for work that is counted: says how far it is, now and then."""
        said = time.monotonic()

        def count(number: int) -> None:
            nonlocal said
            if time.monotonic() - said >= PLAIN_EVERY:
                said = time.monotonic()
                self.say(f"{what}: {number:,}")

        return count

    def begin(self, step: int, total: int, device: torch.device) -> None:
        self._total, self._device = total, device
        self._recent.clear()
        self._said = time.monotonic()
        if self.console.is_terminal:
            columns = (
                TextColumn("step {task.completed:,}/{task.total:,}"),
                BarColumn(None),
                TextColumn("{task.fields[text]}"),
            )
            self._live = Progress(*columns, console=self.console, refresh_per_second=4)
            self._task = self._live.add_task("train", total=total, completed=step, text="")
            self._live.start()

    def step(self, measured: Measured) -> None:
        now = time.monotonic()
        self._recent.append((now - self._pause, measured))
        if self._live is not None:
            self._live.update(self._task, completed=measured.step, text=self._figures())
        elif now - self._said >= PLAIN_EVERY or measured.step in (1, self._total):
            self._said = now
            self.say(f"step {measured.step:,}/{self._total:,}  {self._figures()}")

    def pause(self, seconds: float) -> None:
        """Time spent on something else than training, not to be counted in its speed."""
        self._pause += seconds

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def speed(self) -> float | None:
        """What is labelled, per second."""
        if len(self._recent) < 2:
            return None
        seconds = self._recent[-1][0] - self._recent[0][0]
        tokens = sum(measured.tokens for _, measured in list(self._recent)[1:])
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
        held = in_use(self._device)
        if held is not None:
            parts.append(size(held))
        return "  ".join(parts)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
