"""A stack: blocks one after another, of one kind or of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from allyouneed.nn.block import Block, Layer
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.state import State


class Stack(nn.Module):
    def __init__(self, layers: Sequence[Layer], common: Common) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer.build(common) for layer in layers for _ in range(layer.repeat))
        self.begin = layers[0].wiring.begin
        self.end = layers[-1].wiring.end(common)

    def forward(self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None) -> Tensor:
        stream: Any = self.begin(x)
        for number, block in enumerate(self.blocks):
            stream = block(stream, context, None if states is None else states[number])
        return stream if self.end is None else self.end(stream, context)

    def new_states(self) -> list[dict[str, State]]:
        return [block.new_states() for block in self.blocks if isinstance(block, Block)]


def stack_cost(layers: Sequence[Layer], common: Common, length: int) -> Cost:
    total = layers[-1].wiring.end_cost(common)
    for layer in layers:
        total += layer.cost(common, length)
    return total
