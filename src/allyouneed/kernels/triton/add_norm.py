"""Residual addition and norm in one pass. The sub-layer output may come in parts (small_batch_linear.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs


@triton.jit
def _add_norm(
    x, more, weight, bias, total, normal, rows, eps, offset,
    width: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, WIDE)
    inside = f < width
    scale, shift = f * 0.0, f * 0.0
    if WEIGHT:
        scale = tl.load(weight + f, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + f, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    values = tl.load(x + row * width + f, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        values += tl.load(more + (part * rows + row) * width + f, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        values = values.to(x.dtype.element_ty).to(tl.float32)  # normalise the rounded sum, as stored
        if KEEP:
            tl.store(total + row * width + f, values.to(x.dtype.element_ty), mask=inside)
    if CENTRE:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    found = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    if WEIGHT:
        found *= scale + offset
    if BIAS:
        found += shift
    tl.store(normal + row * width + f, found.to(x.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, more: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centre: bool,
    offset: float = 0.0, keep: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (rows, width), `more` the same or (parts, rows, width): their sum and its norm. `centre`: layer norm, otherwise
    RMS norm. `keep`: also return the sum."""
    rows, width = x.shape
    assert x.is_contiguous() and (more is None or more.is_contiguous())
    parts = 0 if more is None else (more.shape[0] if more.dim() == 3 else 1)
    normal = torch.empty_like(x)
    total = torch.empty_like(x) if parts and keep else x
    overlap = has_pdl(x.device)
    _add_norm[(rows,)](
        x, x if more is None else more, x if weight is None else weight, x if bias is None else bias, total, normal,
        rows, eps, offset, width=width, WIDE=triton.next_power_of_2(width), PARTS=parts, CENTRE=centre,
        WEIGHT=weight is not None, BIAS=bias is not None, KEEP=keep, OVERLAP=overlap,
        num_warps=16 if width > 1024 else 4, launch_pdl=overlap,
    )  # fmt: skip
    return total, normal
