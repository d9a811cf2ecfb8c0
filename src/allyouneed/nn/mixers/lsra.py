"""Long-short range attention (Wu, Liu, Lin, Lin, Han 2020, "Lite Transformer with Long-Short Range Attention", 4).

Attention processes one half of the features, a convolution with softmax weights the other half. Each half has its own
input and output maps, as in the authors' code, and the results are concatenated; the halves need not be equal, as in
their MultiBranch with `embed_dims`. (Their feed-forward layers are flat: hidden equals width.)
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
from allyouneed.nn.mixers.lightweight import DynamicConvolution, LightweightConvolution
from allyouneed.nn.patterns.core import Full, Pattern, TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class LSRA(AttendsByPattern, Mixer):
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
    far_width: Size | None = None
    """Features that the attention processes, the first ones; default: half of the width."""
    gated: bool = True
    """Gate the convolution's input by a sigmoid of a second half."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the weights of attention and convolution."""

    @property
    def halves(self) -> dict[str, Mixer]:
        shared = {"heads": self.heads, "bias": self.bias, "dropout": self.dropout}
        kind = DynamicConvolution if self.convolution == "dynamic" else LightweightConvolution
        sees: Literal["past", "around"] = "past" if self.causal else "around"
        near = kind(size=self.size, sees=sees, gated=self.gated, **shared)
        return {"far": Attention(pattern=self.pattern, **shared), "near": near}

    def visible(self, tokens: TokenFields) -> Tensor:
        far, near = (half.visible(tokens) for half in self.halves.values())
        return far | near

    def widths(self, common: Common) -> tuple[int, int]:
        """Features of attention and convolution."""
        far = common.width // 2 if self.far_width is None else self.far_width
        return far, common.width - far

    def commons(self, common: Common) -> dict[str, Common]:
        widths = zip(("far", "near"), self.widths(common), strict=True)
        return {name: common.model_copy(update={"width": width}) for name, width in widths}

    def build(self, common: Common) -> SubLayer:
        return LSRAModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        far, near = (self.halves[name].cost(part, length) for name, part in self.commons(common).items())
        return far + near

    def problems(self, common: Common) -> list[tuple[str, str]]:
        far, near = self.widths(common)
        if self.far_width is not None and (near <= 0 or far % self.heads or near % self.heads):
            split = f"splits width {common.width} into {far} and {near}"
            return [("far_width", f"{split}; both must be positive multiples of {self.heads} heads")]
        if self.far_width is None and common.width % 2:
            return [("kind", f"width {common.width} is odd; it must be even")]
        if far % self.heads:
            return [("heads", f"half of width {common.width} is not divisible by {self.heads} heads")]
        return []


class LSRAModule(SubLayer):
    unpacks = True

    def __init__(self, config: LSRA, common: Common) -> None:
        super().__init__()
        halves, commons = config.halves, config.commons(common)
        self.widths = config.widths(common)
        self.far, self.near = (halves[name].build(commons[name]) for name in ("far", "near"))

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        return self.far.traceable and self.near.traceable

    def prepare(self, context: Context, rows: int) -> None:
        self.far.prepare(context, rows)
        self.near.prepare(context, rows)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        left, right = x.split(self.widths, -1)
        kept = state.parts if isinstance(state, NestedStates) else {}
        return torch.cat((self.far(left, context, kept.get("far")), self.near(right, context, kept.get("near"))), -1)

    def new_state(self) -> State:
        parts = {"far": self.far.new_state(), "near": self.near.new_state()}
        return NestedStates({name: state for name, state in parts.items() if state is not None})
