"""Long-short range attention (Wu, Liu, Lin, Lin, Han 2020, "Lite Transformer with Long-Short Range Attention", 4).

Attention processes one half of the features, a convolution with softmax weights the other half. Each half has its own
input and output maps, as in the authors' code, and the results are concatenated. (Their feed-forward layers are flat:
hidden equals width.)
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.branches import NestedStates
from allyouneed.nn.mixers.lightweight import DynamicConvolution, LightweightConvolution
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class LSRA(Mixer):
    """Figure 3: [attention(x_left), convolution(x_right)]. The convolution covers `size` positions around a token, or
    the past if the attention is causal; both have `heads` heads."""

    kind: Literal["lsra"] = "lsra"
    heads: Size
    """Number of heads, of attention and convolution."""
    size: Size
    """Positions that the convolution covers."""
    pattern: Pattern = Full()
    """Which keys each query of the attention may attend to; a causal one makes the convolution causal."""
    convolution: Literal["dynamic", "lightweight"] = "dynamic"
    """Filters predicted from the token, or fixed."""
    gated: bool = True
    """Gate the convolution's input by a sigmoid of a second half."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the weights of attention and convolution."""

    @property
    def causal(self) -> bool:
        return self.pattern.decodes

    def leak(self) -> str | None:
        return self.pattern.leak()

    @property
    def halves(self) -> dict[str, Mixer]:
        shared = {"heads": self.heads, "bias": self.bias, "dropout": self.dropout}
        kind = DynamicConvolution if self.convolution == "dynamic" else LightweightConvolution
        sees: Literal["past", "around"] = "past" if self.causal else "around"
        near = kind(size=self.size, sees=sees, gated=self.gated, **shared)
        return {"far": Attention(pattern=self.pattern, **shared), "near": near}

    @staticmethod
    def half(common: Common) -> Common:
        return common.model_copy(update={"width": common.width // 2})

    def build(self, common: Common) -> SubLayer:
        return LSRAModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        half = self.half(common)
        return self.halves["far"].cost(half, length) + self.halves["near"].cost(half, length)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        if common.width % 2:
            return [("kind", f"width {common.width} is odd; it must be even")]
        if common.width // 2 % self.heads:
            return [("heads", f"half of width {common.width} is not divisible by {self.heads} heads")]
        return []


class LSRAModule(SubLayer):
    def __init__(self, config: LSRA, common: Common) -> None:
        super().__init__()
        halves = config.halves
        self.far, self.near = (halves[name].build(config.half(common)) for name in ("far", "near"))

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        left, right = x.chunk(2, -1)
        kept = state.parts if isinstance(state, NestedStates) else {}
        return torch.cat((self.far(left, context, kept.get("far")), self.near(right, context, kept.get("near"))), -1)

    def new_state(self) -> State:
        parts = {"far": self.far.new_state(), "near": self.near.new_state()}
        return NestedStates({name: state for name, state in parts.items() if state is not None})
