"""Ctrl-C and SIGTERM: the first asks to stop after the current step, the second stops at once. A process of many hears
Ctrl-C and then torchrun, which wants the same and ends in the end who does not listen: there the second is no news."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """Training was asked to stop, has saved, and can go on. Uncaught, it ends the process with exit code 130."""

    def __init__(self, step: int) -> None:
        super().__init__(130)
        self.step = step


@contextmanager
def not_lost() -> Iterator[None]:
    """Ctrl-C stops what is done inside at once. Where Python cannot be interrupted, which is often the case while
    something is compiled, it forgets about it; then it stops at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


class StopRequest:
    """Inside `with`, signals set `asked`; elsewhere they do what they did. Only the main thread hears signals."""

    def __init__(self, say: Callable[[str], None], alone: bool = True) -> None:
        self.asked = False
        self._say, self._alone = say, alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._alone:
            self._restore()  # the next one is heard by whoever heard it before: Python's own, which stops at once
            self._say("stopping after this step and saving; once more stops at once")
        elif not self.asked:
            self._say("stopping after this step and saving")
        self.asked = True

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
