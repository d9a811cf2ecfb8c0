"""Ctrl-C and SIGTERM: the first signal stops after the current step, the second at once. In a multi-process run
torchrun forwards the same signal again and kills processes that do not stop, so a second signal is ignored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(SystemExit):
    """Training was stopped by a signal, has saved, and can be resumed. Uncaught, the exit code is 130."""

    def __init__(self, step: int) -> None:
        super().__init__(130)
        self.step = step


@contextmanager
def reraise_lost_interrupt() -> Iterator[None]:
    """Ctrl-C stops the code inside at once. Where the exception gets lost, as it often does while torch compiles, it is
    raised again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


DEFAULT: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopRequest:
    """Inside `with`, signals set `requested`; afterwards the old handlers are restored. Only in the main thread.

    After an error in one of several processes (`single=False`) they are not: torchrun sends SIGTERM to the others as
    soon as one has died, and would end them before they have reported it."""

    def __init__(self, report: Callable[[str], None], single: bool = True) -> None:
        self.requested = False
        self._report, self._single = report, single
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in DEFAULT:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._single or error[0] is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self.requested = True  # signals have nothing left to stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._single:
            for known, handler in self._before.items():  # of a second signal, which stops at once
                # a shell starts background jobs with SIGINT ignored
                signal.signal(known, DEFAULT[known] if handler is signal.SIG_IGN else handler)
            self._report("stopping after this step and saving; press again to stop at once")
        elif not self.requested:
            self._report("stopping after this step and saving")
        self.requested = True
