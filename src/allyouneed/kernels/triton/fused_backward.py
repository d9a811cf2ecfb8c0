"""Gradients with their partial sums over tokens in one pass (runtime/cuda/bias_gradients.py): of an activation, of
merged heads, of a layer norm with the residual around it, and of a layer norm of a sum with dropout, whose forward pass
is here too.

A partial sum covers `rows` neighbouring tokens, in fp32 and in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Tokens and features per tile (0: all features of a token), and warps per program."""

    tokens: int
    features: int
    warps: int


# the fastest of bench/train/gpu.py kernels
ACTIVATION, MERGE, LAYER_NORM, ADD_NORM = Tile(4, 512, 4), Tile(4, 512, 4), Tile(1, 0, 2), Tile(1, 0, 4)
SUM_NORM = Tile(0, 512, 4)  # features of all tokens in an eighth of a program


@triton.jit
def _derivative(x, KIND: tl.constexpr):
    if KIND == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu-squared":
        return 2 * tl.maximum(x, 0.0)
    elif KIND == "gelu":
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp2(
            x * x * -0.7213475204444817
        )
    elif KIND == "silu":
        s = tl.sigmoid(x)
        return s * (1 + x * (1 - s))
    else:  # gelu-tanh: σ(2u) = (1 + tanh u) / 2 with u = √(2/π)·(x + 0.044715·x³), whose exponential is of 2
        s = 1 / (1 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * x * x)))
        return s * (1 + x * (1 - s) * (1.5957691216057308 + 0.21406444881780076 * x * x))


@triton.jit
def _activation_backward(
    gradient, x, found, sums, tokens, width,
    KIND: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(1) * ROWS
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for start in range(0, ROWS, STEP):
        token = first + start + tl.arange(0, STEP)[:, None]
        at, inside = token.to(tl.int64) * width + column, (token < tokens) & (column < width)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * _derivative(values, KIND)
        tl.store(found + at, grad.to(found.dtype.element_ty), mask=inside)
        total += grad
    total = tl.sum(total, 0)[None, :]
    tl.store(sums + tl.program_id(1) * width + column, total, mask=column < width)


def activation_backward(gradient: Tensor, x: Tensor, kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """The gradient with respect to x (…, width), and its partial sums over `rows` tokens."""
    assert gradient.is_contiguous() and x.is_contiguous() and gradient.shape == x.shape
    width, tokens = x.shape[-1], x.numel() // x.shape[-1]
    found, parts = torch.empty_like(x), triton.cdiv(tokens, rows)
    sums = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    if parts:
        _activation_backward[(triton.cdiv(width, ACTIVATION.features), parts)](
            gradient, x, found, sums, tokens, width, KIND=kind, ROWS=rows, STEP=ACTIVATION.tokens,
            COLUMNS=ACTIVATION.features, num_warps=ACTIVATION.warps,
        )  # fmt: skip
    return found, sums


@triton.jit
def _merge_heads(
    part, found, sums, tokens, time, size, place, width, by_batch, by_head, by_time,
    HEAD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies `size` features of one part to column `place` of the result."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(1) * ROWS
    there = column // HEAD * by_head + column % HEAD
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for start in range(0, ROWS, STEP):
        token = first + start + tl.arange(0, STEP)[:, None]
        inside = (token < tokens) & (column < size)
        here = (token // time).to(tl.int64) * by_batch + token % time * by_time
        values = tl.load(part + here + there, mask=inside, other=0.0)
        tl.store(found + token.to(tl.int64) * width + place + column, values, mask=inside)
        total += values.to(tl.float32)
    total = tl.sum(total, 0)[None, :]
    tl.store(sums + tl.program_id(1) * width + place + column, total, mask=column < size)


def merge_heads(parts: Sequence[Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Concatenate (batch, heads, time, head_width) parts to (batch, time, width), with sums over `rows` tokens."""
    batch, _, time, head = parts[0].shape
    tokens, width = batch * time, sum(part.shape[1] * part.shape[3] for part in parts)
    found = parts[0].new_empty(batch, time, width)
    sums = torch.empty(triton.cdiv(tokens, rows), width, dtype=torch.float32, device=found.device)
    place = 0
    for part in parts:
        part = part if part.stride(3) == 1 else part.contiguous()
        size = part.shape[1] * head
        if len(sums) and size:
            by_batch, by_head, by_time, _ = part.stride()
            _merge_heads[(triton.cdiv(size, MERGE.features), len(sums))](
                part, found, sums, tokens, time, size, place, width, by_batch, by_head, by_time,
                HEAD=head, ROWS=rows, STEP=MERGE.tokens, COLUMNS=MERGE.features, num_warps=MERGE.warps,
            )  # fmt: skip
        place += size
    return found, sums


@triton.jit
def _norm_backward(
    gradient, second, residual, total, kept, weight, mean, scale, found, dropped, sums, tokens, width, parts, factor,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, TWO: tl.constexpr, RESIDUAL: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradient of a layer norm of `total`: plus `residual`, or also behind dropout."""
    column = tl.arange(0, WIDE)[None, :]
    first = tl.program_id(0) * ROWS
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    by_weight = tl.zeros((STEP, WIDE), tl.float32)
    by_bias = tl.zeros((STEP, WIDE), tl.float32)
    passed = tl.zeros((STEP, WIDE), tl.float32)
    for start in tl.range(0, ROWS, STEP, num_stages=3):
        line = first + start + tl.arange(0, STEP)
        at = line.to(tl.int64)[:, None] * width + column
        inside = (line < tokens)[:, None] & (column < width)
        grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            grad += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        centre = tl.load(mean + line, mask=line < tokens, other=0.0)[:, None]
        by = tl.load(scale + line, mask=line < tokens, other=0.0)[:, None]
        normal = tl.where(inside, (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - centre) * by, 0.0)
        if RESIDUAL:
            more = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            passed += more
        by_weight += grad * normal
        by_bias += grad
        grad *= weights
        even = tl.sum(grad, 1)[:, None] / width
        along = tl.sum(grad * normal, 1)[:, None] / width
        grad = by * (grad - even - normal * along)
        if RESIDUAL:
            grad += more
        tl.store(found + at, grad.to(found.dtype.element_ty), mask=inside)
        if DROPOUT:
            stays = tl.load(kept + at, mask=inside, other=0).to(tl.int1)
            grad = tl.where(stays, grad * factor, 0.0)
            tl.store(dropped + at, grad.to(dropped.dtype.element_ty), mask=inside)
        if not RESIDUAL:
            passed += tl.where(inside, grad, 0.0)
    column = tl.arange(0, WIDE)
    there = sums + tl.program_id(0) * width + column
    tl.store(there, tl.sum(by_weight, 0), mask=column < width)
    tl.store(there + parts * width, tl.sum(by_bias, 0), mask=column < width)
    tl.store(there + 2 * parts * width, tl.sum(passed, 0), mask=column < width)


def layer_norm_backward(
    gradient: Tensor, residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """The gradient with respect to x (…, width) of its layer norm plus that of the residual, and partial sums over
    `rows` tokens: for the norm's weight, its bias, and the residual."""
    assert gradient.is_contiguous() and residual.is_contiguous() and x.is_contiguous() and weight.is_contiguous()
    assert mean.is_contiguous() and scale.is_contiguous() and gradient.shape == residual.shape == x.shape
    width, tokens = x.shape[-1], x.numel() // x.shape[-1]
    found, parts, wide = torch.empty_like(x), triton.cdiv(tokens, rows), triton.next_power_of_2(width)
    sums = torch.empty(3, parts, width, dtype=torch.float32, device=x.device)
    if parts:
        step = max(1, min(LAYER_NORM.tokens, 1024 * LAYER_NORM.tokens // wide))
        _norm_backward[(parts,)](
            gradient, gradient, residual, x, x, weight, mean, scale, found, found, sums, tokens, width, parts, 1.0,
            ROWS=rows, STEP=step, WIDE=wide, TWO=False, RESIDUAL=True, DROPOUT=False,
            num_warps=min(16, max(LAYER_NORM.warps, wide // 512)),
        )  # fmt: skip
    return found, sums


@triton.jit
def _two(x, y, row, column, there, width):
    at, inside = row + column, there & (column < width)
    return tl.load(x + at, mask=inside, other=0.0), tl.load(y + at, mask=inside, other=0.0)


@triton.jit
def _summed(
    x, y, shift, kept, total, row, column, there, width, draw, limit, factor, SHIFT: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """x + factor · kept · (y + shift) of some features, rounded as it is stored; `draw`: 16 random bits of each."""
    at, inside = row + column, there & (column < width)
    branch = y.to(tl.float32)
    if SHIFT:
        branch += tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    if DROPOUT:
        stays = (draw & 0xFFFF).to(tl.int32) >= limit
        tl.store(kept + at, stays, mask=inside)
        branch = tl.where(stays, branch * factor, 0.0)
    found = (x.to(tl.float32) + branch).to(total.dtype.element_ty)
    tl.store(total + at, found, mask=inside)
    return tl.where(inside, found.to(tl.float32), 0.0)


@triton.jit
def _square(x, centre, column, width):
    return tl.where(column < width, (x - centre) * (x - centre), 0.0)


@triton.jit
def _scaled(out, weight, bias, row, column, there, width, normal):
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    more = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row + column, (normal * scale + more).to(out.dtype.element_ty), mask=there & (column < width))


@triton.jit
def _add_norm(
    x, y, shift, seed, weight, bias, out, total, kept, mean, scale, tokens, width, limit, factor, eps,
    STEP: tl.constexpr, PART: tl.constexpr, SHIFT: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Some tokens; features in eight parts, since a draw is four random numbers of 32 bits, and 16 decide on one. All
    parts are loaded before the first is stored: no load moves across a store."""
    line = tl.program_id(0) * STEP + tl.arange(0, STEP)
    c0 = tl.arange(0, PART)[None, :]
    row, there = line.to(tl.int64)[:, None] * width, (line < tokens)[:, None]
    given, t = (), ()
    for part in tl.static_range(8):
        given += (_two(x, y, row, c0 + part * PART, there, width),)  # type: ignore[assignment]
    draw = c0 + line[:, None] * PART
    draws = draw, draw, draw, draw
    if DROPOUT:
        draws = tl.randint4x(tl.load(seed), draw, 7)  # as many rounds as pass all tests (Salmon et al. 2011)
    for part in tl.static_range(8):
        column, bits = c0 + part * PART, draws[part % 4] if part < 4 else draws[part % 4] >> 16
        t += (_summed(  # type: ignore[assignment]
            given[part][0], given[part][1], shift, kept, total, row, column, there, width, bits, limit, factor, SHIFT,
            DROPOUT,
        ),)  # fmt: skip
    summed = (t[0] + t[1]) + (t[2] + t[3]) + (t[4] + t[5]) + (t[6] + t[7])  # type: ignore[misc]
    mid = (tl.sum(summed, 1) / width)[:, None]
    q = ()
    for part in tl.static_range(8):
        q += (_square(t[part], mid, c0 + part * PART, width),)  # type: ignore[assignment]
    squares = q[0] + q[1] + q[2] + (q[3] + q[4] + q[5]) + (q[6] + q[7])  # type: ignore[misc]
    by = tl.rsqrt(tl.sum(squares, 1) / width + eps)[:, None]
    for part in tl.static_range(8):
        _scaled(out, weight, bias, row, c0 + part * PART, there, width, (t[part] - mid) * by)
    tl.store(mean + line, tl.sum(mid, 1), mask=line < tokens)
    tl.store(scale + line, tl.sum(by, 1), mask=line < tokens)


def add_norm(
    x: Tensor, y: Tensor, shift: Tensor | None, seed: Tensor | None, dropout: float, weight: Tensor, bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """LayerNorm(x + dropout(y + shift)), the sum, what dropout keeps (bool, empty without a seed), and the mean and the
    reciprocal deviation of each token. `seed` (1,) int64: of the random numbers; a feature is dropped with a
    probability of a multiple of 2⁻¹⁶."""
    assert all(one.is_contiguous() for one in (x, y, weight, bias)) and x.shape == y.shape
    width, tokens = x.shape[-1], x.numel() // x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    kept = torch.empty(x.shape if seed is not None else 0, dtype=torch.bool, device=x.device)
    mean = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(mean)  # results of an operator may not share memory
    part = triton.next_power_of_2(triton.cdiv(width, 8))
    step = max(1, SUM_NORM.features // part)
    if tokens:
        _add_norm[(triton.cdiv(tokens, step),)](
            x, y, y if shift is None else shift, mean if seed is None else seed, weight, bias, out, total, kept, mean,
            scale, tokens, width, round(dropout * (1 << 16)), 1 / (1 - dropout), eps, STEP=step, PART=part,
            SHIFT=shift is not None, DROPOUT=seed is not None, num_warps=SUM_NORM.warps,
        )  # fmt: skip
    return out, total, kept, mean, scale


def add_norm_backward(
    gradient: Tensor, second: Tensor | None, total: Tensor, kept: Tensor | None, factor: float, weight: Tensor,
    mean: Tensor, scale: Tensor, rows: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to x and y (…, width) of the layer norm of x + factor · kept · y, which is `total`;
    without `kept` that of y is that of x, and the second result is empty. `second` is added to the gradient. And
    partial sums over `rows` tokens: for the norm's weight, its bias, and of the gradient of y."""
    given = [x for x in (gradient, second, total, kept, weight, mean, scale) if x is not None]
    assert all(x.is_contiguous() for x in given) and gradient.shape == total.shape
    width, tokens = total.shape[-1], total.numel() // total.shape[-1]
    parts, wide = triton.cdiv(tokens, rows), triton.next_power_of_2(width)
    found, dropped = torch.empty_like(total), torch.empty_like(total) if kept is not None else total.new_empty(0)
    sums = torch.empty(3, parts, width, dtype=torch.float32, device=total.device)
    if parts:
        step = max(1, min(ADD_NORM.tokens, 512 * ADD_NORM.tokens // wide))
        _norm_backward[(parts,)](
            gradient, gradient if second is None else second, gradient, total, total if kept is None else kept, weight,
            mean, scale, found, dropped, sums, tokens, width, parts, factor, ROWS=rows, STEP=step, WIDE=wide,
            TWO=second is not None, RESIDUAL=False, DROPOUT=kept is not None,
            num_warps=min(16, max(ADD_NORM.warps, wide // 512)),
        )  # fmt: skip
    return found, dropped, sums
