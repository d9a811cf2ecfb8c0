"""Seconds of kernels in a captured CUDA graph, and a table of variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


def time_graph(run: Callable[[], Any], turns: int = 40) -> float:
    """The time of one run, captured in a graph and replayed: the median of five measurements."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    taken = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(turns):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / turns)
    return sorted(taken[1:])[2]


class Variant(NamedTuple):
    """What was timed: seconds, the bytes that have to be read and written, the relative error of the result."""

    name: str
    seconds: float
    bytes: int
    error: float


def print_variants(title: str, variants: Sequence[Variant]) -> None:
    print(f"\n{title:50s} {'us':>8s} {'GB/s':>8s}   error")
    for one in variants:
        print(
            f"{one.name:50s} {1e6 * one.seconds:8.2f} {one.bytes / one.seconds / 1e9:8.0f}   {one.error:.1e}",
            flush=True,
        )
