"""Values inside a model, offered by the parts under names: a probe records or replaces them (apps/inspect/inside).

Stacks, blocks, embeddings and heads offer their inputs and outputs, so every part has at least its output. A part with
internals worth seeing offers them where it computes them:

    q = observe(self, "q", q)                       # (batch, heads, time, head_width)
    v = observe(self, "v", v)                       # what a mixer sums: heads = M v
    y = observe(self, "heads", y)                   # the sums, before gates and the output projection
    changed = offer(self, "weights", lambda: …)     # not needed for the output: computed only if somebody asks
    show(self, "mask", lambda: …)                   # the same, for what follows from other values: never changed

Without a probe, each call costs one comparison. A probe belongs to one thread: models that other threads run at the
same time are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Protocol

from torch import Tensor

MakeValue = Callable[[], Tensor]


class Probe(Protocol):
    def observe(self, part: Any, name: str, value: Any) -> Any:
        """The value to go on with. `name`: "" for the output of the part."""

    def offer(self, part: Any, name: str, make: MakeValue) -> Tensor | None:
        """The value to use instead of the part's own computation; None: no change."""

    def show(self, part: Any, name: str, make: MakeValue) -> None: ...

    def call(self, part: Any, x: Any, context: Any) -> None:
        """The part is about to be called with this input."""

    def enter_block(self, stack: Any, number: int, stream: Any) -> Any: ...

    def leave_block(self, stack: Any, number: int, stream: Any) -> Any: ...

    def rename(self, part: Any, name: str) -> None:
        """The next call of this part has this name."""


_probe: ContextVar[Probe | None] = ContextVar("probe", default=None)
_active = 0  # probes in all threads
_lock = Lock()


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Run models of this thread under a probe."""
    global _active
    with _lock:
        _active += 1
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)
        with _lock:
            _active -= 1


def current_probe() -> Probe | None:
    """The probe that watches this thread."""
    return _probe.get() if _active else None


def is_observed() -> bool:
    return current_probe() is not None


def observe(part: Any, name: str, value: Any) -> Any:
    return value if not _active or (probe := _probe.get()) is None else probe.observe(part, name, value)


def offer(part: Any, name: str, make: MakeValue) -> Tensor | None:
    return None if not _active or (probe := _probe.get()) is None else probe.offer(part, name, make)


def show(part: Any, name: str, make: MakeValue) -> None:
    if _active and (probe := _probe.get()) is not None:
        probe.show(part, name, make)


def enter_block(stack: Any, number: int, stream: Any) -> Any:
    return stream if not _active or (probe := _probe.get()) is None else probe.enter_block(stack, number, stream)


def leave_block(stack: Any, number: int, stream: Any) -> Any:
    return stream if not _active or (probe := _probe.get()) is None else probe.leave_block(stack, number, stream)


def rename(part: Any, name: str) -> None:
    if _active and (probe := _probe.get()) is not None:
        probe.rename(part, name)
