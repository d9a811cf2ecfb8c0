"""FLOPs that the parts of a model compute, counted operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class PartFlops(TorchDispatchMode):
    """Inside, counts what each of these modules computes, by module: products of matrices (`products`), those of them
    that read a weight as it is (`maps`), and elements that any other operation reads or writes (`elements`)."""

    def __init__(self, model: nn.Module, parts: list[nn.Module]) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self.parts, self.inside, self.hooks = parts, None, list[Any]()
        self.tokens, self.products, self.maps, self.elements = (Counter[nn.Module]() for _ in range(4))

    def __enter__(self) -> PartFlops:
        for part in self.parts:
            self.hooks += [part.register_forward_pre_hook(self._begin), part.register_forward_hook(self._end)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def _begin(self, part: Any, inputs: Any) -> None:
        self.inside = part
        self.tokens[part] += inputs[0].shape[0] * inputs[0].shape[1]

    def _end(self, *_: Any) -> None:
        self.inside = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside is None or func.is_view:
            return out
        read = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        if (flops := flop_registry.get(func.overloadpacket)) is not None:
            count = flops(*args, **(kwargs or {}), out_val=out) * reals(read[0])
            self.products[self.inside] += count
            if any(one.untyped_storage().data_ptr() in self.weights for one in read):
                self.maps[self.inside] += count
        else:
            used = [one for one in (*read, *tree_leaves(out)) if isinstance(one, Tensor)]
            self.elements[self.inside] += max((one.numel() * reals(one) for one in used), default=0)
        return out

    def bounds(self, part: nn.Module) -> tuple[float, float]:
        """The least and the most FLOPs per token that may be declared.

        A map by a weight counts in full. A product of two tokens' features may be masked afterwards: what a pattern
        hides is computed here, but not declared. Elementwise work may be declared or left out, at two FLOPs an element.
        """
        tokens = self.tokens[part]
        return self.maps[part] / tokens, (self.products[part] + 2 * self.elements[part]) / tokens


def reals(tensor: Tensor) -> int:
    """Products of real numbers in one of its own."""
    return 4 if tensor.is_complex() else 1 if tensor.is_floating_point() else 0


def part_flops(model: nn.Module, parts: list[nn.Module], run: Callable[[], Any]) -> PartFlops:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), PartFlops(model, parts) as found:
        run()
    return found
