"""Products with a band of weights for each head, and their gradients; the definition is in nn/ops/banded.py. A tile of
the band is a matrix, so that sums are matrix products. x (batch, time, heads, features), weights (batch, time, heads,
size), contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton.training.tiled_kernels import _load_rows, _store_rows

TOKENS, OTHERS = 64, 32  # of a tile


@triton.jit
def _place(q, k, heads, size, left):
    """Where the weight of key k for query q stands, and whether there is one."""
    column = k - q + left
    return q * heads * size + column, (column >= 0) & (column < size)


@triton.jit
def _multiply(
    x, weights, y, time, heads, size, left,
    BACK: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums for the tokens `at`: queries, over their keys; BACK: keys, over the queries that read them."""
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * M
    row, head = line // heads, line % heads
    x, y = x + (row * time * heads + head) * WIDTH, y + (row * time * heads + head) * WIDTH
    weights += (row * time * heads + head) * size
    at = start + tl.arange(0, M)
    reach = left
    if BACK:
        reach = size - 1 - left
    found = tl.zeros((M, FEATURES), tl.float32)
    for begin in range(tl.maximum(start - reach, 0) // N * N, tl.minimum(start + M + size - 1 - reach, time), N):
        other = begin + tl.arange(0, N)
        if BACK:
            place, there = _place(other[None, :], at[:, None], heads, size, left)
        else:
            place, there = _place(at[:, None], other[None, :], heads, size, left)
        there = there & (at < time)[:, None] & (other < time)[None, :]
        b = _load_rows(x, other, other < time, heads * WIDTH, WIDTH, FEATURES)
        band = tl.load(weights + place, mask=there, other=0.0).to(b.dtype)
        found = tl.dot(band, b, found, input_precision=PRECISION)
    _store_rows(y, found, at, at < time, heads * WIDTH, WIDTH, FEATURES, False)


@triton.jit
def _grad_weights(
    x, dy, d_weights, time, heads, size, left,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Those of keys within the row; the others are zeros before."""
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * M
    row, head = line // heads, line % heads
    x, dy = x + (row * time * heads + head) * WIDTH, dy + (row * time * heads + head) * WIDTH
    d_weights += (row * time * heads + head) * size
    at = start + tl.arange(0, M)
    g = _load_rows(dy, at, at < time, heads * WIDTH, WIDTH, FEATURES)
    for begin in range(tl.maximum(start - left, 0) // N * N, tl.minimum(start + M + size - 1 - left, time), N):
        other = begin + tl.arange(0, N)
        b = _load_rows(x, other, other < time, heads * WIDTH, WIDTH, FEATURES)
        slope = tl.dot(g, tl.trans(b), input_precision=PRECISION)
        place, there = _place(at[:, None], other[None, :], heads, size, left)
        there = there & (at < time)[:, None] & (other < time)[None, :]
        tl.store(d_weights + place, slope.to(d_weights.dtype.element_ty), mask=there)


def _sizes(x: Tensor) -> dict[str, object]:
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    features = max(16, triton.next_power_of_2(x.shape[3]))
    sizes = {"WIDTH": x.shape[3], "FEATURES": features, "M": TOKENS, "N": OTHERS, "PRECISION": precision}
    return {**sizes, "num_warps": 4, "num_stages": 2}


def multiply(x: Tensor, weights: Tensor, left: int, back: bool) -> Tensor:
    (batch, time, heads, _), y = x.shape, torch.empty_like(x)
    if y.numel():
        grid = (batch * heads * triton.cdiv(time, TOKENS),)
        _multiply[grid](x, weights, y, time, heads, weights.shape[3], left, BACK=back, **_sizes(x))
    return y


def grad_weights(x: Tensor, dy: Tensor, weights: Tensor, left: int) -> Tensor:
    (batch, time, heads, _), found = x.shape, torch.zeros_like(weights)
    if found.numel():
        grid = (batch * heads * triton.cdiv(time, TOKENS),)
        _grad_weights[grid](x, dy, found, time, heads, weights.shape[3], left, **_sizes(x))
    return found
