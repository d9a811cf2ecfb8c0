"""CUDA graph capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from allyouneed.runtime.process import pause_gc
from allyouneed.torch_private import end_allocation_to_pool


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record the kernels launched in here instead of running them. Other threads may use the GPU meanwhile. After an
    error the device is usable as before."""
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    random = torch.cuda.get_rng_state()
    try:
        with pause_gc(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        _leave_capture(pool, random)
        raise


def _leave_capture(pool: Any, random: Tensor) -> None:
    """If CUDA itself has invalidated a capture, torch ends it only by halves: the random generator refuses to work
    outside of a capture, and the allocator defers freeing memory until the end of a capture that never comes."""
    device = torch.cuda.current_device()
    fresh = torch.Generator(device=f"cuda:{device}")
    fresh.set_state(random)
    torch.cuda.default_generators[device].graphsafe_set_state(fresh)
    end_allocation_to_pool(device, pool)
