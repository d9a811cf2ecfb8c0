"""Dense maps whose products are computed in another way while training, swapped into a model from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.sublayer import SubLayer


class SwappedLinear(nn.Linear):
    """A dense map that computes `product` while training, and is the plain map otherwise: in validation, and in the
    saved model."""

    computes_as: ClassVar[type]

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(x, self.bias)

    def with_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.training or x.numel() == 0:
            return functional.linear(x, self.weight, bias)
        return self.product(x, bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Aᵀ + bias"""
        raise NotImplementedError


def swap_linears(model: nn.Module, swapped: type[SwappedLinear], suits: Callable[[nn.Linear], bool]) -> list[str]:
    """Let dense maps of sub-layers compute as `swapped` does; returns their names. Left alone are maps that are not
    called (`SubLayer.calls_maps`), embeddings, heads, maps that were swapped before and those that do not suit."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, SubLayer)}
    uncalled = {inner for part in parts.values() if not part.calls_maps for inner in part.modules()}
    found = []
    for name, part in parts.items():
        if part in uncalled:
            continue
        for key, child in part.named_children():
            if is_dense(child) and suits(child) and isinstance(child, swapped) == isinstance(child, SwappedLinear):
                child.__class__ = _swapped_class(swapped, type(child))  # type: ignore[arg-type]  # types hash
                found.append(f"{name}.{key}")
    return found


@functools.cache
def _swapped_class(swapped: type[SwappedLinear], plain: type) -> type:
    if issubclass(plain, swapped):
        return plain
    return type(f"{swapped.__name__}{plain.__name__}", (swapped, plain), {"computes_as": plain})


def linear(x: Tensor, module: Any, bias: Tensor | None) -> Tensor:
    """The product of a dense map, with this bias instead of its own."""
    if isinstance(module, SwappedLinear):
        return module.with_bias(x, bias)
    return functional.linear(x, module.weight, bias)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: autocast's, if it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
