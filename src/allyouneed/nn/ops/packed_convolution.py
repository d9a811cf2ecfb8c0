"""One long causal filter for each feature over the sentences of packed rows, without the host: y_t = Σ_s K_{t−s} u_s
over the tokens s of t's sentence up to t.

Rows are cut into halves of halves. Only one sentence spans the middle of a piece, so that what its right half gets from
its left half is one product of spectra, of inputs and outputs masked by that sentence. Pieces of BLOCK tokens are
convolved directly (kernels/triton/training/packed_convolution.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.kernels import usable
from allyouneed.nn.ops.power_series import circular_product
from allyouneed.nn.ops.unpack import flip_starts

BLOCK = 256  # tokens


def packed_convolution(u: Tensor, kernel: Tensor, starts: Tensor) -> Tensor:
    """u (batch, time, features), kernel (features, time), starts (batch, time): where the sentence of each token
    begins."""
    (_, time, _), at = u.shape, torch.arange(u.shape[1], device=u.device)
    if not u.numel():
        return u
    near = starts.maximum(at // BLOCK * BLOCK).int()
    ends = (time - 1 - flip_starts(near).flip(1)).int()
    y: Tensor = convolve(u.contiguous(), kernel[:, :BLOCK].T.contiguous(), near.contiguous(), ends.contiguous(), False)
    half = BLOCK
    while half < time:
        y = y + _across(u, kernel, starts, half)
        half *= 2
    return y


def _across(u: Tensor, kernel: Tensor, starts: Tensor, half: int) -> Tensor:
    """What the right half of each piece of 2 · `half` tokens gets from its left half."""
    time, size = u.shape[1], 2 * half
    begins = pad(starts, (0, -time % size), value=time).unflatten(1, (-1, size))  # (batch, pieces, size)
    pieces = pad(u, (0, 0, 0, -time % size)).unflatten(1, (-1, size))
    at = torch.arange(begins.shape[1] * size, device=u.device).view(-1, size)
    from_left = at[:, :half] >= begins[..., half, None]
    to_right = begins[..., half:] < at[:, half, None]
    left = (pieces[:, :, :half] * from_left[..., None]).transpose(2, 3)  # (batch, pieces, features, half)
    right = circular_product(left, kernel[:, :size], size, size)[..., half:].transpose(2, 3) * to_right[..., None]
    return pad(right, (0, 0, half, 0)).flatten(1, 2)[:, :time]


@torch.library.custom_op("allyouneed::packed_convolution", mutates_args=())
def convolve(x: Tensor, taps: Tensor, starts: Tensor, ends: Tensor, back: bool) -> Tensor:
    """y_t = Σ_s taps_{t−s} x_s from starts[t] to t; `back`: Σ_s taps_{s−t} x_s from t to ends[t]. taps (count,
    features); no sentence is longer than `count`."""
    if usable(x):
        from allyouneed.kernels.triton.training.packed_convolution import convolve as kernel

        return kernel(x, taps, starts, ends, back)
    y = torch.zeros_like(x)
    for apart in range(min(len(taps), x.shape[1])):
        y += taps[apart].to(x.dtype) * _shifted(x, starts, ends, -apart if back else apart)
    return y


convolve.register_fake(lambda x, *rest: torch.empty_like(x))


@torch.library.custom_op("allyouneed::packed_convolution_taps", mutates_args=())
def grad_taps(x: Tensor, dy: Tensor, starts: Tensor, ends: Tensor, count: int) -> Tensor:
    """The gradient of the taps of `convolve`."""
    if usable(x):
        from allyouneed.kernels.triton.training.packed_convolution import grad_taps as kernel

        return kernel(x, dy, starts, count).to(x.dtype)
    found = x.new_zeros(count, x.shape[2])
    for apart in range(min(count, x.shape[1])):
        found[apart] = (_shifted(x, starts, ends, apart) * dy).sum((0, 1))
    return found


grad_taps.register_fake(lambda x, dy, starts, ends, count: x.new_empty(count, x.shape[2]))


def _shifted(x: Tensor, starts: Tensor, ends: Tensor, apart: int) -> Tensor:
    """The tokens that are `apart` before each in its sentence; 0 where there are none."""
    at = torch.arange(x.shape[1], device=x.device) - apart
    inside = (at >= starts) & (at <= ends)
    return x.roll(apart, 1) * inside[..., None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, back = inputs
    assert not back
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, taps, starts, ends = ctx.saved_tensors
    dy = dy.contiguous()
    return convolve(dy, taps, starts, ends, True), grad_taps(x, dy, starts, ends, len(taps)), None, None, None


convolve.register_autograd(_gradients, setup_context=_save)
