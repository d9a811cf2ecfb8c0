"""Channel mixers: what happens to one token's features between two looks around."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.kernels import at_once
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Channel, SubLayer


def _identity(x: Tensor) -> Tensor:
    return x


def _quick_gelu(x: Tensor) -> Tensor:
    """Hendrycks, Gimpel 2016, section 2: the sigmoid approximation of GELU, as CLIP has it."""
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021, "Primer", section 4."""
    return nn.functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": nn.functional.relu,
    "relu-squared": _relu_squared,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "gelu-tanh": partial(nn.functional.gelu, approximate="tanh"),  # GPT-2's gelu_new
    "quick-gelu": _quick_gelu,
    "silu": nn.functional.silu,  # Swish with β = 1
    "mish": nn.functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_FUSED = {ACTIVATIONS[name]: name for name in ("relu", "silu", "gelu", "gelu-tanh")}
Activation = Literal[
    "identity",
    "relu",
    "relu-squared",
    "elu",
    "gelu",
    "gelu-tanh",
    "quick-gelu",
    "silu",
    "mish",
    "sigmoid",
    "tanh",
]


def fused_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """What our kernels call it; None: they do not know it."""
    return _FUSED.get(activation)


class FFN(Channel):
    """ "Attention Is All You Need", eq. 2: max(0, x W1 + b1) W2 + b2.

    `norm`: the hidden layer is normalised, with the model's norm (Shleifer, Weston, Ott 2021, "NormFormer", 2.1; the
    decoder of So et al. 2019, "The Evolved Transformer").
    """

    kind: Literal["ffn"] = "ffn"
    hidden: Annotated[int, Field(gt=0)]
    activation: Activation = "relu"
    bias: bool = True
    norm: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the hidden layer; the paper drops the output only

    def build(self, common: Common) -> SubLayer:
        return FFNModule(self, common)

    def cost(self, common: Common) -> Cost:
        up = common.linear.cost(common.width, self.hidden, self.bias)
        total = up + common.linear.cost(self.hidden, common.width, self.bias)
        return total + common.norm.cost(self.hidden) if self.norm else total


class FFNModule(SubLayer):
    traces = True

    def __init__(self, config: FFN, common: Common) -> None:
        super().__init__()
        self.up = common.linear.build(common.width, config.hidden, config.bias)
        self.norm = common.norm.build(config.hidden) if config.norm else None
        self.down = common.linear.build(config.hidden, common.width, config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.kind = config.activation
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        hidden = self.dropout(self.activation(self.up(x)))  # (batch, time, hidden)
        return self.project_out(hidden if self.norm is None else self.norm(hidden, context))

    def project_out(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(hidden)
        return out


def gated(both: Tensor, activation: Callable[[Tensor], Tensor], fused: str | None) -> Tensor:
    """activation(gate) ⊗ up, of both side by side; `fused`: what our kernels call the activation."""
    if fused is not None and at_once(both):
        from allyouneed.kernels.triton.glu import gated as kernel

        return kernel(both, fused)
    gate, up = both.chunk(2, -1)
    return activation(gate) * up


class GLU(Channel):
    """Shazeer 2020, "GLU Variants Improve Transformer", eq. 5–6: (activation(x W) ⊗ x V) W2.

    The activation names the variant: sigmoid GLU, identity bilinear, relu ReGLU, gelu GEGLU, silu SwiGLU. `norm`: the
    hidden layer is normalised, with the model's norm (BitNet's ffn_sub_norm).
    """

    kind: Literal["glu"] = "glu"
    hidden: Annotated[int, Field(gt=0)]
    activation: Activation = "silu"
    bias: bool = False
    norm: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the hidden layer

    def build(self, common: Common) -> SubLayer:
        return GLUModule(self, common)

    def cost(self, common: Common) -> Cost:
        gate_up = common.linear.cost(common.width, 2 * self.hidden, self.bias)
        total = gate_up + common.linear.cost(self.hidden, common.width, self.bias)
        return total + common.norm.cost(self.hidden) if self.norm else total


class GLUModule(SubLayer):
    traces = True

    """`gate_up` makes both factors in one product: its first half of rows is the gate W, its second half is V."""

    def __init__(self, config: GLU, common: Common) -> None:
        super().__init__()
        self.gate_up = common.linear.build(common.width, (config.hidden, config.hidden), config.bias)
        self.norm = common.norm.build(config.hidden) if config.norm else None
        self.down = common.linear.build(config.hidden, common.width, config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.fused = fused_name(self.activation)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        hidden = self.dropout(gated(self.gate_up(x), self.activation, self.fused))  # (batch, time, hidden)
        mixed: Tensor = self.down(hidden if self.norm is None else self.norm(hidden, context))
        return mixed
