"""Linear maps: what every projection of every other part is made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from torch import nn

from allyouneed.config import Part
from allyouneed.nn.cost import Cost


class Linear(Part, slot="linear map"):
    """`outputs` may be the sizes of several maps of one input, made by one product, whose outputs stand side by side
    (queries, keys and values): a map that measures its own weights measures each by itself."""

    @abstractmethod
    def build(self, inputs: int, outputs: int | Sequence[int], bias: bool) -> nn.Module: ...

    @abstractmethod
    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost: ...


def sizes(outputs: int | Sequence[int]) -> tuple[int, ...]:
    return (outputs,) if isinstance(outputs, int) else tuple(outputs)


class Dense(Linear):
    """y = xA^T + b."""

    kind: Literal["dense"] = "dense"

    def build(self, inputs: int, outputs: int | Sequence[int], bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias) if isinstance(outputs, int) else Joined(inputs, outputs, bias)

    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost:
        return Cost(parameters=outputs * (inputs + bias), flops=2 * inputs * outputs)


class Joined(nn.Linear):
    """Several maps of one input made by one product; `outputs`: of each of them."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool) -> None:
        super().__init__(inputs, sum(outputs), bias=bias)
        self.outputs = tuple(outputs)
