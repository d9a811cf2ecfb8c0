"""What the checks of kernels share: errors and their limits, and the starts of packed sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

Sizes = Sequence[int]


class Check:
    def __init__(self, device: str, models: Sequence[str] = ()) -> None:
        """`models`: those of the decode steps that are checked; none: all."""
        self.device, self.wrong, self.models = device, 0, models

    def leaf(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(self.device, dtype).requires_grad_()

    def report(self, name: str, found: Sequence[Tensor], exact: Sequence[Tensor], limit: float) -> None:
        errors = []
        for own, other in zip(found, exact, strict=True):
            own, other = own.detach().double(), other.detach()
            errors.append(float((own - other).norm() / other.norm().clamp(min=1e-9)))
        good = all(error <= limit for error in errors)
        self.wrong += not good
        print(f"{name:62s} {' '.join(f'{e:.1e}' for e in errors)}  {'ok' if good else 'DIFFERS'}", flush=True)


def random_starts(batch: int, time: int, device: str) -> Tensor:
    """Where the sentence of each token begins in packed rows of random sentences, some of one token."""
    steps = torch.arange(time)
    first = (torch.rand(batch, time) < torch.tensor([[0.02], [0.3]]).repeat(batch, 1)[:batch]) | (steps == 0)
    return torch.where(first, steps, 0).cummax(1).values.int().to(device)
