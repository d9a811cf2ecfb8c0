"""The short convolution in front of a selective state space: one causal filter per feature, then SiLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """y_t = silu(Σ_j w_j ⊙ x_{t−size+1+j} + b). Not a `weight`, which inits would draw as a matrix."""

    def __init__(self, features: int, size: int, bias: bool) -> None:
        super().__init__()
        self.features, self.size = features, size
        self.taps = nn.Parameter(torch.empty(features, size))
        self.shift = nn.Parameter(torch.empty(features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch's default for a convolution with one input per filter."""
        nn.init.uniform_(self.taps, -(self.size**-0.5), self.size**-0.5)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, x: Tensor, before: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """y (batch, time, features), given the last size − 1 inputs before x; and the last ones after each row's real
        tokens. `real` (batch, time) bool is left-aligned."""
        seen = torch.cat((before.to(x.dtype), x), 1)
        shift = None if self.shift is None else self.shift.to(x.dtype)
        y = nn.functional.conv1d(
            seen.transpose(1, 2), self.taps.to(x.dtype)[:, None], shift, groups=self.features
        ).transpose(1, 2)
        if real is None:
            last = seen[:, x.shape[1] :]
        else:
            index = real.sum(1)[:, None] + torch.arange(self.size - 1, device=x.device)  # (batch, size − 1)
            last = seen.gather(1, index[..., None].expand(-1, -1, self.features))
        return nn.functional.silu(y), last

    def begin(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, self.size - 1, self.features)


def draw_steps(count: int) -> Tensor:
    """Inverse softplus of `count` time steps, log-uniform between 0.001 and 0.1 (Gu, Dao 2023, 3.6)."""
    low, high = torch.tensor([0.001, 0.1]).log()
    steps = (torch.rand(count) * (high - low) + low).exp().clamp(min=1e-4)
    return steps + (-torch.expm1(-steps)).log()
