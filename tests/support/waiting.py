"""Waiting for an event: what a test checks never depends on how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 300.0  # seconds after which a test fails: far more than a busy machine needs


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:g} seconds"
        time.sleep(0.005)
