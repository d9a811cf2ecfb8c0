"""Backward passes that read what they need once.

The gradient of a bias is a sum over all tokens of a tensor that something else has just written: to sum it up by itself
is to read it all again, and reading is what a GPU waits for there. Here whoever writes it sums it up: activations (of
`FFN`), what lays the gradients of queries, keys and values side by side, and a layer norm, which also adds the gradient
that passes it by. train/cuda/machine.py says where it is done; fused_gradients.py has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.nn.linear.dense import Joined


class Curve(NamedTuple):
    """An activation and its derivative."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def shorter_gelu_tanh(x: Tensor) -> Tensor:
    """The same numbers as GELU by tanh: (1 + tanh u) / 2 = σ(2u). On a GPU there is a long way to tanh, longer than it
    takes to bring x from memory; for e^x it has an instruction."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


CURVES = {
    "relu": Curve(functional.relu, lambda x: (x > 0).to(x.dtype)),
    "relu-squared": Curve(lambda x: functional.relu(x).square(), lambda x: 2 * x.clamp(min=0)),
    "gelu": Curve(functional.gelu, _gelu_slope),
    "gelu-tanh": Curve(shorter_gelu_tanh, _gelu_tanh_slope),
    "silu": Curve(functional.silu, lambda x: torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))),
}


def can_sum(module: Any) -> bool:
    """A dense map with a bias, whole on this process."""
    return type(module) in (nn.Linear, Joined) and whole(module.weight) and whole(module.bias)


def whole(weight: Tensor | None) -> bool:
    """It is there, and not spread over processes."""
    return type(weight) is nn.Parameter


def activated(x: Tensor, module: Any, kind: str) -> Tensor:
    """The activation of this name, of what the linear map makes of x."""
    found: Tensor = _Activated.apply(functional.linear(x, module.weight, module.bias.detach()), module.bias, kind)
    return found


def apart(x: Tensor, module: Any, sizes: Sequence[int], head_width: int) -> tuple[Tensor, ...]:
    """module(x) in parts of these sizes, head by head: (batch, heads, time, head_width) each."""
    found: tuple[Tensor, ...] = _Apart.apply(
        functional.linear(x, module.weight, module.bias.detach()), module.bias, tuple(sizes), head_width
    )
    return found


def forked(x: Tensor, weight: Tensor, bias: Tensor, eps: float, lent: Tensor | None) -> tuple[Tensor, Tensor]:
    """The layer norm of x, and x itself: what passes the norm by takes its gradient along. `lent`: the last bias of the
    sub-layer behind the norm, which is added to what passes by instead."""
    normal, passing = _Forked.apply(x, weight, bias, eps, lent)
    return normal, passing


def outcome(module: Any, x: Tensor, lent: Tensor | None) -> Tensor:
    """module(x), without its bias where that is lent."""
    found: Tensor = module(x) if lent is None else functional.linear(x, module.weight)
    return found


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return CURVES[kind].value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        from allyouneed.nn.ops.fused_gradients import sloped

        gradient, sums = sloped(gradients[0], x, ctx.kind)
        return gradient, sums.sum(0), None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, sizes: tuple[int, ...], head_width: int) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in x.split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from allyouneed.nn.ops.fused_gradients import joined

        gradient, sums = joined(list(gradients))
        return gradient, sums.sum(0), None, None


class _Forked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, lent: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.lent = lent is not None
        return normal.to(x.dtype), x.view_as(x) if lent is None else x + lent.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from allyouneed.nn.ops.fused_gradients import unnormed

        gradient, sums = unnormed(*gradients, *ctx.saved_tensors)
        weight, bias, passed = sums.sum(1).unbind()
        return gradient, weight, bias, None, passed if ctx.lent else None
