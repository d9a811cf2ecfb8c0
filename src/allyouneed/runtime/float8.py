"""Training with 8-bit matrix products (`precision: fp8`), swapped into a model from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.errors import UserError
from allyouneed.nn.ops.float8 import MULTIPLE, float8_linear
from allyouneed.runtime.swapped_linear import SwappedLinear, swap_linears

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
    are maps whose sizes are no multiples of 16, experts, embeddings and heads."""
    return swap_linears(model, Float8Linear, lambda map: not any(size % MULTIPLE for size in map.weight.shape))


class Float8Linear(SwappedLinear):
    """A dense map that multiplies in 8 bits while training under autocast."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return functional.linear(x, self.weight, bias)
        return float8_linear(x, self.weight, bias, torch.get_autocast_dtype(kind))
