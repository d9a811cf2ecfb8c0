"""Gated linear unit over concatenated factors in one pass: activation(gate) · up (Shazeer 2020, eq. 5)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton.small_batch_linear import _activate


@triton.jit
def _gate(both, out, hidden, row, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    here = both + number * row + at
    gate = tl.load(here, mask=at < hidden, other=0.0).to(tl.float32)
    up = tl.load(here + hidden, mask=at < hidden, other=0.0).to(tl.float32)
    found = _activate(gate, ACTIVATION) * up
    tl.store(out + number * hidden + at, found.to(out.dtype.element_ty), mask=at < hidden)


def gated(both: Tensor, activation: str) -> Tensor:
    """(…, 2 · hidden) to (…, hidden); activations: small_batch_linear.py."""
    flat = both.flatten(0, -2)
    rows, hidden = flat.shape[0], flat.shape[1] // 2
    assert flat.stride(1) == 1
    out = torch.empty(rows, hidden, dtype=both.dtype, device=both.device)
    if out.numel():
        size = min(1024, triton.next_power_of_2(hidden))
        _gate[(rows, triton.cdiv(hidden, size))](
            flat, out, hidden, flat.stride(0), ACTIVATION=activation, SIZE=size, num_warps=4
        )
    return out.view(*both.shape[:-1], hidden)
