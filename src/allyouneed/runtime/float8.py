"""Training with 8-bit matrix products (`precision: fp8`), swapped into a model from outside."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.errors import UserError
from allyouneed.nn.channels.moe import MoEModule
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.ops.float8 import MULTIPLE, float8_linear
from allyouneed.nn.sublayer import SubLayer

CAPABILITY = (8, 9)  # the first NVIDIA GPUs with 8-bit float matrix units (Ada)


def check_device(device: torch.device) -> None:
    """Raise where 8-bit products do not run; a CPU computes the same with rounded factors."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise UserError("precision: fp8 needs an NVIDIA GPU; use precision: bf16")
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, CAPABILITY))
        raise UserError(
            f"precision: fp8 needs a GPU of compute capability {needed} or newer; {name} has "
            f"{'.'.join(map(str, found))}; use precision: bf16"
        )


def use_float8(model: nn.Module) -> list[str]:
    """Let the dense linear maps of all sub-layers multiply in 8 bits while training; returns their names. Left alone
    are maps whose sizes are no multiples of 16, experts (one grouped product), embeddings and heads."""
    experts = {part for moe in model.modules() if isinstance(moe, MoEModule) for part in moe.modules()}
    found = []
    for name, part in model.named_modules():
        if not isinstance(part, SubLayer) or part in experts:
            continue
        for key, child in part.named_children():
            if is_dense(child) and not any(size % MULTIPLE for size in child.weight.shape):
                child.__class__ = _float8_class(type(child))  # type: ignore[arg-type]  # types hash
                found.append(f"{name}.{key}")
    return found


class Float8Linear(nn.Linear):
    """A dense map that multiplies in 8 bits while training under autocast, and is the plain map otherwise: validation
    and the saved model compute in bf16."""

    computes_as: ClassVar[type]

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(x, self.bias)

    def with_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        if not self.training or not torch.is_autocast_enabled(kind) or x.numel() == 0:
            return functional.linear(x, self.weight, bias)
        return float8_linear(x, self.weight, bias, torch.get_autocast_dtype(kind))


@functools.cache
def _float8_class(plain: type) -> type:
    if issubclass(plain, Float8Linear):
        return plain
    return type(f"Float8{plain.__name__}", (Float8Linear, plain), {"computes_as": plain})


def linear(x: Tensor, module: Any, bias: Tensor | None) -> Tensor:
    """The product of a dense map, with this bias instead of its own."""
    if isinstance(module, Float8Linear):
        return module.with_bias(x, bias)
    return functional.linear(x, module.weight, bias)
