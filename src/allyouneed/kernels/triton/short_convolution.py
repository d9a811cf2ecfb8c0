"""The short convolution of state spaces on GPUs, forward and backward: y_t = silu(Σ_j w_j ⊙ x_{t−S+1+j} + bias) of S
taps per feature; the definition is in `nn/mixers/state_space/convolution.py`.

x (batch, time, features), its features contiguous; `before` (batch, S − 1, features) are the inputs before it. Only
inputs are saved for backward. Sums over tokens are made per program, then by torch. All arithmetic is fp32.

PACKED rows: `starts` (batch, time) is the index at which the sentence of each token begins. Inputs before it count as
zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton import TEXT_SIZES

TOKENS, FEATURES = 8, 64  # of a tile
TILES = 8  # per program in backward
WARPS = 4


@triton.jit
def _load(x, before, row, at, feature, time, features, x_row, x_time, SIZE: tl.constexpr):
    """Inputs of the tokens `at`; −1, −2, … are the last ones before."""
    column, exists = feature[None, :], (feature < features)[None, :]
    here = x + row * x_row + at[:, None].to(tl.int64) * x_time + column
    now = tl.load(here, mask=exists & ((at >= 0) & (at < time))[:, None], other=0.0).to(tl.float32)
    past = before + (row * (SIZE - 1) + at[:, None] + SIZE - 1) * features + column
    return now + tl.load(past, mask=exists & ((at >= 1 - SIZE) & (at < 0))[:, None], other=0.0).to(tl.float32)


@triton.jit
def _begins(starts, at, time, PACKED: tl.constexpr):
    """Where the sentences of the tokens `at` begin."""
    found = at
    if PACKED:
        found = tl.load(starts + at, mask=(at >= 0) & (at < time), other=0)
    return found


@triton.jit
def _seen(x, at, begin, PACKED: tl.constexpr):
    """x of the tokens `at`, 0 where they lie before the beginning of a sentence."""
    if PACKED:
        x = tl.where((at >= begin)[:, None], x, 0.0)
    return x


@triton.jit(do_not_specialize=TEXT_SIZES)
def _convolve(
    x, before, weight, bias, starts, y, time, features, x_row, x_time,
    SIZE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(2).to(tl.int64)
    exists = feature < features
    begin = _begins(starts + row * time, at, time, PACKED)
    total = tl.zeros((TOKENS, FEATURES), tl.float32)
    if BIAS:
        total += tl.load(bias + feature, mask=exists, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(SIZE):
        tap = tl.load(weight + feature * SIZE + j, mask=exists, other=0.0).to(tl.float32)
        then = at + (j + 1 - SIZE)
        one = _load(x, before, row, then, feature, time, features, x_row, x_time, SIZE)
        total += tap[None, :] * _seen(one, then, begin, PACKED)
    found = total / (1.0 + tl.exp(-total))
    here = y + (row * time + at[:, None]) * features + feature[None, :]
    tl.store(here, found.to(y.dtype.element_ty), mask=(at < time)[:, None] & exists[None, :])


@triton.jit(do_not_specialize=TEXT_SIZES)
def _grad_kernel(
    x, before, weight, bias, starts, dy, dx, d_before, d_weight, d_bias, time, features, x_row, x_time,
    SIZE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Tokens are counted from the first of `before`. The gradient of input t comes from outputs t, …, t + SIZE − 1,
    whose own sums reach from input t − SIZE + 1 to t + SIZE − 1."""
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    row, exists = tl.program_id(2).to(tl.int64), feature < features
    starts += row * time
    shift = tl.zeros((FEATURES,), tl.float32)
    if BIAS:
        shift += tl.load(bias + feature, mask=exists, other=0.0).to(tl.float32)
    taps, on_taps, on_bias = (), (), tl.zeros((FEATURES,), tl.float32)
    for j in tl.static_range(SIZE):
        taps += (tl.load(weight + feature * SIZE + j, mask=exists, other=0.0).to(tl.float32)[None, :],)  # type: ignore[assignment]
        on_taps += (tl.zeros((FEATURES,), tl.float32),)  # type: ignore[assignment]
    for number in range(TILES):
        at = (tl.program_id(0) * TILES + number) * TOKENS + tl.arange(0, TOKENS) - (SIZE - 1)
        inputs = ()
        for j in tl.static_range(2 * SIZE - 1):
            then = at + (j + 1 - SIZE)
            inputs += (_load(x, before, row, then, feature, time, features, x_row, x_time, SIZE),)  # type: ignore[assignment]
        found = tl.zeros((TOKENS, FEATURES), tl.float32)
        for k in tl.static_range(SIZE):
            total = tl.zeros((TOKENS, FEATURES), tl.float32) + shift[None, :]
            then = at + k
            begin = _begins(starts, then, time, PACKED)
            for j in tl.static_range(SIZE):
                total += taps[j] * _seen(inputs[k + j], then + (j + 1 - SIZE), begin, PACKED)
            inside = ((then >= 0) & (then < time))[:, None] & exists[None, :]
            here = dy + (row * time + then[:, None]) * features + feature[None, :]
            change = tl.load(here, mask=inside, other=0.0).to(tl.float32)
            share = 1.0 / (1.0 + tl.exp(-total))
            change *= share * (1.0 + total * (1.0 - share))
            found += taps[SIZE - 1 - k] * _seen(change, at, begin, PACKED)
            if k == 0:
                on_bias += tl.sum(change, 0)
                sums = ()
                for j in tl.static_range(SIZE):
                    one = _seen(inputs[j], at + (j + 1 - SIZE), begin, PACKED)
                    sums += (on_taps[j] + tl.sum(change * one, 0),)  # type: ignore[assignment]
                on_taps = sums
        now = ((at >= 0) & (at < time))[:, None] & exists[None, :]
        tl.store(dx + (row * time + at[:, None]) * features + feature[None, :], found.to(dx.dtype.element_ty), mask=now)
        past = d_before + (row * (SIZE - 1) + at[:, None] + SIZE - 1) * features + feature[None, :]
        tl.store(past, found.to(d_before.dtype.element_ty), mask=(at < 0)[:, None] & exists[None, :])
    here = (row * tl.num_programs(0) + tl.program_id(0)) * features + feature
    tl.store(d_bias + here, on_bias, mask=exists)
    for j in tl.static_range(SIZE):
        tl.store(d_weight + here * SIZE + j, on_taps[j], mask=exists)


@torch.library.custom_op("allyouneed::short_convolution", mutates_args=())
def _forward(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
    (batch, time, features), size = x.shape, weight.shape[1]
    y = torch.empty(batch, time, features, dtype=x.dtype, device=x.device)
    _convolve[(triton.cdiv(time, TOKENS), triton.cdiv(features, FEATURES), batch)](
        x, before, weight, *_optional(weight, bias, starts), y, time, features, *x.stride()[:2],
        size, bias is not None, starts is not None, TOKENS, FEATURES, num_warps=WARPS,
    )  # fmt: skip
    return y


_forward.register_fake(lambda x, *rest: x.new_empty(x.shape))


@torch.library.custom_op("allyouneed::short_convolution_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and `before`, and those of weight and bias in parts (batch, programs, …)."""
    (batch, time, features), size = x.shape, weight.shape[1]
    dx, d_before, d_weight, d_bias = _empty_gradients(x, before, weight)
    _grad_kernel[(d_bias.shape[1], triton.cdiv(features, FEATURES), batch)](
        x, before, weight, *_optional(weight, bias, starts), dy.contiguous(), dx, d_before, d_weight, d_bias,
        time, features, *x.stride()[:2], size, bias is not None, starts is not None, TILES, TOKENS, FEATURES,
        num_warps=WARPS,
    )  # fmt: skip
    return dx, d_before, d_weight, d_bias


_backward.register_fake(lambda dy, x, before, weight, *rest: _empty_gradients(x, before, weight))


def _optional(weight: Tensor, *given: Tensor | None) -> list[Tensor]:
    """The weight for what is not there: not read."""
    return [weight if tensor is None else tensor for tensor in given]


def _empty_gradients(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, time, features), size = x.shape, weight.shape[1]
    programs = triton.cdiv(time + size - 1, TOKENS * TILES)
    parts = (x.new_empty(batch, programs, *shape, dtype=torch.float32) for shape in ((features, size), (features,)))
    return x.new_empty(x.shape), torch.empty_like(before), *parts  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, before, weight, bias, starts = ctx.saved_tensors
    dx, d_before, d_weight, d_bias = _backward(dy, x, before, weight, bias, starts)
    on_bias = None if bias is None else d_bias.sum((0, 1)).to(bias.dtype)
    return dx, d_before, d_weight.sum((0, 1)).to(weight.dtype), on_bias, None


_forward.register_autograd(_gradients, setup_context=_save)


def short_convolution(
    x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None = None
) -> Tensor:
    """y (batch, time, features) in the dtype of x; weight (features, taps), a few of them: loops are unrolled."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    starts = None if starts is None else starts.contiguous()
    return _forward(x, before.to(x.dtype).contiguous(), weight.contiguous(), bias, starts)
