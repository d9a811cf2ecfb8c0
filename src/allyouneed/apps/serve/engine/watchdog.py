"""Whether the engine loops of a process still get on: a step may hang (in a driver, a lock, a collective operation)
while HTTP is answered as ever."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from allyouneed.apps.serve.errors import log, log_failure

if TYPE_CHECKING:
    from threading import Thread

    from allyouneed.apps.serve.engine.registry import ModelRegistry
    from allyouneed.apps.serve.workers.phases import Phases

BEAT = 1.0  # seconds between two checks


@contextmanager
def watched(registry: ModelRegistry, phases: Phases | None) -> Iterator[None]:
    """Inside, `registry` is checked every second, in a task of the running event loop, and published in `phases`."""
    task = asyncio.create_task(_watch(Watchdog(registry, phases)))
    try:
        yield
    finally:
        task.cancel()


async def _watch(dog: Watchdog) -> None:
    while True:
        await asyncio.sleep(BEAT)
        try:
            dog.check(time.monotonic())
        except Exception as error:
            log_failure(error, "the watchdog failed")


class Watchdog:
    """A model is stuck if its step takes longer than `limits.step_seconds`, or its engine loop has ended."""

    def __init__(self, registry: ModelRegistry, phases: Phases | None = None) -> None:
        self.registry, self.phases, self.limit = registry, phases, registry.settings.limits.step_seconds
        self.stuck: set[str] = set()

    def check(self, now: float) -> None:
        """Tell the registry, the log and the metrics, and other processes that this one is alive."""
        since: dict[str, float] = {}
        for entry in self.registry.entries.values():
            loop = getattr(entry.model, "loop", None)  # models of another process have none
            if loop is None:
                continue
            begun = loop.busy_since
            is_stuck = begun is not None and (now - begun > self.limit or not loop.thread.is_alive())
            self.registry.metrics.stuck.labels(entry.name).set(now - begun if is_stuck else 0.0)
            if is_stuck:
                since[entry.name] = begun
                if entry.name not in self.stuck:
                    log.error("%s\n%s", self.describe(entry.name, loop.thread, now - begun), _stack(loop.thread))
        for name in self.stuck - set(since):
            log.warning("the engine of %s continues", name)
        self.stuck = set(since)
        texts = [self.describe(n, self.registry.entries[n].model.loop.thread, now - at) for n, at in since.items()]
        registry = self.registry
        registry.stuck, registry.stuck_since = next(iter(texts), ""), min(since.values(), default=None)
        if self.phases is not None:
            self.phases.publish(registry.phase, registry.stuck_since)

    def describe(self, name: str, thread: Thread, seconds: float) -> str:
        if not thread.is_alive():
            return f"the engine of {name} has ended"
        return f"a step of {name} has taken {seconds:.0f} s so far, the limit is {self.limit:g}"


def _stack(thread: Thread) -> str:
    """Where the thread is; no values."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))
