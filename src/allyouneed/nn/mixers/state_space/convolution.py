"""The short convolution in front of a selective state space: one causal filter per feature, then SiLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable

UNROLLED = 8  # most taps that the GPU kernel takes


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

    def forward(
        self, x: Tensor, before: Tensor, real: Tensor | None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """y (batch, time, features), given the last size − 1 inputs before x; and the last ones after each row's real
        tokens. `real` (batch, time) bool is left-aligned. `starts` (batch, time) of packed rows (ops/unpack.py): inputs
        before the token's sentence count as zeros."""
        last = self._last(x, before, real)
        if usable(x) and x.numel() and self.size <= UNROLLED:
            from allyouneed.kernels.triton.short_convolution import short_convolution

            return short_convolution(x, before, self.taps, self.shift, starts), last
        seen = torch.cat((before.to(x.dtype), x), 1)
        shift = None if self.shift is None else self.shift.to(x.dtype)
        if starts is not None:
            y = torch.zeros_like(x) if shift is None else shift.expand_as(x)
            at = torch.arange(x.shape[1], device=x.device)
            for tap, back in zip(self.taps.to(x.dtype).unbind(1), range(self.size - 1, -1, -1), strict=True):
                inside = (at - back >= starts)[..., None]
                y = y + tap * seen[:, self.size - 1 - back :][:, : x.shape[1]] * inside
            return nn.functional.silu(y), last
        y = nn.functional.conv1d(
            seen.transpose(1, 2), self.taps.to(x.dtype)[:, None], shift, groups=self.features
        ).transpose(1, 2)
        return nn.functional.silu(y), last

    def _last(self, x: Tensor, before: Tensor, real: Tensor | None) -> Tensor:
        """The last size − 1 of the inputs before x and the real ones of x."""
        count, time = self.size - 1, x.shape[1]
        if real is None:
            return x[:, time - count :] if time >= count else torch.cat((before[:, time:].to(x.dtype), x), 1)
        index = (real.sum(1)[:, None] + torch.arange(count, device=x.device))[..., None]  # (batch, size − 1, 1)
        old = before.to(x.dtype).gather(1, index.clamp(max=count - 1).expand(-1, -1, self.features))
        new = x.gather(1, (index - count).clamp(min=0).expand(-1, -1, self.features)) if time else old
        return torch.where(index < count, old, new)

    def begin(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, self.size - 1, self.features)


def draw_steps(count: int) -> Tensor:
    """Inverse softplus of `count` time steps, log-uniform between 0.001 and 0.1 (Gu, Dao 2023, 3.6)."""
    low, high = torch.tensor([0.001, 0.1]).log()
    steps = (torch.rand(count) * (high - low) + low).exp().clamp(min=1e-4)
    return steps + (-torch.expm1(-steps)).log()
