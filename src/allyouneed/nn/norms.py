"""Normalisation of one token's features."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost


class Norm(Part, slot="norm"):
    """Builds a module that is called as `norm(x, context)`: some norms need to know which places are padding."""

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...

    @abstractmethod
    def cost(self, width: int) -> Cost: ...


class LayerNorm(Norm):
    """Ba, Kiros, Hinton 2016, "Layer Normalization", eq. 4."""

    kind: Literal["layer"] = "layer"
    eps: float = 1e-5
    bias: bool = True

    def build(self, width: int) -> nn.Module:
        return LayerNormModule(width, eps=self.eps, bias=self.bias)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=width * (1 + self.bias))


class LayerNormModule(nn.LayerNorm):
    def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]  # norms see the context
        return super().forward(x)


class RMSNorm(Norm):
    """Zhang, Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4."""

    kind: Literal["rms"] = "rms"
    eps: float = 1e-6

    def build(self, width: int) -> nn.Module:
        return RMSNormModule(width, self.eps)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=width)


class RMSNormModule(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
