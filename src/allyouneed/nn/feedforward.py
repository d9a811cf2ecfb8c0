"""Channel mixers: what happens to one token's features between two looks around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.state import State
from allyouneed.nn.sublayer import Channel, SubLayer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}
Activation = Literal["relu", "gelu", "silu"]


class FFN(Channel):
    """ "Attention Is All You Need", eq. 2: max(0, x W1 + b1) W2 + b2."""

    kind: Literal["ffn"] = "ffn"
    hidden: Annotated[int, Field(gt=0)]
    activation: Activation = "relu"
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the hidden layer; the paper drops the output only

    def build(self, common: Common) -> SubLayer:
        return FFNModule(self, common)

    def cost(self, common: Common) -> Cost:
        up = common.linear.cost(common.width, self.hidden, self.bias)
        return up + common.linear.cost(self.hidden, common.width, self.bias)


class FFNModule(SubLayer):
    def __init__(self, config: FFN, common: Common) -> None:
        super().__init__()
        self.up = common.linear.build(common.width, config.hidden, config.bias)
        self.down = common.linear.build(config.hidden, common.width, config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        mixed: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return mixed
