"""Cross-entropy of a chunk of logits, with the gradient written over them.

A row is read once for Σ e^(score − label score), and a second time, from its end, to write the gradient. Using the
label's score as reference avoids a search for the maximum: the sum is at least 1, and if it overflows (a loss above
88), the row is summed again with its maximum. The number of rows in flight is limited so that the second pass hits the
L2 cache. The plain definition is `chunk_loss` in nn/ops/cross_entropy.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)  # GPUs compute exp2


class RowSplit(NamedTuple):
    """Scores per iteration, warps per row, and rows in flight per multiprocessor."""

    piece: int
    warps: int
    rows: int


SPLIT = RowSplit(8192, 16, 2)  # bench/train/gpu.py kernels


@triton.jit
def _load_scores(here, bias, at, vocab, PART: tl.constexpr, BIAS: tl.constexpr, AGAIN: tl.constexpr):
    """PART: the row may end within this piece. AGAIN: keep the data in cache for the second pass."""
    kept: tl.constexpr = "evict_last" if AGAIN else "evict_first"
    if PART:
        x = tl.load(here + at, mask=at < vocab, other=0.0, eviction_policy=kept).to(tl.float32)
    else:
        x = tl.load(here + at, eviction_policy=kept).to(tl.float32)
    if BIAS:
        x += tl.load(bias + at, mask=at < vocab, other=0.0).to(tl.float32)
    return x


@triton.jit
def _soft_cap(x, at, vocab, cap, PART: tl.constexpr, CAP: tl.constexpr):
    """Soft cap; −∞ beyond the row."""
    if CAP:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
    if PART:
        x = tl.where(at < vocab, x, float("-inf"))
    return x


@triton.jit
def _scores(here, bias, at, vocab, cap, PART: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr):
    return _soft_cap(_load_scores(here, bias, at, vocab, PART, BIAS, True), at, vocab, cap, PART, CAP)


@triton.jit
def _sum_exp(
    here, bias, reference, vocab, cap,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr,
):  # fmt: skip
    """Σ 2^(score·log2 e − reference) of a row, and the sum of its scores if SMOOTH."""
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
def _store_gradient(
    here, bias, start, label, log_sum, vocab, width, smoothing, cap,
    SIZE: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Write the gradient over these scores of a row."""
    at = start + tl.arange(0, SIZE)
    x = _load_scores(here, bias, at, vocab, PART, BIAS, False)
    grad = tl.exp2(_soft_cap(x, at, vocab, cap, PART, CAP) * LOG2E - log_sum)
    if SMOOTH:
        grad -= smoothing / vocab
    if (label >= start) & (label < start + SIZE):
        grad -= tl.where(at == label, 1 - smoothing, 0.0)
    if CAP:
        grad *= 4 * tl.sigmoid(2 * x / cap) * tl.sigmoid(-2 * x / cap)  # 1 − tanh², precise near 0
    if PART:
        grad = tl.where(at < vocab, grad, 0.0).to(here.dtype.element_ty)
        tl.store(here + at, grad, mask=at < width, eviction_policy="evict_first")
    else:
        tl.store(here + at, grad.to(here.dtype.element_ty), eviction_policy="evict_first")


@triton.jit
def _row_kernel(
    logits, labels, bias, totals, plains, rows, vocab, width, smoothing, cap, ignore,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, TAIL: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """WHOLE full pieces of scores, then a TAIL in which scores and row end."""
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
            mass, even = _sum_exp(here, bias, high, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP, SMOOTH)
            if mass == float("inf"):
                high = LOG2E * _highest(here, bias, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP)
                mass, even = _sum_exp(here, bias, high, vocab, cap, PIECE, WHOLE, TAIL, BIAS, CAP, SMOOTH)
            log_mass = tl.log2(mass)
            plain = (high - chosen + log_mass) / LOG2E
            total = plain
            if SMOOTH:
                total = (1 - smoothing) * plain + smoothing * ((high + log_mass) / LOG2E - even / vocab)
            tl.store(totals + row, total)
            tl.store(plains + row, plain)
            if GRADIENT:
                log_sum = high + log_mass
                if TAIL > 0:  # most recently read, still in cache
                    _store_gradient(
                        here, bias, WHOLE * PIECE, label, log_sum, vocab, width, smoothing, cap,
                        TAIL, True, BIAS, CAP, SMOOTH,
                    )  # fmt: skip
                for turn in range(WHOLE):
                    _store_gradient(
                        here, bias, (WHOLE - 1 - turn) * PIECE, label, log_sum, vocab, width, smoothing, cap,
                        PIECE, False, BIAS, CAP, SMOOTH,
                    )  # fmt: skip


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, ignore: int, bias: Tensor | None, smoothing: float, cap: float | None,
    vocab: int, totals: Tensor, plains: Tensor, gradient: bool = True,
) -> None:  # fmt: skip
    """For logits (rows, width) with `vocab` scores each: write the loss and the plain loss of each row to `totals` and
    `plains` (rows, fp32) and, if `gradient`, the gradient over the logits: 0 beyond the scores and where the label
    is `ignore`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous() and len(labels) == rows
    assert totals.is_contiguous() and plains.is_contiguous() and totals.dtype == plains.dtype == torch.float32
    piece = min(SPLIT.piece, triton.next_power_of_2(width))
    warps = max(1, min(SPLIT.warps, piece // 256))
    whole = vocab // piece
    tail = width - whole * piece
    _row_kernel[(min(rows, SPLIT.rows * _processors(logits.device)),)](
        logits, labels, logits if bias is None else bias, totals, plains, rows, vocab, width,
        smoothing, 1.0 if cap is None else cap, ignore, PIECE=piece, WHOLE=whole,
        TAIL=triton.next_power_of_2(tail) if tail else 0, BIAS=bias is not None, CAP=cap is not None,
        SMOOTH=smoothing > 0, GRADIENT=gradient, num_warps=warps, maxnreg=_registers(SPLIT.rows, warps),
    )  # fmt: skip


def _registers(rows: int, warps: int) -> int:
    """Registers per thread that let `rows` rows share a multiprocessor (65,536 registers)."""
    return min(255, 65536 // (rows * warps * 32) // 8 * 8)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
