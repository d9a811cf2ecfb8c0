"""A linear map of its own for every head, for few rows: what latent attention projects queries into the latents and
results into values with (DeepSeek-AI 2024, "DeepSeek-V2", 2.1.2). Limited by reading the weights; sums are fp32. The
definition is a matrix product per head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs


@triton.jit
def _weights(here, i, n, IN: tl.constexpr, OUT: tl.constexpr, LAST: tl.constexpr):
    """(inputs, outputs) of one head."""
    at = i[:, None] * OUT + n[None, :] if LAST else n[None, :] * IN + i[:, None]
    return tl.load(here + at, mask=(i < IN)[:, None] & (n < OUT)[None, :], other=0.0)


@triton.jit
def _head_linear(
    x, weight, out, rows, x_row, x_head, HEADS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`LAST`: the outputs of a weight matrix lie side by side, not the inputs. `ROWS` 1: without tensor cores."""
    head = tl.program_id(0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = n < OUT
    here = weight + head.to(tl.int64) * (IN * OUT)
    given = x + r.to(tl.int64) * x_row + head * x_head
    if ROWS == 1:  # all inputs at once; the weights are read before the inputs are ready
        i = tl.arange(0, INPUTS)
        tile = _weights(here, i, n, IN, OUT, LAST)
        await_inputs(OVERLAP)
        row = tl.load(given[:, None] + i[None, :], mask=(i < IN)[None, :], other=0.0)
        found = tl.sum(tl.trans(row).to(tl.float32) * tile.to(tl.float32), 0)[None, :]
    else:
        await_inputs(OVERLAP)
        found = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for start in range(0, IN, INPUTS):
            i = start + tl.arange(0, INPUTS)
            row = tl.load(given[:, None] + i[None, :], mask=(r < rows)[:, None] & (i < IN)[None, :], other=0.0)
            found = tl.dot(row, _weights(here, i, n, IN, OUT, LAST), found, input_precision="ieee")
    target = out + (r[:, None].to(tl.int64) * HEADS + head) * OUT + n[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=(r < rows)[:, None] & inside[None, :])


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, heads, inputs), weight (heads, inputs, outputs) or the transpose of (heads, outputs, inputs), to (rows,
    heads, outputs)."""
    (rows, heads, inputs), outputs = x.shape, weight.shape[2]
    last = weight.is_contiguous()
    assert x.stride(2) == 1 and weight.shape[:2] == (heads, inputs) and (last or weight.mT.is_contiguous())
    out = torch.empty(rows, heads, outputs, dtype=x.dtype, device=x.device)
    among = 1 if rows == 1 else min(64, max(16, triton.next_power_of_2(rows)))
    tile = {"OUTPUTS": 32, "INPUTS": 64, "num_warps": 4}
    if rows == 1:
        wide = triton.next_power_of_2(inputs)
        tile = {"OUTPUTS": max(1, min(32, 2048 // wide)), "INPUTS": wide, "num_warps": 2}
    _head_linear[(heads, triton.cdiv(outputs, tile["OUTPUTS"]), triton.cdiv(rows, among))](
        x, weight, out, rows, x.stride(0), x.stride(1), HEADS=heads, IN=inputs, OUT=outputs, LAST=last, ROWS=among,
        OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_stages=2, **tile,
    )  # fmt: skip
    return out
