"""Many experts at once: rows sorted by expert, and linear maps that use the weights of each row's own expert.

Everything here has shapes that do not depend on the routing and never waits for the device, except `grouped_linear`
where no kernel applies: then it is the definition, one product per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, linear

from allyouneed.kernels import usable, usable_without_grad

FEW = 256  # rows up to which reading the weights takes longer than the products


class Groups(NamedTuple):
    """Choices (top, tokens), flattened, in the order of their experts."""

    order: Tensor  # (rows,) the choice that is in each row
    inverse: Tensor  # (top · tokens,) the row of each choice
    ends: Tensor  # (experts,) int32, the end of each expert's rows
    top: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Groups:
        """chosen (top, tokens): an expert for each."""
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = count(chosen.flatten(), experts).cumsum(0, dtype=torch.int32)
        return cls(order, inverse, ends, len(chosen))


def count(numbers: Tensor, size: int, real: Tensor | None = None) -> Tensor:
    """How often each of 0 … size − 1 occurs, or occurs where `real`; bincount would wait for the device."""
    ones = torch.ones_like(numbers) if real is None else real.to(numbers.dtype)
    return torch.zeros(size, dtype=numbers.dtype, device=numbers.device).scatter_add_(0, numbers, ones)


def arrival(groups: Tensor, size: int) -> Tensor:
    """For each entry, the number of earlier ones in the same of `size` groups."""
    order, sizes = groups.argsort(stable=True), count(groups, size)
    firsts = (sizes.cumsum(0) - sizes)[groups[order]]
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) - firsts)


def spread(tokens: Tensor, groups: Groups) -> Tensor:
    """(tokens, width) to (rows, width), each token once for each of its experts."""
    return _Spread.apply(tokens, groups.order, groups.inverse)


def collect(rows: Tensor, groups: Groups) -> Tensor:
    """(rows, width) to (top, tokens, width)."""
    found: Tensor = _Collect.apply(rows, groups.order, groups.inverse)
    return found.unflatten(0, (groups.top, -1))


class _Spread(torch.autograd.Function):
    """Its gradient gathers too: torch's would add up atomically, in any order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = len(tokens)
        return tokens[order % max(len(tokens), 1)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse].unflatten(0, (-1, ctx.tokens)).sum(0), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[inverse]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order], None, None


def grouped_linear(x: Tensor, maps: Sequence[nn.Linear], ends: Tensor) -> Tensor:
    """x (…, rows, inputs), sorted by expert; map i is that of expert i."""
    shape, x = x.shape, x.flatten(0, -2)
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    x = x.to(dtype)
    if len(x) <= FEW and usable_without_grad(x) and same_dtype(maps, dtype):
        from allyouneed.kernels.triton.expert_linear import expert_linear

        found = expert_linear(x, maps, ends)
    elif usable(x) and dtype == torch.bfloat16 and maps[0].in_features % 8 == 0 and maps[0].out_features % 8 == 0:
        found = grouped_products(x, maps, ends)
    else:
        found = each_alone(x, maps, ends)
    return found.unflatten(0, shape[:-1])


def each_alone(x: Tensor, maps: Sequence[nn.Linear], ends: Tensor) -> Tensor:
    """The definition of `grouped_linear`."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(x.split(sizes), maps, strict=True)
    found = [
        linear(part, one.weight.to(x.dtype), None if one.bias is None else one.bias.to(x.dtype))
        for part, one in parts
        if len(part)
    ]
    return torch.cat(found) if found else x.new_zeros(0, maps[0].out_features)


def grouped_products(x: Tensor, maps: Sequence[nn.Linear], ends: Tensor) -> Tensor:
    """One grouped matrix product over stacked weights."""
    weights: Tensor = _Stack.apply(x.dtype, *(one.weight for one in maps))  # (experts, outputs, inputs)
    found: Tensor = grouped_mm(x, weights.mT, offs=ends)
    if maps[0].bias is None:
        return found
    biases: Tensor = _Stack.apply(x.dtype, *(one.bias for one in maps))
    # by a product, whose gradient adds up faster than that of indexing
    experts = torch.searchsorted(ends, torch.arange(len(x), dtype=torch.int32, device=x.device), right=True)
    own = experts[:, None] == torch.arange(len(maps), device=x.device)
    return torch.addmm(found, own.to(x.dtype), biases)


class _Stack(torch.autograd.Function):
    """Weights of all experts in one tensor of this dtype; their gradients are parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.dtype = weights[0].dtype
        whole = torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=weights[0].device)
        for part, weight in zip(whole.unbind(), weights, strict=True):
            part.copy_(weight)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradient.to(ctx.dtype).unbind()


def same_dtype(maps: Sequence[nn.Linear], dtype: torch.dtype) -> bool:
    """And addresses that kernels can read 16 bytes at a time from."""
    return all(one.weight.dtype == dtype and one.weight.data_ptr() % 16 == 0 for one in maps)
