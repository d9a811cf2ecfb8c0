"""Rotary positions (nn/positions/rotary.py) in one pass: (a, b) of each plane → (a·cos − b·sin, b·cos + a·sin)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, cos, sin, out, heads, half, x_batch, x_head, x_time, table_batch, table_time,
    HEADS: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All heads of one token. `STEP`: 1 if a and b are halves of a head, 2 if interleaved."""
    time, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    f, h = tl.arange(0, HALF), tl.arange(0, HEADS)
    apart = half if STEP == 1 else 1
    there = batch * table_batch + time * table_time + f
    c = tl.load(cos + there, mask=f < half, other=0.0)[None, :]
    s = tl.load(sin + there, mask=f < half, other=0.0)[None, :]
    inside = (h < heads)[:, None] & (f < half)[None, :]
    here = x + batch * x_batch + time * x_time + h[:, None] * x_head + f[None, :] * STEP
    a = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(here + apart, mask=inside, other=0.0).to(tl.float32)
    target = out + ((batch * tl.num_programs(0) + time) * heads + h[:, None]) * 2 * half + f[None, :] * STEP
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + apart, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (batch, heads, time, width) by fp32 cosines and sines (2, batch or 1, 1, time, width / 2). The result is
    contiguous per token."""
    batch, heads, time, width = x.shape
    cos, sin = table
    assert x.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1 and cos.stride() == sin.stride()
    out = torch.empty(batch, time, heads, width, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate[(time, batch)](
            x, cos, sin, out, heads, width // 2, x.stride(0), x.stride(1), x.stride(2),
            cos.stride(0) if len(cos) > 1 else 0, cos.stride(2), HEADS=triton.next_power_of_2(heads),
            HALF=triton.next_power_of_2(width // 2), STEP=2 if interleaved else 1, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)
