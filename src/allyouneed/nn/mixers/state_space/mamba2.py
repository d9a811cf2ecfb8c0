"""Mamba-2: a selective state space with one decay per head, which is also attention with a decay for a mask (Dao, Gu
2024, "Transformers are SSMs", arXiv:2405.21060, section 7)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.recurrence import RecurrentMixer
from allyouneed.nn.mixers.state_space.convolution import ShortConvolution, draw_steps
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.deferred import Recent, begin_recent, deferred_step, recent_cost
from allyouneed.nn.ops.retention import accumulator_dtype
from allyouneed.nn.ops.ssd import chunked, recurrent
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Mamba2(Mixer):
    """z, x, B, C, Δ = W_in u; x, B, C ← silu(conv(x, B, C)); Δ ← softplus(Δ + b); per head, with a scalar A, y = SSD(x;
    Δ, A, B, C) + D x; out = W_out norm(y ⊙ silu(z)), with the model's norm. Heads of a group share B and C. A layer
    needs no channel mixer."""

    kind: Literal["mamba2"] = "mamba2"
    heads: Size
    """Number of heads, each with its own decay."""
    head_width: Size | None = None
    """Features of each head; default: 2 · width / heads, which must then be an integer."""
    groups: Size = 1
    """Groups of heads that share B and C."""
    state: Size = 128
    """States per feature (N)."""
    convolution: Size = 4
    """Positions that the convolution covers."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    bias: bool = False
    """Whether the input and output maps have a bias."""

    def sizes(self, common: Common) -> tuple[int, int, int]:
        """Features of x, of B and C together, and of each head."""
        head_width = self.head_width or max(1, 2 * common.width // self.heads)
        return self.heads * head_width, 2 * self.groups * self.state, head_width

    def build(self, common: Common) -> SubLayer:
        return Mamba2Module(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        (hidden, both, head_width), linear = self.sizes(common), common.linear
        total = linear.cost(common.width, 2 * hidden + both + self.heads, self.bias)
        total += linear.cost(hidden, common.width, self.bias) + common.norm.cost(hidden)
        mixed = hidden + both
        total += Cost(parameters=mixed * (self.convolution + self.conv_bias), flops=2 * mixed * self.convolution)
        total += Cost(parameters=3 * self.heads, flops=4 * hidden * self.state + 2 * hidden)  # update and read of h
        carry = mixed * (self.convolution - 1) + hidden * self.state
        total += recent_cost(self.groups, self.heads, self.state, head_width)
        return total + recurrent_cost(carry, common.width, wide=hidden * self.state)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = []
        if self.head_width is None and 2 * common.width % self.heads:
            text = f"2 × width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if self.heads % self.groups:
            found.append(("groups", f"{self.heads} heads are not divisible by {self.groups} groups"))
        return found


class Mamba2Module(RecurrentMixer):
    """The carry: the last inputs of the convolution, and h (batch, heads, N, head_width)."""

    unpacks = True

    def __init__(self, config: Mamba2, common: Common) -> None:
        super().__init__()
        self.heads, self.groups, self.states = config.heads, config.groups, config.state
        (self.hidden, both, self.head_width), build = config.sizes(common), common.linear.build
        self.parts = [self.hidden, self.hidden + both, self.heads]  # z; x, B, C; Δ
        self.up = build(common.width, self.parts, config.bias)
        self.convolution = ShortConvolution(self.hidden + both, config.convolution, config.conv_bias)
        self.step_bias = nn.Parameter(torch.empty(self.heads))
        self.a_log = nn.Parameter(torch.empty(self.heads))  # A = −exp(a_log)
        self.skip = nn.Parameter(torch.empty(self.heads))  # D
        self.norm = common.norm.build(self.hidden)
        self.out = build(self.hidden, common.width, config.bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The authors' code: A uniform between −16 and −1."""
        self.step_bias.copy_(draw_steps(self.heads))
        self.a_log.copy_((1 + 15 * torch.rand(self.heads)).log())
        nn.init.ones_(self.skip)

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        """Only with a kernel; otherwise a loop over chunks would be unrolled."""
        return usable(next(self.parameters()))

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        return self.out(self.norm(self.recur(x, context, state), context))

    def run(self, u: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        """y ⊙ silu(z) (batch, time, hidden), and the carry after each row's last real token; `starts`: of packed
        rows."""
        before, h = carry
        z, x, given, last = self.project(u, before, h.dtype, real, starts)
        y, h = recurrent(*given, h) if x.shape[2] == 1 else chunked(*given, h, starts)
        return self.gate(y, x, z), (last, h)

    def project(
        self, u: Tensor, before: Tensor, dtype: torch.dtype, real: Tensor | None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """z, x, what the recurrence reads (Δ x, the log decay in this dtype, B and C), and the last inputs of the
        convolution."""
        z, mixed, steps = self.up(u).split(self.parts, -1)
        mixed, last = self.convolution(mixed, before, real, starts)
        x, b, c = mixed.split([self.hidden, self.groups * self.states, self.groups * self.states], -1)
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, time, head_width)
        b, c = (part.unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (b, c))  # (batch, groups, time, N)
        dt = nn.functional.softplus(steps.to(dtype) + self.step_bias.to(dtype)).transpose(1, 2)
        dt = dt if real is None else dt * real[:, None]
        log = -self.a_log.to(dtype).exp()[:, None] * dt  # (batch, heads, time)
        x = observe(self, "v", x)
        return z, x, (x * dt.to(x.dtype)[..., None], log, b, c), last

    def gate(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """(y + D x) ⊙ silu(z): (batch, time, hidden)"""
        y = observe(self, "heads", y + self.skip.to(y.dtype)[:, None, None] * x.to(y.dtype))
        return y.transpose(1, 2).flatten(2).to(z.dtype) * nn.functional.silu(z)

    def step(self, u: Tensor, carry: Carry, recent: Recent, positions: Tensor) -> Tensor:
        """`run` over one token (batch, 1, width) at these positions (batch,), deferred; all states change in place."""
        before, h = carry
        z, x, given, last = self.project(u, before, h.dtype, None)
        added, log, b, c = (part[:, :, 0] for part in given)
        before.copy_(last)
        return self.gate(deferred_step(c, b, added, log, h, recent, positions)[:, :, None], x, z)

    def half_life(self, x: Tensor) -> Tensor:
        """The half-life of the mean decay over the tokens."""
        steps = self.up(x).split(self.parts, -1)[2].double()
        log = -self.a_log.double().exp() * nn.functional.softplus(steps + self.step_bias.double())
        return math.log(0.5) / log.mean((0, 1))

    def begin(self, batch: int, like: Tensor) -> Carry:
        h = like.new_zeros(batch, self.heads, self.states, self.head_width, dtype=accumulator_dtype(like.dtype))
        return self.convolution.begin(batch, like), h

    def begin_recent(self, carry: Carry) -> Recent:
        return begin_recent(carry[1], self.groups)
