"""Kernels of training alone, cut in several ways (gpu.py kernels); the first way of each should be the fastest. Reading
everything once and writing it once is the least that can be done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from allyouneed.nn.batch import IGNORE
from allyouneed.nn.ops import cross_entropy as chunked
from allyouneed.nn.ops.attention import short_rows
from allyouneed.runtime.cuda.bias_gradients import NORM_ROWS, ROWS
from bench.train.turns import DEVICE, measuring, tell, timed

CALLS = 5  # of a kernel in one graph


@dataclass
class Family:
    """A kernel, where its module keeps how it is cut, and which cuts to try."""

    name: str
    module: Any
    constant: str
    cuts: Sequence[tuple[Any, ...]]
    bytes: int
    work: Callable[[], object]

    def cut(self, values: tuple[Any, ...]) -> None:
        kind = type(getattr(self.module, self.constant))
        setattr(self.module, self.constant, kind(*values))

    def choose_backend(self) -> None:
        """Cut it in the fastest way; by the least of several times, for others may be at work."""
        times: dict[tuple[Any, ...], float] = {}
        for cut in self.cuts:
            self.cut(cut)
            try:
                self.work()
                times[cut] = min(_milliseconds(self.work) for _ in range(15))
            except Exception as error:
                print(f"{self.name} {cut} failed: {str(error)[:300]}", flush=True)
        best = min(times, key=times.__getitem__, default=self.cuts[0])
        self.cut(best)
        print(f"{self.name}: {best}; " + ", ".join(f"{cut} {time:.3f}" for cut, time in times.items()), flush=True)


def _milliseconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def families(wide: bool) -> list[Family]:
    """`wide`: many cuts."""
    from allyouneed.kernels.triton import cross_entropy as crossentropy
    from allyouneed.kernels.triton import fused_backward
    from allyouneed.kernels.triton.training import row_attention

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    rows, vocab, tokens, width = 8192, 50304, 32 * 1024, 768
    logits, labels = drawn(rows, vocab), torch.randint(0, vocab, (rows,), device=DEVICE)
    losses = torch.empty(2, rows, device=DEVICE)
    cross_entropy = partial(crossentropy.cross_entropy_rows, logits, labels, IGNORE, None, 0.0, None, vocab, *losses)
    x, gradient = drawn(tokens, 4 * width), drawn(tokens, 4 * width)
    heads = [drawn(32, 1024, 12, 64).transpose(1, 2) for _ in range(3)]
    stream = [drawn(tokens, width) for _ in range(3)]
    mean, scale, weight = (torch.rand(n, device=DEVICE) for n in (tokens, tokens, width))
    # scores of a piece, warps, rows a multiprocessor has under way
    cuts = [(8192, 16, 2), (16384, 16, 2), (8192, 8, 3), (4096, 8, 3)]
    if wide:
        cuts += [(8192, 16, 1), (16384, 32, 1), (8192, 8, 2), (4096, 8, 4), (2048, 4, 6)]
    squares = [(4, 512, 4), (8, 256, 4), (8, 512, 8), (2, 1024, 4)]  # tokens, features, warps
    whole = [(1, 0, 2), (1, 0, 4), (2, 0, 4), (4, 0, 4), (4, 0, 8), (2, 0, 8)]
    slope = partial(fused_backward.activation_backward, gradient, x, "gelu-tanh", ROWS)
    merge = partial(fused_backward.merge_heads, heads, ROWS)
    norm = partial(fused_backward.layer_norm_backward, *stream, weight, mean, scale, ROWS)
    norm_32 = partial(fused_backward.layer_norm_backward, *stream, weight, mean, scale, 32)
    # transformer-base
    tokens, width = 192 * 128, 512
    added = [drawn(tokens, width) for _ in range(3)]
    mean, scale, gain = (torch.rand(n, device=DEVICE) for n in (tokens, tokens, width))
    kept = torch.rand(tokens, width, device=DEVICE) > 0.1
    seed = torch.ones(1, device=DEVICE, dtype=torch.long)
    total = partial(fused_backward.add_norm, *added[:2], gain, seed, 0.1, gain, gain, 1e-5)
    add = partial(fused_backward.add_norm_backward, *added, kept, 1.1, gain, mean, scale, NORM_ROWS)
    add_64 = partial(fused_backward.add_norm_backward, *added, kept, 1.1, gain, mean, scale, ROWS)
    eighths = [(0, 512, 4), (0, 1024, 4), (0, 1024, 8), (0, 512, 2), (0, 2048, 8)]
    sentences = [(1, 0, 4), (2, 0, 4), (4, 0, 4), (4, 0, 8), (8, 0, 8), (2, 0, 2)]
    ahead, back = [(64, 4), (128, 4), (128, 8), (32, 4)], [(32, 4), (32, 8), (64, 8), (128, 8), (16, 4)]
    qkv = drawn(192, 128, 3 * width)
    return [
        Family("cross-entropy", crossentropy, "SPLIT", cuts, 2 * logits.nbytes, cross_entropy),
        Family("GELU backward", fused_backward, "ACTIVATION", squares, 3 * x.nbytes, slope),
        Family("merge heads", fused_backward, "MERGE", squares, 6 * heads[0].nbytes, merge),
        Family("layer norm backward", fused_backward, "LAYER_NORM", whole, 4 * stream[0].nbytes, norm),
        Family("the same, sums of 32", fused_backward, "LAYER_NORM", whole, 4 * stream[0].nbytes, norm_32),
        Family("norm of a sum", fused_backward, "SUM_NORM", eighths, 4 * added[0].nbytes + kept.nbytes, total),
        Family("norm of a sum backward", fused_backward, "ADD_NORM", sentences, 5 * added[0].nbytes + kept.nbytes, add),
        Family(
            "the same, sums of 64", fused_backward, "ADD_NORM", sentences, 5 * added[0].nbytes + kept.nbytes, add_64
        ),
        Family("packed rows", row_attention, "FORWARD", ahead, qkv.nbytes + added[0].nbytes, partial(attend, qkv)),
        Family(
            "packed rows backward",
            row_attention,
            "BACK",
            back,
            2 * qkv.nbytes + 2 * added[0].nbytes,
            partial(attend_backward, drawn(192, 8, 128, 64), qkv),
        ),
    ]


@cache
def packed_sentences(rows: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Segments and positions of packed sentences of about ten tokens."""
    starts = torch.rand(rows, time) < 0.1
    starts[:, 0] = True
    segments = starts.cumsum(1)
    first = torch.where(starts, torch.arange(time), 0).cummax(1).values
    return segments.int().to(DEVICE), (torch.arange(time) - first).int().to(DEVICE)


def attend(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    segments, positions = packed_sentences(qkv.shape[0], qkv.shape[1])
    q, k, v = short_rows.split_heads(qkv, [8, 8, 8])
    return short_rows.attend(q, k, v, segments, segments, positions, positions, True, 0.125)


def attend_backward(gradient: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    segments, positions = packed_sentences(qkv.shape[0], qkv.shape[1])
    lse = torch.zeros(gradient.shape[:3], device=DEVICE)
    return short_rows.attend_qkv_backward(gradient, qkv, [8, 8, 8], segments, positions, True, 0.125, lse)


def choose_backend() -> None:
    for family in families(wide=False):
        family.choose_backend()


def kernels(given: argparse.Namespace) -> None:
    tried = families(wide=True)
    ways: list[tuple[str, int, Callable[[], object]]] = []

    def cut(family: Family, values: tuple[Any, ...]) -> Callable[[], object]:
        def work() -> object:
            family.cut(values)
            return family.work()

        return work

    for family in tried:
        ways += [(f"{family.name}, {values}", family.bytes, cut(family, values)) for values in family.cuts]
    logits, labels = tried[0].work.args[:2]  # type: ignore[attr-defined]
    definition = chunked._compiled_chunk_loss()
    ways.append(("the definition, compiled", 2 * logits.nbytes, lambda: definition(logits, labels, None, 0.0, None)))
    ways.append(("a copy of the logits", 2 * logits.nbytes, lambda: torch.neg(logits, out=logits)))
    for name, _, work in list(ways):
        try:
            work()
        except Exception as error:
            print(f"{name} failed: {str(error)[:300]}", flush=True)
            ways = [way for way in ways if way[0] != name]
    lines = ["| | ms | GB/s of one reading and one writing |", "|---|---|---|"]
    with measuring(given):
        for name, count, work in ways:
            graph = torch.cuda.CUDAGraph()  # a launch by Python takes longer than some kernels
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    work()
            _, seconds = timed(lambda graph=graph: int(graph.replay() is None), 8)  # type: ignore[misc]
            each = seconds / 8 / CALLS
            lines.append(f"| {name} | {each * 1e3:.3f} | {count / each / 1e9:,.0f} |")
        tell(lines, given)
