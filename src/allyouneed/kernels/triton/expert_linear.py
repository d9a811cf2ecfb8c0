"""Linear maps of few rows, each with the weights of its own expert, limited by reading the weights. Rows are sorted by
expert; an expert without rows reads nothing. Weights stay where the experts have them: a table holds their addresses.
Accumulation is fp32. The definition: `nn/ops/experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from allyouneed.kernels import launches

ROWS = 16  # rows of a tile, the fewest of a matrix product
INPUTS = 128  # inputs of a tile


@triton.jit
def _linear(
    x, like, bias_like, weights, biases, ends, out, outputs, inputs: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight = tl.multiple_of(tl.load(weights + expert).to(like.dtype), 16)
    here = weight + n[:, None].to(tl.int64) * inputs
    shift = tl.zeros((OUTPUTS,), tl.float32)
    if BIAS:
        bias = tl.load(biases + expert).to(bias_like.dtype)
        shift += tl.load(bias + n, mask=(n < outputs) & (start < stop), other=0.0).to(tl.float32)
    for tile in range(tl.cdiv(stop - start, ROWS)):
        row = start + tile * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32) + shift[None, :]
        for first in range(0, inputs, INPUTS):
            at = first + tl.arange(0, INPUTS)
            a = tl.load(x + row[:, None] * inputs + at[None, :], mask=(row < stop)[:, None] & (at < inputs), other=0.0)
            w = tl.load(here + at[None, :], mask=(n < outputs)[:, None] & (at < inputs), other=0.0)
            total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
        inside = (row < stop)[:, None] & (n < outputs)[None, :]
        tl.store(out + row[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@cache  # never dropped: a captured graph may read it; addresses alone decide, so it cannot be stale
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@launches
def expert_linear(x: Tensor, maps: Sequence[nn.Linear], ends: Tensor) -> Tensor:
    """x (rows, inputs) sorted by expert, in the dtype of the weights; ends (experts,): the end of each one's rows."""
    (rows, inputs), first = x.shape, maps[0]
    outputs = first.out_features
    weights = _table(tuple(one.weight.data_ptr() for one in maps), x.device)
    bias = first.bias is not None
    biases = _table(tuple(one.bias.data_ptr() for one in maps), x.device) if bias else weights
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block = 32 if outputs >= 2048 else 16
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    _linear[(len(maps), triton.cdiv(outputs, block))](
        x.contiguous(), first.weight, first.bias if bias else first.weight, weights, biases, ends, out, outputs, inputs,
        bias, ROWS, block, min(INPUTS, max(16, triton.next_power_of_2(inputs))), precision, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out
