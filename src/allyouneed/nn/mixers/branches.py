"""Two parallel branches on the same tokens, joined, then an optional third part.

So, Liang, Le 2019, "The Evolved Transformer", section 3: the search space consists of such blocks, with a left and a
right branch of any width and a combiner.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Any, Literal

import torch
from pydantic import WrapValidator
from torch import Tensor, nn

from allyouneed.nn.common import Common, least
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.sublayer import Channel, Mixer, SubLayer, through


def _mixer_or_channel(value: Any, _: Any) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else value
    known = Channel.find(kind) is not None and Mixer.find(kind) is None
    return Channel.choose(value) if known or isinstance(value, Channel) else Mixer.choose(value)


Piece = Annotated[Mixer | Channel, WrapValidator(_mixer_or_channel)]


class Branches(Mixer):
    """then(norm(join(left(x), right(x)))): dropout after each branch; a result narrower than the model is padded with
    zeros.

    `join`: `sum` (the narrower branch padded with zeros), `product` (padded with ones) or `concat`. `then` takes the
    joined width; the final width may be smaller than the model's, not larger.
    """

    kind: Literal["branches"] = "branches"
    left: Piece
    """A token or channel mixer."""
    right: Piece | None = None
    """The other branch; default: none, `left` alone."""
    join: Literal["sum", "product", "concat"] = "sum"
    """Add the branches (the narrower padded with zeros), multiply them (padded with ones), or put them side by side."""
    norm: bool = True
    """Normalise the joined result with the model's norm."""
    then: Piece | None = None
    """A mixer after it; default: none."""

    @property
    def causal(self) -> bool:
        return all(part.causal for part in self.pieces.values() if isinstance(part, Mixer))

    def leak(self) -> str | None:
        return next((why for part in self.pieces.values() if isinstance(part, Mixer) and (why := part.leak())), None)

    @property
    def pieces(self) -> dict[str, Mixer | Channel]:
        found = {"left": self.left, "right": self.right, "then": self.then}
        return {name: part for name, part in found.items() if part is not None}

    def visible(self, tokens: TokenFields) -> Tensor:
        both = self.left.visible(tokens)
        both = both if self.right is None else both | self.right.visible(tokens)
        return both if self.then is None else through(self.then.visible(tokens), both)

    @property
    def longest(self) -> int | None:
        return least(*(part.longest for part in self.pieces.values() if isinstance(part, Mixer)))

    def joined(self, common: Common) -> Common:
        """The common settings of `then`, with the joined width."""
        widths = [part.outputs(common) for name, part in self.pieces.items() if name != "then"]
        return common.model_copy(update={"width": sum(widths) if self.join == "concat" else max(widths)})

    def around(self, common: Common) -> list[tuple[str, Mixer | Channel, Common]]:
        """Each part with its common settings."""
        joined = self.joined(common)
        return [(name, part, joined if name == "then" else common) for name, part in self.pieces.items()]

    def build(self, common: Common) -> SubLayer:
        return BranchesModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        total = common.norm.cost(self.joined(common).width) if self.norm else Cost()
        for _, part, its in self.around(common):
            total += part.cost(its, length) if isinstance(part, Mixer) else part.cost(its)
        return total

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        found: dict[Hashable, Cost] = {}
        for _, part, its in self.around(common):
            found |= part.shared(its) if isinstance(part, Mixer) else {}
        return found

    def problems(self, common: Common) -> list[tuple[str, str]]:
        parts = self.around(common)
        found = [(f"{name}.{key}", text) for name, part, its in parts for key, text in part.problems(its)]
        found += [
            (f"{name}.kind", "needs an encoder; use it as the cross of a layer")
            for name, part, _ in parts
            if isinstance(part, Mixer) and not part.supports_self
        ]
        outputs = self.joined(common).width if self.then is None else self.then.outputs(self.joined(common))
        if outputs > common.width:
            key = "join" if self.then is None else "then"
            found.append((key, f"outputs {outputs} features, more than the width {common.width}"))
        return found


class BranchesModule(SubLayer):
    def __init__(self, config: Branches, common: Common) -> None:
        super().__init__()
        self.width, self.join = common.width, config.join
        self.pieces = nn.ModuleDict({name: part.build(its) for name, part, its in config.around(common)})
        self.dropout = Dropout(common.dropout)
        self.norm = common.norm.build(config.joined(common).width) if config.norm else None

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        return all(part.traceable for part in self.pieces.values())

    @property
    def unpacks(self) -> bool:  # type: ignore[override]
        return any(part.unpacks for part in self.pieces.values())

    def prepare(self, context: Context, rows: int) -> None:
        for part in self.pieces.values():
            part.prepare(context, rows)  # type: ignore[operator]

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        states = state.parts if isinstance(state, NestedStates) else {}
        branches = [
            self.dropout(self.pieces[name](x, context, states.get(name)))
            for name in ("left", "right")
            if name in self.pieces
        ]
        y = self.joined(branches)
        if self.norm is not None:
            y = self.norm(y, context)
        if "then" in self.pieces:
            y = self.pieces["then"](y, context, states.get("then"))
        return nn.functional.pad(y, (0, self.width - y.shape[-1]))

    def joined(self, branches: list[Tensor]) -> Tensor:
        if self.join == "concat":
            return torch.cat(branches, -1)
        widest, value = max(y.shape[-1] for y in branches), 0.0 if self.join == "sum" else 1.0
        y, *others = (nn.functional.pad(y, (0, widest - y.shape[-1]), value=value) for y in branches)
        for other in others:
            y = y + other if self.join == "sum" else y * other
        return y

    def new_state(self) -> State | None:
        parts = {name: part.new_state() for name, part in self.pieces.items() if isinstance(part, SubLayer)}
        kept = {name: state for name, state in parts.items() if state is not None}
        return NestedStates(kept) if kept else None
