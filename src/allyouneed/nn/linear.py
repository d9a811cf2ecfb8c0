"""Linear maps: what every projection of every other part is made of."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import nn

from allyouneed.config import Part
from allyouneed.nn.cost import Cost


class Linear(Part, slot="linear map"):
    @abstractmethod
    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module: ...

    @abstractmethod
    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost: ...


class Dense(Linear):
    """y = xA^T + b."""

    kind: Literal["dense"] = "dense"

    def build(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias)

    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost:
        return Cost(parameters=outputs * (inputs + bias), flops=2 * inputs * outputs)
