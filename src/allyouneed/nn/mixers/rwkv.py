"""RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048).

Trained as a whole, decoded as a recurrence: what a token remembers of the past is as large after a million tokens as
after one. Time-mixing is a mixer, channel-mixing a channel that also looks at the token before it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import Recent
from allyouneed.nn.ops.unpack import sentences
from allyouneed.nn.ops.wkv import after, along, nothing
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Channel, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class RWKV(Mixer):
    """Eq. 11–17: r, k, v from a token mixed with the one before it, out = W_o (σ(r) ⊙ wkv(k, v))."""

    kind: Literal["rwkv"] = "rwkv"
    hidden: Size | None = None  # features of r, k and v, as many as the model has when not given

    @property
    def causal(self) -> bool:
        return True

    def build(self, common: Common) -> SubLayer:
        return RWKVModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        width, hidden = common.width, self.hidden or common.width
        total = common.linear.cost(width, hidden, False) * 3 + common.linear.cost(hidden, width, False)
        # two multiply-adds a mixed feature; as many for numerator and denominator, in the output and in what is carried
        total += Cost(parameters=3 * width + 2 * hidden, flops=4 * 3 * width + 4 * 2 * 2 * hidden)
        return total + recurrent_cost(width + 3 * hidden, width)


class RWKVModule(SubLayer):
    """The carry: the token before, and the sums of ops/wkv.py."""

    def __init__(self, config: RWKV, common: Common) -> None:
        super().__init__()
        width, self.hidden = common.width, config.hidden or common.width
        self.mix_r, self.mix_k, self.mix_v = (nn.Parameter(torch.empty(width)) for _ in range(3))
        self.decay, self.bonus = (nn.Parameter(torch.empty(self.hidden)) for _ in range(2))
        build = common.linear.build
        self.r, self.k, self.v = (build(width, self.hidden, False) for _ in range(3))
        self.out = build(self.hidden, width, False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The authors' start (appendix E) for a layer in the middle of the stack: features that forget at once up to
        those that hardly do."""
        with torch.no_grad():
            for mix, power in ((self.mix_r, 0.25), (self.mix_k, 0.5), (self.mix_v, 0.5)):
                mix.copy_(ramp(mix) ** power)
            self.mix_v.add_(0.15)
            self.decay.copy_(-5 + 8 * ramp(self.decay) ** 1.35)
            self.bonus.copy_(torch.arange(1, self.hidden + 1) % 3 * 0.5 - 0.5 - 1.2)  # around ln 0.3

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if isinstance(state, Recurrent):
            y, carry = self.run(x, state.carry(len(x), x), context.queries.real)
            state.keep(x, carry, context)
            return y
        lined = sentences(context)
        rows = lined.gather(x)
        return lined.scatter(self.run(rows, self.begin(len(rows), rows), None)[0], x)

    def run(self, x: Tensor, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry]:
        shifted, wkv, then = self.summed(x, carry, real)
        r = self.r(mixed(x, shifted, self.mix_r))
        y: Tensor = self.out(r.sigmoid() * wkv.to(r.dtype))
        return y, then

    def summed(self, x: Tensor, carry: Carry, real: Tensor | None) -> tuple[Tensor, Tensor, Carry]:
        """The tokens before these, wkv (batch, time, hidden), and the carry behind each row's last real token."""
        before, scale, above, below = carry
        tokens = torch.cat((before[:, None].to(x.dtype), x), 1)
        shifted = tokens[:, :-1]
        k, v = self.k(mixed(x, shifted, self.mix_k)), self.v(mixed(x, shifted, self.mix_v))
        decay = self.decay.to(scale.dtype).exp()
        wkv, sums = along((scale, above, below), k, v, decay, self.bonus, real)
        return shifted, wkv, (tokens[:, -1] if real is None else after(tokens, real), *sums)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return like.new_zeros(batch, like.shape[2]), *nothing(batch, self.hidden, like)

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        return self.summed(x, carry, real)[2]

    def new_state(self) -> State:
        return Recurrent(self.begin, self.fold)


class RWKVChannel(Channel):
    """Eq. 18–20: σ(r) ⊙ (W_v max(k, 0)²), r and k from a token mixed with the one before it."""

    remembers: ClassVar[bool] = True

    kind: Literal["rwkv-channel"] = "rwkv-channel"
    hidden: Size

    def build(self, common: Common) -> SubLayer:
        return RWKVChannelModule(self, common)

    def cost(self, common: Common) -> Cost:
        width, linear = common.width, common.linear
        total = linear.cost(width, width, False) + linear.cost(width, self.hidden, False)
        total += linear.cost(self.hidden, width, False)
        return total + Cost(parameters=2 * width, flops=4 * 2 * width, state_constant=width * (1 + MAX_TRIM))


class RWKVChannelModule(SubLayer):
    def __init__(self, config: RWKVChannel, common: Common) -> None:
        super().__init__()
        width, build = common.width, common.linear.build
        self.mix_r, self.mix_k = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.r, self.up, self.down = (
            build(width, width, False),
            build(width, config.hidden, False),
            build(config.hidden, width, False),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for mix in (self.mix_r, self.mix_k):
                mix.copy_(ramp(mix) ** 0.5)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if isinstance(state, Recent):
            shifted = state.append(x, context)[:, :-1]
        else:  # what stands before a sentence is no part of it
            inside = (context.queries.positions > 0)[..., None]
            shifted = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] * inside
        hidden = self.up(mixed(x, shifted, self.mix_k)).relu().square()
        y: Tensor = self.r(mixed(x, shifted, self.mix_r)).sigmoid() * self.down(hidden)
        return y

    def new_state(self) -> State:
        return Recent(1)


def mixed(x: Tensor, shifted: Tensor, mix: Tensor) -> Tensor:
    """μ ⊙ x_t + (1 − μ) ⊙ x_{t−1} (eq. 11–13)."""
    return torch.lerp(shifted, x, mix.to(x.dtype))


def ramp(like: Tensor) -> Tensor:
    """0 … 1, feature by feature."""
    return torch.arange(len(like), device=like.device) / max(len(like) - 1, 1)
