"""A stack: blocks one after another, of one kind or of many."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.block import Block, Layer
from allyouneed.nn.observe import enter_block, leave_block
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer
from allyouneed.nn.wiring.residual import FinalNorm, ResidualModule, Wiring


class Stack(nn.Module):
    """Blocks in order; `spans` are those of each entry of the list. Where one entry's stream is no stream for the next
    (`changes`), the old wiring closes its own (with a joint, if it has an end) and the new one opens another.
    `plans_ahead`: what layers share is made before the first of them runs, and not by it; compiled blocks need it."""

    plans_ahead = False

    def __init__(self, layers: Sequence[Layer], common: Common, depth: Depth) -> None:
        super().__init__()
        self.width = common.width
        blocks: list[Block] = []
        self.spans: list[range] = []
        for layer in layers:
            first = layer.build(common, depth)
            again = range(layer.repeat - 1)
            blocks += [first, *(first if layer.share else layer.build(common, depth) for _ in again)]
            self.spans.append(range(len(blocks) - layer.repeat, len(blocks)))
        for number, block in enumerate(blocks):
            if isinstance(block.wiring, ResidualModule):
                block.wiring.place(number, len(blocks))
        share_modules(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.wirings: list[Wiring] = [layer.wiring for layer in layers]
        self.recurrences, self.joints = nn.ModuleDict(), nn.ModuleDict()
        for number, layer in enumerate(layers):
            if (recurrence := layer.build_recurrence(common)) is not None:
                self.recurrences[str(number)] = recurrence
        for number, (before, after) in enumerate(pairwise(self.wirings)):
            if changes(before, after) and (end := before.end(common)) is not None:
                self.joints[str(number)] = end
        self.end = self.wirings[-1].end(common)

    def forward(self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None) -> Tensor:
        if self.plans_ahead and states is None:
            for block in self.blocks:
                block.prepare(context, len(x))  # type: ignore[operator]  # a Block
        stream: Any = self.wirings[0].begin(x)
        for number, span in enumerate(self.spans):
            if number and changes(self.wirings[number - 1], self.wirings[number]):
                joint = str(number - 1)
                closed = context.call(self.joints[joint], stream) if joint in self.joints else stream
                stream = self.wirings[number].begin(closed)
            if str(number) in self.recurrences:
                stream = context.call(partial(self.recur, number), stream, states)
                continue
            for n in span:
                state = None if states is None else states[n]
                stream = self.blocks[n](enter_block(self, n, stream), context=context, states=state)
                stream = leave_block(self, n, stream)
        return stream if self.end is None else context.call(self.end, stream)

    def recur(self, number: int, x: Tensor, context: Context, state: list[dict[str, State]] | None = None) -> Tensor:
        """The blocks of entry `number`, as its recurrence in depth runs them."""

        def step(x: Tensor, n: int) -> Any:
            y = self.blocks[n](enter_block(self, n, x), context=context, states=None if state is None else state[n])
            return leave_block(self, n, y)

        # no block may be skipped if it has a state or is recorded
        whole = state is not None or context.record is not None
        steps = [partial(step, n=n) for n in self.spans[number]]
        return self.recurrences[str(number)](x, steps, context, whole)

    def new_states(self, segments: bool = False) -> list[dict[str, State]]:
        """One entry for each block, also where blocks share their weights: each keeps what it alone has seen."""
        return [block.new_states(segments) for block in self.blocks if isinstance(block, Block)]


def changes(before: Wiring, after: Wiring) -> bool:
    """Whether the stream of one wiring must be closed before another can go on. What leaves the stream open and
    normalises only copies of it (pre-norm, parallel, …) can take turns on one stream."""
    return before != after and not (isinstance(before, FinalNorm) and isinstance(after, FinalNorm))


def behind(layers: Sequence[Layer], common: Common) -> Common:
    """What a head has in common with the model: its width too, unless the last wiring ends wider."""
    width = layers[-1].wiring.outputs(common)
    return common if width == common.width else common.model_copy(update={"width": width})


def share_modules(blocks: Iterable[Block]) -> None:
    """Modules inside sub-layers that say they are one for the whole stack (`one_per_stack`, a key) become one."""
    first: dict[Hashable, nn.Module] = {}
    for block in blocks:
        for owner in list(block.sublayers.modules()):
            for name, child in list(owner.named_children()):
                key = getattr(child, "one_per_stack", None)
                if key is not None:
                    setattr(owner, name, first.setdefault(key, child))


def stack_cost(layers: Sequence[Layer], common: Common, length: int) -> Cost:
    total = layers[-1].wiring.end_cost(common)
    shared: dict[Hashable, Cost] = {}
    for layer in layers:
        total += layer.cost(common, length)
        for part in (layer.mixer, layer.cross):
            if isinstance(part, Mixer):
                shared |= part.shared(common)
    for before, after in pairwise(layers):
        if changes(before.wiring, after.wiring):
            total += before.wiring.end_cost(common)
    for cost in shared.values():
        total += cost
    return total
