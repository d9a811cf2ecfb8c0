"""Isolation of requests from each other's failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def isolate(fail: Callable[[Exception], None]) -> Iterator[None]:
    """An error inside goes to `fail`, which fails the requests it concerns; the caller continues with the others.
    Interrupts (Ctrl-C) pass."""
    try:
        yield
    except Exception as error:
        fail(error)
