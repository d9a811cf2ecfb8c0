"""Gradients together with their sums over tokens, and the norm of a sum that one of them belongs to, as custom
operators that a compiler leaves alone.

A bias gradient is a sum over all tokens of a tensor that another kernel has just written. Summing it separately reads
that tensor from memory again; these operators return the sums with it. Each has its plain definition here and one
kernel in kernels/triton/fused_backward.py. Registering operators takes 0.2 s, so only GPU training imports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from allyouneed.kernels import usable

# tokens per partial sum, and per sum of the norm of a sum; the final sum over partial sums is cheap
ROWS, NORM_ROWS = 64, 32


class Activation(NamedTuple):
    """An activation function and its derivative."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation, through (1 + tanh u) / 2 = σ(2u): tanh costs a GPU more than loading x, while
    e^x is one instruction."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def _gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


ACTIVATIONS = {
    "relu": Activation(functional.relu, lambda x: (x > 0).to(x.dtype)),
    "relu-squared": Activation(lambda x: functional.relu(x).square(), lambda x: 2 * x.clamp(min=0)),
    "gelu": Activation(functional.gelu, _gelu_derivative),
    "gelu-tanh": Activation(gelu_tanh, _gelu_tanh_derivative),
    "silu": Activation(functional.silu, lambda x: torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))),
}


@torch.library.custom_op("allyouneed::activation_backward", mutates_args=())
def activation_backward(gradient: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient with respect to x (…, width) of activation(x), and its partial sums over tokens (parts, width)."""
    if usable(x):
        from allyouneed.kernels.triton import fused_backward

        return fused_backward.activation_backward(gradient.contiguous(), x.contiguous(), kind, ROWS)
    wide = torch.promote_types(x.dtype, torch.float32)
    result = gradient.to(wide) * ACTIVATIONS[kind].derivative(x.to(wide))
    return result.to(x.dtype).contiguous(), _partial_sums(result)


activation_backward.register_fake(lambda gradient, x, kind: (_empty(x), _empty_sums(x)))


@torch.library.custom_op("allyouneed::merge_heads", mutates_args=())
def merge_heads(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate (batch, heads, time, head_width) tensors of unequal head counts to (batch, time, width), with the
    partial sums of the result over tokens (parts, width)."""
    if usable(parts[0]):
        from allyouneed.kernels.triton import fused_backward

        return fused_backward.merge_heads(parts, ROWS)
    result = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
    return result, _partial_sums(result)


@merge_heads.register_fake
def _(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch, _, time, _ = parts[0].shape
    result = parts[0].new_empty(batch, time, sum(part.shape[1] * part.shape[3] for part in parts))
    return result, _empty_sums(result)


@torch.library.custom_op("allyouneed::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    gradient: Tensor, residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient with respect to x (…, width) of LayerNorm(x), whose own gradient is `gradient`, plus the gradient
    of the residual connection around it; and partial sums over tokens (3, parts, width) of the gradients of the norm's
    weight, of its bias and of the residual."""
    if usable(x):
        from allyouneed.kernels.triton import fused_backward

        contiguous = gradient.contiguous(), residual.contiguous(), x.contiguous()
        return fused_backward.layer_norm_backward(*contiguous, weight, mean, scale, ROWS)
    wide = torch.promote_types(x.dtype, torch.float32)
    normal, slope = (x.to(wide) - mean) * scale, gradient.to(wide) * weight
    slope -= slope.mean(-1, keepdim=True) + normal * (slope * normal).mean(-1, keepdim=True)
    result = residual.to(wide) + scale * slope
    summands = (gradient.to(wide) * normal, gradient.to(wide), residual.to(wide))
    return result.to(x.dtype).contiguous(), torch.stack([_partial_sums(one) for one in summands])


layer_norm_backward.register_fake(lambda gradient, residual, x, *rest: (_empty(x), _empty_sums(x, None, 3)))


@torch.library.custom_op("allyouneed::add_norm", mutates_args=())
def add_norm(
    x: Tensor, y: Tensor, shift: Tensor | None, seed: Tensor | None, dropout: float, weight: Tensor, bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """LayerNorm(total), total = x + kept · (y + shift) / (1 − dropout) (…, width); then total, kept (bool; empty
    without a `seed`, when nothing is dropped), and the mean and reciprocal deviation (…, 1) of each token. `seed` (1,)
    int64: of the random numbers; a kernel decides on eight features with one draw, the compiler on one."""
    if usable(x):
        from allyouneed.kernels.triton import fused_backward

        given = x.contiguous(), y.contiguous(), shift, seed
        return fused_backward.add_norm(*given, dropout, weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    branch = y.to(wide) if shift is None else y.to(wide) + shift
    kept = torch.empty(0, dtype=torch.bool, device=x.device)
    if seed is not None:
        generator = torch.Generator(x.device).manual_seed(int(seed))
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= dropout
        branch = branch * kept / (1 - dropout)
    total = (x.to(wide) + branch).to(x.dtype)
    normal, mean, scale = torch.native_layer_norm(total.to(wide), x.shape[-1:], weight, bias, eps)
    return normal.to(x.dtype).contiguous(), total.contiguous(), kept, mean, scale


@add_norm.register_fake
def _(x: Tensor, y: Tensor, shift: Tensor | None, seed: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    kept = torch.empty(x.shape if seed is not None else 0, dtype=torch.bool, device=x.device)
    mean = x.new_empty(*x.shape[:-1], 1, dtype=torch.promote_types(x.dtype, torch.float32))
    return _empty(x), _empty(x), kept, mean, torch.empty_like(mean)


@torch.library.custom_op("allyouneed::add_norm_backward", mutates_args=())
def add_norm_backward(
    gradient: Tensor, second: Tensor | None, total: Tensor, kept: Tensor | None, factor: float, weight: Tensor,
    mean: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to x and y (…, width) of LayerNorm(total), total = x + factor · kept · y, whose own is
    `gradient`, or its sum with `second`. Without `kept` (bool) both are the same, and the second result is empty. And
    partial sums over tokens (3, parts, width) of the gradients of the norm's weight, of its bias and of y."""
    if usable(total):
        from allyouneed.kernels.triton import fused_backward

        more = None if second is None else second.contiguous()
        dropout = None if kept is None else kept.contiguous()
        return fused_backward.add_norm_backward(
            gradient.contiguous(), more, total.contiguous(), dropout, factor, weight, mean, scale, NORM_ROWS
        )
    wide = torch.promote_types(total.dtype, torch.float32)
    normal = (total.to(wide) - mean) * scale
    above = gradient.to(wide) if second is None else gradient.to(wide) + second.to(wide)
    slope = above * weight
    slope = scale * (slope - slope.mean(-1, keepdim=True) - normal * (slope * normal).mean(-1, keepdim=True))
    of_y = slope if kept is None else slope * kept * factor
    sums = torch.stack([_partial_sums(one, NORM_ROWS) for one in (above * normal, above, of_y)])
    result = slope.to(total.dtype).contiguous()
    return result, total.new_empty(0) if kept is None else of_y.to(total.dtype).contiguous(), sums


@add_norm_backward.register_fake
def _(gradient: Tensor, second: Tensor | None, total: Tensor, kept: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _empty(total), total.new_empty(0) if kept is None else _empty(total), _empty_sums(total, NORM_ROWS, 3)


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_sums(x: Tensor, tokens: int | None = None, *count: int) -> Tensor:
    rows, wide = x.numel() // x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(*count, -(-rows // (tokens or ROWS)), x.shape[-1], dtype=wide)


def _partial_sums(x: Tensor, tokens: int | None = None) -> Tensor:
    sums = _empty_sums(x, tokens).zero_()
    sums[:1] = x.flatten(0, -2).to(sums.dtype).sum(0)
    return sums
