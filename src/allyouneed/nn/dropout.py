"""Dropout (Srivastava et al. 2014) with cheap random numbers: on CPU one 64-bit draw serves four features."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """x · keep / (1 − p), keep ~ Bernoulli(1 − p). On CPU p is rounded to a multiple of 2^-16, and the scale
    accordingly."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return nn.functional.dropout(x, self.p)
        limit = min(round(self.p * 65536), 65535)  # keep probability stays positive
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        keep = draws.view(torch.int16)[: x.numel()].view(x.shape) >= limit - 32768
        return x * (keep.to(x.dtype) * (65536 / (65536 - limit)))

    def extra_repr(self) -> str:
        return f"p={self.p}"
