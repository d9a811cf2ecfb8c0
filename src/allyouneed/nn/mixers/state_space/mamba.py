"""Mamba: a state space whose parameters depend on the token (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with
Selective State Spaces", arXiv:2312.00752, algorithm 2 and section 3.4)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.recurrence import RecurrentMixer
from allyouneed.nn.mixers.state_space.convolution import ShortConvolution, draw_steps
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.retention import accumulator_dtype
from allyouneed.nn.ops.selective_scan import selective_ssm
from allyouneed.nn.states.recurrent import Carry, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Mamba(Mixer):
    """x, z = W_in u; x ← silu(conv(x)); Δ, B, C = W_x x, Δ ← softplus(W_Δ Δ + b); y = S6(x; Δ, A, B, C) + D ⊙ x; out =
    W_out (y ⊙ silu(z)). It replaces attention and feed-forward network: a layer needs no channel mixer."""

    kind: Literal["mamba"] = "mamba"
    hidden: Size | None = None
    """Width of x and z; default: twice the model width."""
    state: Size = 16
    """States per feature (N)."""
    rank: Size | None = None
    """Features from which the time steps Δ are computed; default: width / 16, rounded up."""
    convolution: Size = 4
    """Positions that the convolution covers."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the input and output maps have a bias."""

    def sizes(self, common: Common) -> tuple[int, int]:
        """Hidden features and rank."""
        return self.hidden or 2 * common.width, self.rank or -(-common.width // 16)

    def build(self, common: Common) -> SubLayer:
        return MambaModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        (hidden, rank), linear = self.sizes(common), common.linear
        total = linear.cost(common.width, 2 * hidden, self.bias) + linear.cost(hidden, common.width, self.bias)
        total += linear.cost(hidden, rank + 2 * self.state, False)
        steps = Cost(parameters=hidden * (rank + 1), flops=2 * hidden * rank)
        taps = Cost(parameters=hidden * (self.convolution + self.conv_bias), flops=2 * hidden * self.convolution)
        # A and D; Δ A, Δ B x, the update and the product with C
        scan = Cost(parameters=hidden * (self.state + 1), flops=6 * hidden * self.state + 2 * hidden)
        carry = hidden * (self.convolution - 1 + self.state)
        return total + steps + taps + scan + recurrent_cost(carry, common.width, wide=hidden * self.state)


class MambaModule(RecurrentMixer):
    """The carry: the last inputs of the convolution, and h (batch, N, hidden)."""

    unpacks = True

    def __init__(self, config: Mamba, common: Common) -> None:
        super().__init__()
        (self.hidden, self.rank), self.states = config.sizes(common), config.state
        build = common.linear.build
        self.up = build(common.width, [self.hidden] * 2, config.bias)  # x, z
        self.convolution = ShortConvolution(self.hidden, config.convolution, config.conv_bias)
        self.select = build(self.hidden, [self.rank, self.states, self.states], False)  # Δ, B, C
        # not a linear map: inits would draw it as others, and zero the bias
        self.step_map = nn.Parameter(torch.empty(self.hidden, self.rank))
        self.step_bias = nn.Parameter(torch.empty(self.hidden))
        self.a_log = nn.Parameter(torch.empty(self.hidden, self.states))  # A = −exp(a_log)
        self.skip = nn.Parameter(torch.empty(self.hidden))  # D
        self.out = build(self.hidden, common.width, config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A as S4D-Real, −1 … −N (section 3.6)."""
        nn.init.uniform_(self.step_map, -(self.rank**-0.5), self.rank**-0.5)
        self.step_bias.copy_(draw_steps(self.hidden))
        self.a_log.copy_(torch.arange(1, self.states + 1).log().expand(self.hidden, -1))
        nn.init.ones_(self.skip)

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        """Only with a kernel; otherwise its loop over tokens would be unrolled."""
        return usable(next(self.parameters()))

    def run(self, u: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        """Outputs (batch, time, width), and the carry after each row's last real token. `starts`: of packed rows."""
        before, h = carry
        x, z = self.up(u).chunk(2, -1)
        x, last = self.convolution(x, before, real, starts)
        steps, b, c = self.select(x).split([self.rank, self.states, self.states], -1)
        steps = nn.functional.linear(steps, self.step_map.to(steps.dtype))
        with torch.autocast(u.device.type, enabled=False):
            x, a = observe(self, "v", x), -self.a_log.to(h.dtype).exp().T
            y, h = selective_ssm(x, steps, self.step_bias, a, b, c, self.skip, h, real, starts)
            y = observe(self, "heads", y)
        mixed: Tensor = self.out(y.to(x.dtype) * nn.functional.silu(z))
        return mixed, (last, h)

    def begin(self, batch: int, like: Tensor) -> Carry:
        h = like.new_zeros(batch, self.states, self.hidden, dtype=accumulator_dtype(like.dtype))
        return self.convolution.begin(batch, like), h
