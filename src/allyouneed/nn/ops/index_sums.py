"""Values looked up by a number, and sums of what has the same number: Shaw's vectors by clipped distance. Either is the
other's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels import usable

MOST = 128  # numbers that a kernel adds up in registers


def lookup(values: Tensor, index: Tensor) -> Tensor:
    """`values` (batch, heads, lines, count) at `index` (batch or 1, 1, lines, keys): (batch, heads, lines, keys)."""
    if not _has_kernel(values, values.shape[-1]):
        return values.gather(-1, index.expand(*values.shape[:3], -1))
    return Lookup.apply(values, index)


def index_sums(weights: Tensor, index: Tensor, count: int) -> Tensor:
    """The sums of `weights` (batch, heads, lines, keys) with the same `index` (batch or 1, 1, lines, keys) below
    `count`: (batch, heads, lines, count)."""
    if not _has_kernel(weights, count):
        return weights.new_zeros(*weights.shape[:3], count).scatter_add(-1, index.expand_as(weights), weights)
    return IndexSums.apply(weights, index, count)


def _has_kernel(x: Tensor, count: int) -> bool:
    return count <= MOST and usable(x) and not torch.compiler.is_compiling()


def _sums(weights: Tensor, index: Tensor, count: int) -> Tensor:
    from allyouneed.kernels.triton.training.index_sums import index_sums as kernel

    return kernel(weights, index, count)


class Lookup(torch.autograd.Function):
    """`lookup`, by the kernel."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = values.shape[-1]
        return values.gather(-1, index.expand(*values.shape[:3], -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _sums(gradients[0], index, ctx.count), None


class IndexSums(torch.autograd.Function):
    """`index_sums`, by the kernel."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return _sums(weights, index, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].gather(-1, index.expand(*gradients[0].shape[:3], -1)), None, None
