"""Cross-entropy of a chunk of logits, and its gradient written over them.

A row is one program's: it reads it once for the largest score and the sum of exponentials (Milakov, Gimelshein 2018,
"Online normalizer calculation for softmax", algorithm 3), and again, from the end, to put the gradient there. The rows
that a GPU has at hand at a time fit into its cache, so the second reading seldom goes to memory. The plain definition
is `judged` in nn/crossentropy.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Cut(NamedTuple):
    """How many scores of a row are looked at together, and by how many warps: as many rows at a time as fit into the
    cache, with enough of each under way to keep the memory busy."""

    piece: int = 8192
    warps: int = 16


@triton.jit
def _score(x, bias, at, inside, cap, BIAS: tl.constexpr, CAP: tl.constexpr):
    x = x.to(tl.float32)
    if BIAS:
        x += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if CAP:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
    return x


@triton.jit
def _rows(
    logits, labels, bias, totals, plains, vocab, stride, smoothing, cap, ignore,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = logits + row * stride
    label = tl.load(labels + row).to(tl.int32)
    kept = label != ignore
    named = tl.maximum(label, 0)
    known = kept & (named < vocab)
    chosen = _score(tl.load(here + named, mask=known, other=0.0), bias, named, known, cap, BIAS, CAP)

    high = float("-inf")
    mass = tl.zeros((PIECE,), tl.float32)
    sums = tl.zeros((PIECE,), tl.float32)
    for piece in range(PIECES):
        at = piece * PIECE + tl.arange(0, PIECE)
        inside = (at < vocab) & kept
        # whole rows are read, for their width is even where the vocabulary is odd
        x = tl.load(here + at, mask=(at < stride) & kept, other=0.0)
        x = _score(x, bias, at, inside, cap, BIAS, CAP)
        if SMOOTH:
            sums += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(high, tl.max(x, 0))
        sure = tl.where(higher > float("-inf"), higher, 0.0)  # else −∞ − −∞
        mass = mass * tl.exp(high - sure) + tl.exp(x - sure)
        high = higher
    log_sum = tl.where(kept, high + tl.log(tl.sum(mass, 0)), 0.0)
    plain = tl.where(kept, log_sum - chosen, 0.0)
    total = plain
    if SMOOTH:
        even = tl.where(kept, log_sum - tl.sum(sums, 0) / vocab, 0.0)
        total = (1 - smoothing) * plain + smoothing * even
    tl.store(totals + row, total)
    tl.store(plains + row, plain)

    if GRADIENT:
        for turn in range(PIECES):
            at = (PIECES - 1 - turn) * PIECE + tl.arange(0, PIECE)  # what was read last is nearest
            inside = (at < vocab) & kept
            x = tl.load(here + at, mask=(at < stride) & kept, other=0.0)
            x = _score(x, bias, at, inside, cap, BIAS, CAP)
            slope = tl.exp(x - log_sum)
            if SMOOTH:
                slope -= smoothing / vocab
            slope -= tl.where(at == label, 1 - smoothing, 0.0)
            if CAP:
                slope *= 1 - (x / cap) * (x / cap)
            slope = tl.where(inside, slope, 0.0)
            tl.store(here + at, slope.to(logits.dtype.element_ty), mask=at < stride)


def judge(
    logits: Tensor, labels: Tensor, ignore: int, bias: Tensor | None, smoothing: float, cap: float | None,
    vocab: int, totals: Tensor, plains: Tensor, gradient: bool = True, cut: Cut | None = None,
) -> None:  # fmt: skip
    """Of logits (rows, width), of which the first `vocab` are scores: the loss and the plain loss of each row into
    `totals` and `plains` (rows, of fp32), and over the logits, if asked, the gradient of the loss by them, which is 0
    beyond the scores and where the label is `ignore`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous() and len(labels) == rows
    assert totals.is_contiguous() and plains.is_contiguous() and totals.dtype == plains.dtype == torch.float32
    cut = Cut() if cut is None else cut
    piece = min(cut.piece, triton.next_power_of_2(width))
    _rows[(rows,)](
        logits, labels, logits if bias is None else bias, totals, plains, vocab, width,
        smoothing, 1.0 if cap is None else cap, ignore, PIECE=piece, PIECES=triton.cdiv(width, piece),
        BIAS=bias is not None, CAP=cap is not None, SMOOTH=smoothing > 0, GRADIENT=gradient,
        num_warps=max(1, min(cut.warps, piece // 256)),
    )  # fmt: skip
