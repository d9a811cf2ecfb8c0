"""Feed-forward and gated channel mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Channel, SubLayer


class FFN(Channel):
    """ "Attention Is All You Need", eq. 2: max(0, x W1 + b1) W2 + b2.

    `norm` normalises the hidden layer with the model's norm (Shleifer, Weston, Ott 2021, "NormFormer", 2.1; the decoder
    of So et al. 2019, "The Evolved Transformer").
    """

    kind: Literal["ffn"] = "ffn"
    hidden: Annotated[int, Field(gt=0)]
    """Features of the hidden layer (d_ff)."""
    activation: Activation = "relu"
    """Activation of the hidden layer."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    norm: bool = False
    """Normalise the hidden layer with the model's norm."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the hidden layer; the paper drops the output only."""

    def build(self, common: Common) -> SubLayer:
        return FFNModule(self, common)

    def cost(self, common: Common) -> Cost:
        up = common.linear.cost(common.width, self.hidden, self.bias)
        total = up + common.linear.cost(self.hidden, common.width, self.bias)
        return total + common.norm.cost(self.hidden) if self.norm else total


class FFNModule(SubLayer):
    traceable = True

    def __init__(self, config: FFN, common: Common) -> None:
        super().__init__()
        self.up = common.linear.build(common.width, config.hidden, config.bias)
        self.norm = common.norm.build(config.hidden) if config.norm else None
        self.down = common.linear.build(config.hidden, common.width, config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.kind = config.activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        hidden = observe(self, "hidden", self.hidden(self.up(x)))  # (batch, time, hidden)
        return self.project_out(hidden if self.norm is None else self.norm(hidden, context))

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden layer, given its map's output."""
        return self.dropout(self.activation(x))

    def project_out(self, hidden: Tensor) -> Tensor:
        return self.down(hidden)


def gated(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) ⊗ up, given both concatenated."""
    gate, up = both.chunk(2, -1)
    return activation(gate) * up


class GLU(Channel):
    """Shazeer 2020, "GLU Variants Improve Transformer", eq. 5–6: (activation(x W) ⊗ x V) W2.

    The activation selects the variant: sigmoid GLU, identity bilinear, relu ReGLU, gelu GEGLU, silu SwiGLU. `norm`
    normalises the hidden layer with the model's norm (BitNet's ffn_sub_norm).
    """

    kind: Literal["glu"] = "glu"
    hidden: Annotated[int, Field(gt=0)]
    """Features of the hidden layer (d_ff)."""
    activation: Activation = "silu"
    """Activation of the gate, which selects the variant: `silu` is SwiGLU."""
    bias: bool = False
    """Whether the linear maps have a bias."""
    norm: bool = False
    """Normalise the hidden layer with the model's norm."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the hidden layer."""

    def build(self, common: Common) -> SubLayer:
        return GLUModule(self, common)

    def cost(self, common: Common) -> Cost:
        gate_up = common.linear.cost(common.width, 2 * self.hidden, self.bias)
        total = gate_up + common.linear.cost(self.hidden, common.width, self.bias)
        return total + common.norm.cost(self.hidden) if self.norm else total


class GLUModule(SubLayer):
    """`gate_up` computes both factors in one matmul: gate W in its first half of rows, V in the second."""

    traceable = True

    def __init__(self, config: GLU, common: Common) -> None:
        super().__init__()
        self.gate_up = common.linear.build(common.width, (config.hidden, config.hidden), config.bias)
        self.norm = common.norm.build(config.hidden) if config.norm else None
        self.down = common.linear.build(config.hidden, common.width, config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        hidden = observe(self, "hidden", self.hidden(self.gate_up(x)))  # (batch, time, hidden)
        return self.down(hidden if self.norm is None else self.norm(hidden, context))

    def hidden(self, both: Tensor) -> Tensor:
        """The hidden layer, given both factors concatenated."""
        return self.dropout(gated(both, self.activation))
