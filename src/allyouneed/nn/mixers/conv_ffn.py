"""A convolutional transition: two separable convolutions over time where other layers have a feed-forward network.

Dehghani et al. 2019, "Universal Transformers", section 2.1: the transition function is "a separable convolution or a
fully-connected neural network"; sizes and the ReLU between them are those of the authors' code (tensor2tensor,
`sepconv_relu_sepconv`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import Convolution
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.sublayer import Channel, SubLayer, through

Size = Annotated[int, Field(gt=0)]


class ConvolutionalFFN(Channel):
    """y = SepConv_second(ReLU(SepConv_first(x))), from the model's width to `hidden` features and back. `first` and
    `second` are the positions that each filter covers, around a token or up to it (`sees: past`, for a decoder)."""

    stateful: ClassVar[bool] = True

    kind: Literal["conv-ffn"] = "conv-ffn"
    hidden: Size
    """Features between the two convolutions."""
    first: Size = 3
    """Positions that the first filter covers."""
    second: Size = 5
    """Positions that the second filter covers."""
    sees: Literal["past", "around"] = "past"
    """Positions up to the token (causal), or around it."""

    def leak(self) -> str | None:
        return None if self.sees == "past" else "its convolutions cover later tokens; set sees: past"

    def visible(self, tokens: TokenFields) -> Tensor:
        first, second = (Convolution(size=size, sees=self.sees).visible(tokens) for size in (self.first, self.second))
        return through(second, first)

    def parts(self, common: Common) -> tuple[tuple[Convolution, Common], tuple[Convolution, Common]]:
        """Both convolutions, with the width of their inputs."""
        up = Convolution(size=self.first, sees=self.sees, width=self.hidden, separable=True, activation="relu")
        down = Convolution(size=self.second, sees=self.sees, width=common.width, separable=True)
        return (up, common), (down, common.model_copy(update={"width": self.hidden}))

    def build(self, common: Common) -> SubLayer:
        return ConvolutionalFFNModule(self, common)

    def cost(self, common: Common) -> Cost:
        up, down = (part.cost(its, 1) for part, its in self.parts(common))
        return up + down


class ConvolutionalFFNModule(SubLayer):
    traceable = unpacks = True

    def __init__(self, config: ConvolutionalFFN, common: Common) -> None:
        super().__init__()
        self.up, self.down = (part.build(its) for part, its in config.parts(common))

    def prepare(self, context: Context, rows: int) -> None:
        for part in (self.up, self.down):
            part.prepare(context, rows)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        kept = state.parts if isinstance(state, NestedStates) else {}
        return self.down(self.up(x, context, kept.get("up")), context, kept.get("down"))

    def new_state(self) -> State | None:
        parts = {"up": self.up.new_state(), "down": self.down.new_state()}
        kept = {name: state for name, state in parts.items() if state is not None}
        return NestedStates(kept) if kept else None
