"""Convolution by a filter for each token and head: y_t = Σ_j w_{t,j} x_{t+j−left} over the tokens of the row. On a GPU
tiles of the band of weights are factors of matrix products (kernels/triton/training/banded.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.kernels import usable

WIDEST = 256  # features of a head that fit in a program


def banded(x: Tensor, weights: Tensor, left: int) -> Tensor:
    """x (batch, time, heads, features), weights (batch, time, heads, size) to the shape of x."""
    if usable(x) and x.shape[3] <= WIDEST:
        found: Tensor = multiply(x.contiguous(), weights.to(x.dtype).contiguous(), left, False)
        return found
    return _sums(x, weights.to(x.dtype), left, False)


def _sums(x: Tensor, weights: Tensor, left: int, back: bool) -> Tensor:
    """The definition, offset by offset, so that windows are never stored; `back`: of the transposed band."""
    time, size, y = x.shape[1], weights.shape[3], torch.zeros_like(x)
    for number in range(size):
        by, weight = number - left, weights[..., number, None]
        y = y + (_moved(weight * x, -by, time) if back else weight * _moved(x, by, time))
    return y


def _moved(x: Tensor, by: int, time: int) -> Tensor:
    """x at each token + `by`; 0 outside of the row."""
    return pad(x, (0, 0, 0, 0, -by, by)) if abs(by) < time else torch.zeros_like(x)


@torch.library.custom_op("allyouneed::banded", mutates_args=())
def multiply(x: Tensor, weights: Tensor, left: int, back: bool) -> Tensor:
    if usable(x):
        from allyouneed.kernels.triton.training.banded import multiply as kernel

        return kernel(x, weights, left, back)
    return _sums(x, weights, left, back)


multiply.register_fake(lambda x, *rest: torch.empty_like(x))


@torch.library.custom_op("allyouneed::banded_weights", mutates_args=())
def grad_weights(x: Tensor, dy: Tensor, weights: Tensor, left: int) -> Tensor:
    if usable(x):
        from allyouneed.kernels.triton.training.banded import grad_weights as kernel

        return kernel(x, dy, weights, left)
    offsets = range(-left, weights.shape[3] - left)
    return torch.stack([(_moved(x, by, x.shape[1]) * dy).sum(-1) for by in offsets], -1)


grad_weights.register_fake(lambda x, dy, weights, left: torch.empty_like(weights))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, ctx.left, back = inputs
    assert not back
    ctx.save_for_backward(x, weights)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x, weights), dy = ctx.saved_tensors, dy.contiguous()
    return multiply(dy, weights, ctx.left, True), grad_weights(x, dy, weights, ctx.left), None, None


multiply.register_autograd(_gradients, setup_context=_save)
