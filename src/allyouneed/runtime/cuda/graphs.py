"""CUDA graph capture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock, _users, _was_enabled = threading.Lock(), 0, False


@contextmanager
def pause_gc() -> Iterator[None]:
    """No garbage collection while any thread is in here. Freeing an old graph or its memory invalidates a capture in
    progress, and a collection would delay the next launch while a GPU is busy."""
    global _users, _was_enabled
    with _lock:
        if _users == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _was_enabled:
                gc.enable()


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record the kernels launched in here instead of running them. Other threads may use the GPU meanwhile."""
    with pause_gc(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        yield
