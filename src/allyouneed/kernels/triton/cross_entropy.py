"""Cross-entropy of a chunk of logits, and its gradient written over them.

A row is read once for Σ e^(score − the label's), and again, from the end, to put the gradient there. The label's own
score makes the sum safe without a search for the largest: it is at least 1, and where it overflows, which a loss of 88
takes, the row is summed once more by its largest. Only so many rows are under way at a time that the second reading
finds them in the GPU's cache. The plain definition is `judged` in nn/ops/cross_entropy.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # a GPU's exponential is that of 2


class Cut(NamedTuple):
    """How many scores of a row are looked at together, and by how many warps; how many rows a multiprocessor has under
    way."""

    piece: int
    warps: int
    rows: int


CUT = Cut(8192, 16, 2)  # bench/train_gpu.py kernels


@triton.jit
def _loaded(here, bias, at, vocab, PART: tl.constexpr, BIAS: tl.constexpr, AGAIN: tl.constexpr):
    """PART: the row may end among them. AGAIN: they will be read again, so they shall stay near."""
    kept: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    if PART:
        x = tl.load(here + at, mask=at < vocab, other=0.0, eviction_policy=kept).to(tl.float32)
    else:
        x = tl.load(here + at, eviction_policy=kept).to(tl.float32)
    if BIAS:
        x += tl.load(bias + at, mask=at < vocab, other=0.0).to(tl.float32)
    return x


@triton.jit
def _capped(x, at, vocab, cap, PART: tl.constexpr, CAP: tl.constexpr):
    """Beyond the row scores are −∞."""
    if CAP:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
    if PART:
        x = tl.where(at < vocab, x, float("-inf"))
    return x


@triton.jit
def _scores(here, bias, at, vocab, cap, PART: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr):
    return _capped(_loaded(here, bias, at, vocab, PART, BIAS, True), at, vocab, cap, PART, CAP)


@triton.jit
def _summed(
    here, bias, reference, vocab, cap,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    """Of a row: Σ 2^(score·log2 e − reference), and the sum of all scores, where it is asked for."""
    masses = tl.zeros((PIECE,), tl.float32)
    sums = tl.zeros((PIECE,), tl.float32)
    for piece in range(WHOLE):
        x = _scores(here, bias, piece * PIECE + tl.arange(0, PIECE), vocab, cap, False, BIAS, CAP)
        masses += tl.exp2(x * LOG2E - reference)
        if SMOOTH:
            sums += x
    mass, total = tl.sum(masses, 0), tl.sum(sums, 0)
    if TAIL > 0:
        at = WHOLE * PIECE + tl.arange(0, TAIL)
        x = _scores(here, bias, at, vocab, cap, True, BIAS, CAP)
        mass += tl.sum(tl.exp2(x * LOG2E - reference), 0)
        if SMOOTH:
            total += tl.sum(tl.where(at < vocab, x, 0.0), 0)
    return mass, total


@triton.jit
def _highest(
    here, bias, vocab, cap,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    highest = tl.full((PIECE,), float("-inf"), tl.float32)
    for piece in range(WHOLE):
        x = _scores(here, bias, piece * PIECE + tl.arange(0, PIECE), vocab, cap, False, BIAS, CAP)
        highest = tl.maximum(highest, x)
    found = tl.max(highest, 0)
    if TAIL > 0:
        x = _scores(here, bias, WHOLE * PIECE + tl.arange(0, TAIL), vocab, cap, True, BIAS, CAP)
        found = tl.maximum(found, tl.max(x, 0))
    return found


@triton.jit
def _sloped(
    here, bias, start, label, log_sum, vocab, width, smoothing, cap,
    SIZE: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """The gradient by these scores of a row, put in their place."""
    at = start + tl.arange(0, SIZE)
    x = _loaded(here, bias, at, vocab, PART, BIAS, False)
    slope = tl.exp2(_capped(x, at, vocab, cap, PART, CAP) * LOG2E - log_sum)
    if SMOOTH:
        slope -= smoothing / vocab
    if (label >= start) & (label < start + SIZE):
        slope -= tl.where(at == label, 1 - smoothing, 0.0)
    if CAP:
        slope *= 4 * tl.sigmoid(2 * x / cap) * tl.sigmoid(-2 * x / cap)  # 1 − tanh², near 0 to the last digit too
    if PART:
        slope = tl.where(at < vocab, slope, 0.0).to(here.dtype.element_ty)
        tl.store(here + at, slope, mask=at < width, eviction_policy="evict_first")
    else:
        tl.store(here + at, slope.to(here.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _rows(
    logits, labels, bias, totals, plains, rows, vocab, width, smoothing, cap, ignore,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """WHOLE pieces of a row are all scores; then come TAIL places, in which scores and row end."""
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        here = logits + row * width
        label = tl.load(labels + row).to(tl.int32)
        if label == ignore:
            tl.store(totals + row, 0.0)
            tl.store(plains + row, 0.0)
            if GRADIENT:
                nothing = tl.zeros((PIECE,), logits.dtype.element_ty)
                for start in range(0, width, PIECE):
                    at = start + tl.arange(0, PIECE)
                    tl.store(here + at, nothing, mask=at < width)
        else:
            chosen = LOG2E * _scores(here, bias, label, vocab, cap, True, BIAS, CAP)
            high = chosen
            mass, even = _summed(here, bias, high, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP, SMOOTH)
            if mass == float("inf"):
                high = LOG2E * _highest(here, bias, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP)
                mass, even = _summed(here, bias, high, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP, SMOOTH)
            log_mass = tl.log2(mass)
            plain = (high - chosen + log_mass) / LOG2E
            total = plain
            if SMOOTH:
                total = (1 - smoothing) * plain + smoothing * ((high + log_mass) / LOG2E - even / vocab)
            tl.store(totals + row, total)
            tl.store(plains + row, plain)
            if GRADIENT:
                log_sum = high + log_mass
                if TAIL > 0:  # what was read last is nearest
                    _sloped(
                        here, bias, WHOLE * PIECE, label, log_sum, vocab, width, smoothing, cap,
                        TAIL, True, BIAS, CAP, SMOOTH,
                    )  # fmt: skip
                for turn in range(WHOLE):
                    _sloped(
                        here, bias, (WHOLE - 1 - turn) * PIECE, label, log_sum, vocab, width, smoothing, cap,
                        PIECE, False, BIAS, CAP, SMOOTH,
                    )  # fmt: skip


def judge(
    logits: Tensor, labels: Tensor, ignore: int, bias: Tensor | None, smoothing: float, cap: float | None,
    vocab: int, totals: Tensor, plains: Tensor, gradient: bool = True,
) -> None:  # fmt: skip
    """Of logits (rows, width), of which the first `vocab` are scores: the loss and the plain loss of each row into
    `totals` and `plains` (rows, of fp32), and over the logits, if asked, the gradient of the loss by them, which is 0
    beyond the scores and where the label is `ignore`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous() and len(labels) == rows
    assert totals.is_contiguous() and plains.is_contiguous() and totals.dtype == plains.dtype == torch.float32
    piece = min(CUT.piece, triton.next_power_of_2(width))
    warps = max(1, min(CUT.warps, piece // 256))
    whole = vocab // piece
    tail = width - whole * piece
    _rows[(min(rows, CUT.rows * _processors(logits.device)),)](
        logits, labels, logits if bias is None else bias, totals, plains, rows, vocab, width,
        smoothing, 1.0 if cap is None else cap, ignore, PIECE=piece, WHOLE=whole,
        TAIL=triton.next_power_of_2(tail) if tail else 0, BIAS=bias is not None, CAP=cap is not None,
        SMOOTH=smoothing > 0, GRADIENT=gradient, num_warps=warps, maxnreg=_registers(CUT.rows, warps),
    )  # fmt: skip


def _registers(rows: int, warps: int) -> int:
    """Of a thread, so that as many rows fit on a multiprocessor, which has 65,536."""
    return min(255, 65536 // (rows * warps * 32) // 8 * 8)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
