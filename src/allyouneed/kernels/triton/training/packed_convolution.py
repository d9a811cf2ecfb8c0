"""One long filter for each feature over the sentences of packed rows, and its gradients; the definition is in
nn/ops/packed_convolution.py. x and y (batch, time, features), filters (taps, features), all contiguous; sums in
fp32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, FEATURES = 32, 64  # of a tile


@triton.jit
def _convolve(
    x, taps, starts, ends, y, time, features, BACK: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    """y_t = Σ_s taps_{t−s} x_s from the start of t's sentence to t; BACK: Σ_s taps_{s−t} x_s from t to its end."""
    row, start = tl.program_id(2).to(tl.int64), tl.program_id(0) * TOKENS
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < features
    at = start + tl.arange(0, TOKENS)
    starts, ends, x = starts + row * time, ends + row * time, x + row * time * features
    if BACK:
        limit = tl.load(ends + at, mask=at < time, other=-1)
        first, last = start, tl.load(ends + tl.minimum(start + TOKENS, time) - 1) + 1
    else:
        limit = tl.load(starts + at, mask=at < time, other=1 << 30)
        first, last = tl.load(starts + start), tl.minimum(start + TOKENS, time)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for s in range(first, last):
        one = tl.load(x + s * features + feature, mask=exists, other=0.0).to(tl.float32)
        if BACK:
            apart, inside = s - at, s <= limit
        else:
            apart, inside = at - s, s >= limit
        keep = (inside & (apart >= 0))[:, None] & exists[None, :]
        total += tl.load(taps + apart[:, None] * features + feature[None, :], mask=keep, other=0.0) * one[None, :]
    here = y + (row * time + at[:, None]) * features + feature[None, :]
    tl.store(here, total.to(y.dtype.element_ty), mask=(at < time)[:, None] & exists[None, :])


@triton.jit
def _grad_taps(x, dy, starts, d_taps, time, taps, features, span, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    """Of the tokens of one part of a row: parts (parts, taps, features)."""
    part, start = tl.program_id(2).to(tl.int64), tl.program_id(0) * TOKENS
    parts = tl.cdiv(time, span)
    row, begin = part // parts, (part % parts).to(tl.int32) * span
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < features
    apart = start + tl.arange(0, TOKENS)
    starts, x, dy = starts + row * time, x + row * time * features, dy + row * time * features
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    for t in range(tl.maximum(begin, start), tl.minimum(begin + span, time)):
        limit = tl.load(starts + t)
        if t - start >= limit:
            slope = tl.load(dy + t * features + feature, mask=exists, other=0.0).to(tl.float32)
            at = t - apart
            keep = (at >= limit)[:, None] & exists[None, :]
            seen = tl.load(x + at[:, None] * features + feature[None, :], mask=keep, other=0.0).to(tl.float32)
            total += seen * slope[None, :]
    here = d_taps + (part * taps + apart[:, None]) * features + feature[None, :]
    tl.store(here, total, mask=(apart < taps)[:, None] & exists[None, :])


def convolve(x: Tensor, taps: Tensor, starts: Tensor, ends: Tensor, back: bool) -> Tensor:
    (batch, time, features), y = x.shape, torch.empty_like(x)
    if y.numel():
        grid = (triton.cdiv(time, TOKENS), triton.cdiv(features, FEATURES), batch)
        _convolve[grid](x, taps, starts, ends, y, time, features, back, TOKENS, FEATURES, num_warps=4)
    return y


def grad_taps(x: Tensor, dy: Tensor, starts: Tensor, count: int) -> Tensor:
    batch, time, features = x.shape
    span = 512  # tokens of a part
    parts = x.new_empty(batch * triton.cdiv(time, span), count, features, dtype=torch.float32)
    if parts.numel():
        grid = (triton.cdiv(count, TOKENS), triton.cdiv(features, FEATURES), len(parts))
        _grad_taps[grid](x, dy, starts, parts, time, count, features, span, TOKENS, FEATURES, num_warps=4)
    return parts.sum(0)
