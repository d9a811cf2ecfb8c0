"""CUDA graph capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from allyouneed.runtime.process import pause_gc


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record the kernels launched in here instead of running them. Other threads may use the GPU meanwhile."""
    with pause_gc(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        yield
