"""Linear maps: the slot, and the dense map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeGuard

from torch import nn

from allyouneed.config import Part
from allyouneed.nn.cost import Cost


class Linear(Part, slot="linear map"):
    """`outputs` may list the sizes of several maps of one input that are merged into one matmul (queries, keys and
    values); maps with weight scales scale each of them separately."""

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
        return nn.Linear(inputs, outputs, bias) if isinstance(outputs, int) else MergedLinear(inputs, outputs, bias)

    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost:
        return Cost(parameters=outputs * (inputs + bias), flops=2 * inputs * outputs)


def is_dense(module: object) -> TypeGuard[nn.Linear]:
    """A linear map as `Dense` builds it: neither quantized nor ternary. One whose class was swapped for training
    counts too (`computes_as`)."""
    return getattr(type(module), "computes_as", type(module)) in (nn.Linear, MergedLinear)


class MergedLinear(nn.Linear):
    """Several maps of one input in one matmul; `outputs` lists their sizes."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool) -> None:
        super().__init__(inputs, sum(outputs), bias=bias)
        self.outputs = tuple(outputs)
