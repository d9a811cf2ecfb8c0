"""A part from outside the package, as a user would write it: gated linear attention (Yang et al. 2024, eq. 3)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer


class PluginGLA(Mixer):
    """S_t = diag(α_t) S_{t−1} + k_tᵀ v_t, o_t = q_t S_t, with α_t = sigmoid(x_t W_α)."""

    kind: Literal["plugin-gla"] = "plugin-gla"
    keys: Annotated[int, Field(gt=0)] = 4

    @property
    def causal(self) -> bool:
        return True

    def build(self, common: Common) -> SubLayer:
        return PluginGLAModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        linear, width, keys = common.linear, common.width, self.keys
        maps = linear.cost(width, 3 * keys + width, False) + linear.cost(width, width, False)
        return maps + Cost(flops=6 * keys * width) + recurrent_cost(keys * width, 3 * keys + width)


class PluginGLAModule(SubLayer):
    def __init__(self, config: PluginGLA, common: Common) -> None:
        super().__init__()
        self.sizes = [config.keys, config.keys, config.keys, common.width]
        self.into = common.linear.build(common.width, sum(self.sizes), False)
        self.out = common.linear.build(common.width, common.width, False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        inputs = self.into(x)
        if isinstance(state, Recurrent):
            y, carry = self.scan(state.carry(len(x), x), inputs, context.queries.real)
            state.update(inputs, carry, context)
            return self.out(y)
        unpacked = unpack_rows(context)
        rows = unpacked.gather(inputs)
        y, _ = self.scan(self.begin(len(rows), rows), rows, unpacked.real)
        return self.out(unpacked.scatter(y, x))

    def scan(self, carry: Carry, inputs: Tensor, real: Tensor | None) -> tuple[Tensor, Carry]:
        (memory,), outputs = carry, []  # (batch, keys, width)
        for time in range(inputs.shape[1]):
            query, key, decay, value = inputs[:, time].split(self.sizes, -1)
            new = decay.sigmoid()[..., None] * memory + key[..., None] * value[:, None]
            memory = new if real is None else new.where(real[:, time, None, None], memory)
            outputs.append((query[..., None] * memory).sum(1))
        empty = inputs.new_zeros(len(inputs), 0, self.sizes[-1])
        return (torch.stack(outputs, 1) if outputs else empty), (memory,)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return (like.new_zeros(batch, self.sizes[0], self.sizes[-1]),)

    def new_state(self) -> State:
        return Recurrent(self.begin, lambda carry, inputs, real: self.scan(carry, inputs, real)[1])
