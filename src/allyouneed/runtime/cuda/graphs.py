"""CUDA graphs, and what must not happen meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock, _busy, _collects = threading.Lock(), 0, False


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage is collected while anybody, in any thread, is in here. An old graph or its memory that is given back
    spoils one that is being captured; and while a GPU is kept busy, there is no time for it."""
    global _busy, _collects
    with _lock:
        if _busy == 0:
            _collects = gc.isenabled()
            gc.disable()
        _busy += 1
    try:
        yield
    finally:
        with _lock:
            _busy -= 1
            if _busy == 0 and _collects:
                gc.enable()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is done in here is not done but written down, to be replayed. Other threads may use the GPU meanwhile."""
    with undisturbed(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        yield
