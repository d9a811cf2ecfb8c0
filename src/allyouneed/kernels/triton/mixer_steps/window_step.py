"""One token per row through a convolution over the last tokens, which are updated in place: filters of a head after a
softmax (Wu et al. 2019, 3 and 4), one filter per feature, or the window itself as the input of a linear map.
Definitions: nn/mixers/lightweight.py, nn/mixers/convolution.py. Products are summed in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs

BLOCK = 128  # features of a program


@triton.jit
def _new_input(x, row, x_row, f, inside, features, GATED: tl.constexpr):
    new = tl.load(x + row * x_row + f, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(x + row * x_row + features + f, mask=inside, other=0.0).to(tl.float32)
        new = (new.to(tl.float32) * tl.sigmoid(gate)).to(new.dtype)
    return new


@triton.jit
def _gate(x, out, x_row, features, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    new = _new_input(x, row, x_row, f, f < features, features, True)
    tl.store(out + row * features + f, new, mask=f < features)


@triton.jit
def _window_step(
    x, before, taps, out, x_row, features, tap_row, tap_line,
    SHARE: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`SHARE` features in a row have the same filter."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    await_inputs(OVERLAP)
    line = taps + row * tap_row + (f // SHARE) * tap_line
    top = f * 0.0 + float("-inf")
    if SOFTMAX:
        for number in tl.static_range(SIZE):
            top = tl.maximum(top, tl.load(line + number, mask=inside, other=0.0).to(tl.float32))
    mass = f * 0.0
    found = f * 0.0
    for number in tl.static_range(SIZE):
        at = before + (row * (SIZE - 1) + number) * features + f
        if number < SIZE - 1:
            seen = tl.load(at, mask=inside, other=0.0)
        else:
            seen = _new_input(x, row, x_row, f, inside, features, GATED)
        if number > 0:
            tl.store(at - features, seen, mask=inside)
        weight = tl.load(line + number, mask=inside, other=0.0).to(tl.float32)
        if SOFTMAX:
            weight = tl.exp(weight - top)
            mass += weight
        found += weight * seen.to(tl.float32)
    if SOFTMAX:
        found = found / mass
    tl.store(out + row * features + f, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather_window(
    x, before, out, x_row, features, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    await_inputs(OVERLAP)
    for number in tl.static_range(SIZE):
        at = before + (row * (SIZE - 1) + number) * features + f
        if number < SIZE - 1:
            seen = tl.load(at, mask=inside, other=0.0)
        else:
            seen = tl.load(x + row * x_row + f, mask=inside, other=0.0)
        if number > 0:
            tl.store(at - features, seen, mask=inside)
        tl.store(out + (row * features + f) * SIZE + number, seen, mask=inside)


def gate_inputs(x: Tensor) -> Tensor:
    """(rows, 2 · features) to (rows, features): the first half times the sigmoid of the second."""
    rows, features = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    _gate[(rows, triton.cdiv(features, BLOCK))](
        x, out, x.stride(0), features, BLOCK=BLOCK, OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device),
        num_warps=2,
    )  # fmt: skip
    return out


def window_step(x: Tensor, before: Tensor, taps: Tensor, gated: bool = False, softmax: bool = False) -> Tensor:
    """x (rows, features), or (rows, 2 · features) if `gated` (see `gate_inputs`); `before` (rows, size − 1, features),
    which moves on; filters `taps` (filters, size), or (rows, filters, size) of each row, for consecutive features each,
    after a `softmax` or as they are. The result: (rows, features)."""
    rows, _, features = before.shape
    assert before.is_contiguous() and taps.stride(-1) == 1 and x.stride(1) == 1
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    _window_step[(rows, triton.cdiv(features, BLOCK))](
        x, before, taps, out, x.stride(0), features, taps.stride(0) if taps.dim() == 3 else 0, taps.stride(-2),
        SHARE=features // taps.shape[-2], SIZE=taps.shape[-1], GATED=gated, SOFTMAX=softmax, BLOCK=BLOCK,
        OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=2,
    )  # fmt: skip
    return out


def gather_window(x: Tensor, before: Tensor) -> Tensor:
    """x (rows, features) behind `before` (rows, size − 1, features), which moves on: (rows, features · size), the
    positions of a feature side by side."""
    rows, back, features = before.shape
    assert before.is_contiguous() and x.stride(1) == 1
    out = torch.empty(rows, features * (back + 1), dtype=x.dtype, device=x.device)
    _gather_window[(rows, triton.cdiv(features, BLOCK))](
        x, before, out, x.stride(0), features, SIZE=back + 1, BLOCK=BLOCK, OVERLAP=has_pdl(x.device),
        launch_pdl=has_pdl(x.device), num_warps=2,
    )  # fmt: skip
    return out
