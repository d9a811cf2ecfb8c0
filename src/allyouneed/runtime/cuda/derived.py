"""Tensors that kernels read and that are computed from weights: once, and again when weights may have changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allyouneed.runtime.cuda.static_cache import StaticStates


@torch.no_grad()
def derive(states: StaticStates, compute: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """What `compute` makes of weights, in this precision (default: that of the states). `states.refresh` computes it
    again into the same memory, which graphs have captured."""
    found = compute().to(dtype or states.dtype, copy=True)

    @torch.no_grad()
    def update() -> None:
        found.copy_(compute())

    states.derived.append(update)
    return found
