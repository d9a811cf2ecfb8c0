"""Linear maps whose matrix products have 8-bit factors (Micikevicius et al. 2022, "FP8 formats for deep learning").

Activations and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients to e5m2 (2 bits, up to 57,344),
each after multiplication by one scale per tensor that moves its largest magnitude to the largest number of the format.
The scale is computed from the tensor itself, on the device. Products are summed in single precision. The three of a
linear map y = xAᵀ + b, with rounded factors [·]:

    y = [x][A]ᵀ + b        dx = [dy][A]        dA = [dy]ᵀ[x]

The definition works on any device (`scaled_matmul`, which multiplies the rounded factors in single precision where
there are no 8-bit matrix units); the gradient of rounding is taken to be one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from allyouneed.torch_private import scaled_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # matrix units need inputs and outputs, and for dA the rows, in multiples of it
SMALLEST_PEAK = 1e-20  # of a tensor that is all but zero: its scale stays finite


def quantize(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(rows, features) in 8 bits, and the step that restores its magnitude: x ≈ codes · step. Values that are not
    finite make the codes NaN."""
    largest = torch.finfo(kind).max
    peak = x.detach().abs().amax(-1).amax().float()  # by rows first: a compiler joins that with what computes x
    scale = largest / peak.clamp(min=SMALLEST_PEAK)
    return (x.float() * scale).clamp(-largest, largest).to(kind), scale.reciprocal()


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """xAᵀ + b with x (…, inputs) and A (outputs, inputs), both multiples of 16; the result has this dtype."""
    rows = x.flatten(0, -2)
    if spare := -len(rows) % MULTIPLE:  # zeros add nothing to a sum
        rows = functional.pad(rows, (0, 0, 0, spare))
    out: Tensor = _Float8Linear.apply(rows, weight, bias, dtype)
    return out[: len(rows) - spare].unflatten(0, x.shape[:-1])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        codes, step = quantize(x, E4M3)
        weight_codes, weight_step = quantize(weight, E4M3)
        ctx.save_for_backward(codes, step, weight_codes, weight_step)
        ctx.dtype, ctx.inputs = dtype, [None if one is None else one.dtype for one in (x, weight, bias)]
        return scaled_matmul(codes, weight_codes, step, weight_step, bias, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, step, weight_codes, weight_step = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.inputs
        (gradient,) = gradients
        changes, change_step = quantize(gradient, E5M2)
        for_x = scaled_matmul(changes, _transposed(weight_codes), change_step, weight_step, None, ctx.dtype)
        for_weight = scaled_matmul(
            _transposed(changes), _transposed(codes), change_step, step, None, weight_dtype
        )  # (outputs, inputs)
        for_bias = None if bias_dtype is None else gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return for_x.to(x_dtype), for_weight, for_bias, None


def _transposed(codes: Tensor) -> Tensor:
    return codes.t().contiguous()
