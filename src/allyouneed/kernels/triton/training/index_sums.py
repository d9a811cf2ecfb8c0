"""Sums of weights that have the same number (nn/ops/index_sums.py): each line adds up its own in registers, where torch
adds element by element in memory, and many elements wait for one place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # weights at a time


@triton.jit
def _index_sums(
    weights, index, out, heads, lines, keys, count, w_batch, w_head, w_line, i_batch, i_line,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, head, line = program // (heads * lines), program // lines % heads, program % lines
    number = tl.arange(0, COUNT)
    total = tl.zeros((COUNT,), dtype=tl.float32)
    for start in range(0, keys, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < keys
        weight = tl.load(weights + batch * w_batch + head * w_head + line * w_line + k, mask=inside, other=0.0)
        which = tl.load(index + batch * i_batch + line * i_line + k, mask=inside, other=-1)
        same = which[None, :] == number[:, None]
        total += tl.sum(tl.where(same, weight.to(tl.float32)[None, :], 0.0), 1)
    tl.store(out + program * count + number, total.to(out.dtype.element_ty), mask=number < count)


def index_sums(weights: Tensor, index: Tensor, count: int) -> Tensor:
    """`weights` (batch, heads, lines, keys), `index` (batch or 1, 1, lines, keys) below `count`; sums (batch, heads,
    lines, count)."""
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    index = index if index.stride(-1) == 1 else index.contiguous()
    batch, heads, lines, keys = weights.shape
    out = torch.empty(batch, heads, lines, count, dtype=weights.dtype, device=weights.device)
    if out.numel():
        _index_sums[(batch * heads * lines,)](
            weights, index, out, heads, lines, keys, count, *weights.stride()[:3],
            index.stride(0) if len(index) > 1 else 0, index.stride(2),
            COUNT=max(2, triton.next_power_of_2(count)), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out
