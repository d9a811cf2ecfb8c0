"""A stack: blocks one after another, of one kind or of many."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from allyouneed.nn.block import Block, Layer
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.state import State
from allyouneed.nn.sublayer import Mixer
from allyouneed.nn.wiring import Depth, Wiring


class Stack(nn.Module):
    """Blocks in order. Where the wiring changes, the old one closes its stream (`joints`) and the new one opens it."""

    def __init__(self, layers: Sequence[Layer], common: Common, depth: Depth) -> None:
        super().__init__()
        blocks: list[Block] = []
        for layer in layers:
            first = layer.build(common, depth)
            again = range(layer.repeat - 1)
            blocks += [first, *(first if layer.share else layer.build(common, depth) for _ in again)]
        share_modules(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.wirings: list[Wiring] = [layer.wiring for layer in layers for _ in range(layer.repeat)]
        self.joints = nn.ModuleDict()
        for number, (before, after) in enumerate(zip(self.wirings[:-1], self.wirings[1:], strict=True)):
            if before != after and (end := before.end(common)) is not None:
                self.joints[str(number)] = end
        self.end = layers[-1].wiring.end(common)

    def forward(self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None) -> Tensor:
        stream: Any = self.wirings[0].begin(x)
        for number, block in enumerate(self.blocks):
            if number and self.wirings[number] != self.wirings[number - 1]:
                joint = str(number - 1)
                closed = self.joints[joint](stream, context) if joint in self.joints else stream
                stream = self.wirings[number].begin(closed)
            stream = block(stream, context, None if states is None else states[number])
        return stream if self.end is None else self.end(stream, context)

    def new_states(self) -> list[dict[str, State]]:
        return [block.new_states() for block in self.blocks if isinstance(block, Block)]


def share_modules(blocks: Iterable[Block]) -> None:
    """Modules inside sub-layers that say they are one for the whole stack (`one_per_stack`, a key) become one."""
    first: dict[Hashable, nn.Module] = {}
    for block in blocks:
        for parent in list(block.sublayers.modules()):
            for name, child in list(parent.named_children()):
                key = getattr(child, "one_per_stack", None)
                if key is not None:
                    setattr(parent, name, first.setdefault(key, child))


def stack_cost(layers: Sequence[Layer], common: Common, length: int) -> Cost:
    total = layers[-1].wiring.end_cost(common)
    shared: dict[Hashable, Cost] = {}
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        total += layer.cost(common, length)
        if following is not None and following.wiring != layer.wiring:
            total += layer.wiring.end_cost(common)
        for part in (layer.mixer, layer.cross):
            if isinstance(part, Mixer):
                shared |= part.shared(common)
    for cost in shared.values():
        total += cost
    return total
