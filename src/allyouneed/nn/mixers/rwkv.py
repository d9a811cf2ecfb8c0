"""RWKV-4 (Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048).

Trained in parallel, decoded as a recurrence with a state of constant size. Time-mixing is a token mixer; channel-mixing
is a channel mixer that also reads the previous token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import RecentTokens, recent_cost
from allyouneed.nn.mixers.recurrence import RecurrentMixer
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.unpack import first_tokens
from allyouneed.nn.ops.wkv import after_last_real, initial_state, run_wkv
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, recurrent_cost
from allyouneed.nn.sublayer import Channel, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class RWKV(Mixer):
    """Eq. 11–17: r, k, v from each token mixed with the previous one, out = W_o (σ(r) ⊙ wkv(k, v))."""

    kind: Literal["rwkv"] = "rwkv"
    hidden: Size | None = None
    """Width of r, k and v; default: the model width."""

    def build(self, common: Common) -> SubLayer:
        return RWKVModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        width, hidden = common.width, self.hidden or common.width
        total = common.linear.cost(width, hidden, False) * 3 + common.linear.cost(hidden, width, False)
        # two multiply-adds per mixed feature; the same for numerator and denominator, in the output and in the carry
        total += Cost(parameters=3 * width + 2 * hidden, flops=4 * 3 * width + 4 * 2 * 2 * hidden)
        return total + recurrent_cost(width + 3 * hidden, width, wide=3 * hidden)


class RWKVModule(RecurrentMixer):
    """The carry: the previous token and the state of ops/wkv.py."""

    unpacks = True

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
        """The authors' initialisation (appendix E) for a middle layer: decay rates from fast to slow."""
        with torch.no_grad():
            for mix, power in ((self.mix_r, 0.25), (self.mix_k, 0.5), (self.mix_v, 0.5)):
                mix.copy_(ramp(mix) ** power)
            self.mix_v.add_(0.15)
            self.decay.copy_(-5 + 8 * ramp(self.decay) ** 1.35)
            self.bonus.copy_(torch.arange(1, self.hidden + 1) % 3 * 0.5 - 0.5 - 1.2)  # about ln 0.3

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        """Only with a kernel; otherwise its scan would be unrolled."""
        return usable(next(self.parameters()))

    def run(self, x: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        shifted, wkv, then = self.run_sums(x, carry, real, starts)
        r = self.r(token_shift(x, shifted, self.mix_r))
        y: Tensor = self.out(r.sigmoid() * wkv.to(r.dtype))
        return y, then

    def run_sums(
        self, x: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Carry]:
        """Previous tokens, wkv (batch, time, hidden), and the carry after each row's last real token. `starts`: of
        packed rows."""
        before, scale, above, below = carry
        tokens = torch.cat((before[:, None].to(x.dtype), x), 1)
        shifted = tokens[:, :-1]
        if starts is not None:  # the first token of a sentence has no previous one
            shifted = shifted.masked_fill(first_tokens(starts)[..., None], 0.0)
        k, v = self.k(token_shift(x, shifted, self.mix_k)), self.v(token_shift(x, shifted, self.mix_v))
        k, v, decay = observe(self, "k", k), observe(self, "v", v), self.decay.to(scale.dtype).exp()
        wkv, sums = run_wkv((scale, above, below), k, v, decay, self.bonus, real, starts)
        wkv = observe(self, "heads", wkv)
        return shifted, wkv, (tokens[:, -1] if real is None else after_last_real(tokens, real), *sums)

    def half_life(self, x: Tensor) -> Tensor:
        return math.log(2) / self.decay.double().exp()

    def mixing_matrix(self, values: Mapping[str, Tensor], channels: Sequence[int]) -> Tensor:
        """softmax_j(k_j − (i − 1 − j) δ for j < i, k_i + u for j = i)"""
        k = values["k"][0, :, list(channels)].T.double()  # (channels, time)
        rows = torch.arange(k.shape[1], device=k.device)
        distance = rows[:, None] - 1 - rows
        decay, bonus = (value[list(channels)].double()[:, None, None] for value in (self.decay.exp(), self.bonus))
        scores = torch.where(distance < 0, k[:, None] + bonus, k[:, None] - distance * decay)
        return scores.masked_fill(distance < -1, -math.inf).softmax(-1)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return like.new_zeros(batch, like.shape[2]), *initial_state(batch, self.hidden, like)

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        return self.run_sums(x, carry, real)[2]


class RWKVChannel(Channel):
    """Eq. 18–20: σ(r) ⊙ (W_v max(k, 0)²), r and k from each token mixed with the previous one."""

    stateful: ClassVar[bool] = True

    kind: Literal["rwkv-channel"] = "rwkv-channel"
    hidden: Size
    """Features of the hidden layer."""

    def visible(self, tokens: TokenFields) -> Tensor:
        since = tokens.along(1).position - tokens.along(0).position
        return (since == 0) | (since == 1)

    def build(self, common: Common) -> SubLayer:
        return RWKVChannelModule(self, common)

    def cost(self, common: Common) -> Cost:
        width, linear = common.width, common.linear
        total = linear.cost(width, width, False) + linear.cost(width, self.hidden, False)
        total += linear.cost(self.hidden, width, False)
        return total + Cost(parameters=2 * width, flops=4 * 2 * width) + recent_cost(width, 1)


class RWKVChannelModule(SubLayer):
    traceable = True

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
        if isinstance(state, RecentTokens):
            shifted = state.append(x, context)[:, :-1]
        else:  # the first token of a sentence has no previous one
            inside = (context.queries.positions > 0)[..., None]
            shifted = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] * inside
        hidden = self.up(token_shift(x, shifted, self.mix_k)).relu().square()
        return self.r(token_shift(x, shifted, self.mix_r)).sigmoid() * self.down(hidden)

    def new_state(self) -> State:
        return RecentTokens(1)


def token_shift(x: Tensor, shifted: Tensor, mix: Tensor) -> Tensor:
    """μ ⊙ x_t + (1 − μ) ⊙ x_{t−1} (eq. 11–13)."""
    return torch.lerp(shifted, x, mix.to(x.dtype))


def ramp(like: Tensor) -> Tensor:
    """0 … 1 over the features."""
    return torch.arange(len(like), device=like.device) / max(len(like) - 1, 1)
