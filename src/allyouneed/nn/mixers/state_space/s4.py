"""S4: a linear state space per feature, trained as a convolution, decoded as a recurrence (Gu, Goel, Ré 2022,
"Efficiently Modeling Long Sequences with Structured State Spaces", arXiv:2111.00396; diagonal: Gu, Gupta, Goel, Ré
2022, "On the Parameterization and Initialization of Diagonal State Space Models", arXiv:2206.11893, S4D)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.packed_convolution import packed_convolution
from allyouneed.nn.ops.retention import accumulator_dtype
from allyouneed.nn.ops.state_space import DiagonalSystem, LowRankSystem, System, convolve, hippo
from allyouneed.nn.ops.unpack import flip_starts, unpack_rows
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class S4(Mixer):
    """y = SSM(u) + D ⊙ u for each feature on its own; then out = GLU(W gelu(y) + b), which mixes the features.

    The state space x' = A x + B u, y = C x starts from the HiPPO matrix, which makes x the coefficients of the past in
    Legendre polynomials (eq. 2). `matrix: dplr` is the paper's A = Λ − p p*, discretised by the bilinear rule (eq. 3);
    `diagonal` drops p and holds inputs constant within a step (S4D-LegS). Re Λ is negative, so that the state cannot
    grow (Goel et al. 2022, "It's Raw!", 4.1).
    """

    kind: Literal["s4"] = "s4"
    state: Annotated[int, Field(gt=0, multiple_of=2)] = 64
    """States per feature (N), in conjugate pairs."""
    matrix: Literal["dplr", "diagonal"] = "dplr"
    """Diagonal plus low rank (S4), or diagonal (S4D)."""
    sees: Literal["past", "around"] = "past"
    """`past`: causal; `around`: a second kernel reads from the end of the sentence."""

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "its second kernel covers later tokens; set sees: past"

    @property
    def channels(self) -> int:
        return 1 if self.causal else 2

    def build(self, common: Common) -> SubLayer:
        return S4Module(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        width, vectors = common.width, (3 if self.matrix == "dplr" else 2) + self.channels  # Λ, B, C and p
        total = common.linear.cost(width, 2 * width, True)
        total += Cost(parameters=width * (vectors * self.state + 2), flops=width * (8 * self.state + 2))
        return total + recurrent_cost(width * self.state, width, wide=width * self.state)


class S4Module(SubLayer):
    """The carry: x (batch, width, N), real and imaginary parts."""

    unpacks = capturable = True

    def __init__(self, config: S4, common: Common) -> None:
        super().__init__()
        self.width, self.states, self.sees = common.width, config.state, config.sees
        pairs = config.state // 2
        self.log_step = nn.Parameter(torch.empty(self.width))
        self.log_decay = nn.Parameter(torch.empty(self.width, pairs))  # Λ = −exp(log_decay) + i frequency
        self.frequency = nn.Parameter(torch.empty(self.width, pairs))
        # complex numbers as pairs: real and imaginary part
        self.b = nn.Parameter(torch.empty(self.width, pairs, 2))
        self.c = nn.Parameter(torch.empty(config.channels, self.width, pairs, 2))
        self.p = nn.Parameter(torch.empty(self.width, pairs, 2)) if config.matrix == "dplr" else None
        self.skip = nn.Parameter(torch.empty(self.width))  # D
        self.out = common.linear.build(self.width, [self.width] * 2, True)  # values, gates
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """HiPPO-LegS; time steps log-uniform between 0.001 and 0.1, C normal (3.4 and appendix)."""
        diagonal, p, b = hippo(self.states)
        self.log_decay.copy_((-diagonal.real).log())
        self.frequency.copy_(diagonal.imag)
        self.b.copy_(torch.view_as_real(b))
        if self.p is not None:
            self.p.copy_(torch.view_as_real(p))
        nn.init.normal_(self.c, std=0.5**0.5)
        nn.init.uniform_(self.log_step, math.log(0.001), math.log(0.1))
        nn.init.ones_(self.skip)

    def system(self, dtype: torch.dtype) -> System:
        """The discretised state space in this precision."""
        step = self.log_step.to(dtype).exp()[:, None]
        diagonal = torch.complex(-self.log_decay.to(dtype).exp(), self.frequency.to(dtype))
        b, c = (torch.view_as_complex(part.to(dtype)) for part in (self.b, self.c))
        if self.p is not None:
            return LowRankSystem(step, diagonal, torch.view_as_complex(self.p.to(dtype)), b, c)
        log_a = step * diagonal
        return DiagonalSystem(log_a, torch.expm1(log_a) / diagonal * b, c)

    @torch.no_grad()
    def step_weights(self) -> Tensor:
        """One step of the state space as x ← α x − w (g·x) + b u, y = c·x: α, b, c, w, g as real and imaginary parts
        (width, 5, N) in single precision, without w and g if it is diagonal. c and g act on real numbers.

        With A = Λ − p p* and R = (I − Δ/2 Λ)⁻¹ the bilinear step is (I − Δ/2 A)⁻¹ (I + Δ/2 A) x, and both factors
        change a diagonal by one outer product: α = R (1 + Δ/2 Λ), w = R p, and Re Σ g x is all that is subtracted along
        w.
        """
        if self.skip.is_meta:
            return torch.empty(self.width, 3 if self.p is None else 5, self.states, device="meta")
        system = self.system(torch.double)
        if not isinstance(system, LowRankSystem):
            a, c = system.log_a.exp(), 2 * system.c[0].conj()  # type: ignore[attr-defined]
            return torch.stack([torch.cat((one.real, one.imag), -1) for one in (a, system.b, c)], 1).float()
        step, p, inverse, gain = system.step, system.p, system.inverse, system.gain
        a, w = inverse * (1 + step / 2 * system.diagonal), inverse * p
        overlap = (p.conj() * w).real.sum(-1, keepdim=True)
        g = (p.conj() * (step * (1 - gain * overlap) + gain * a)).conj()
        a, w, g = (torch.cat((one.real, one.imag), -1) for one in (a, w, g))
        return torch.stack((a, system.b, system.c[0], w, g), 1).float()

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        x, dtype = observe(self, "v", x), accumulator_dtype(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(state, Recurrent):
                system = self.system(dtype)
                y = state.advance(lambda x, carry, real: self.run(x, carry, real, system), x, context)
            else:
                unpacked = unpack_rows(context, restarts=True)
                rows = unpacked.gather(x)
                if self.sees == "around" and unpacked.real is not None:
                    rows = rows * unpacked.real[..., None]  # the second kernel starts at the last token
                kernels = self.system(dtype).kernel(max(1, rows.shape[1]))
                if unpacked.starts is not None:
                    y = self.convolve_packed(rows.to(dtype), kernels, unpacked.starts)
                else:
                    y = convolve(rows.to(dtype).transpose(1, 2), *kernels).transpose(1, 2)
                y = unpacked.scatter(y, x)
            y = observe(self, "heads", y + self.skip.to(dtype) * x.to(dtype))
        values, gates = self.out(nn.functional.gelu(y).to(x.dtype)).chunk(2, -1)
        return values * gates.sigmoid()

    def convolve_packed(self, u: Tensor, kernels: Tensor, starts: Tensor) -> Tensor:
        """The sentences of packed rows, each on its own."""
        y = packed_convolution(u, kernels[0], starts)
        if self.sees == "past":
            return y
        later = nn.functional.pad(kernels[1], (1, -1))  # a token does not see itself twice
        return y + packed_convolution(u.flip(1), later, flip_starts(starts)).flip(1)

    def prepare(self, context: Context, rows: int) -> None:
        unpack_rows(context, restarts=True)

    def run(self, x: Tensor, carry: Carry, real: Tensor | None, system: System) -> tuple[Tensor, Carry]:
        """SSM(u) of new tokens (batch, time, width), and the carry after each row's last real one."""
        y, then = system.run(x.to(carry[0].dtype).transpose(1, 2), carry[0], real)
        return y.transpose(1, 2), (then,)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return (like.new_zeros(batch, self.width, self.states, dtype=accumulator_dtype(like.dtype)),)

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        return self.run(x, carry, real, self.system(carry[0].dtype))[1]

    def new_state(self) -> State:
        if self.sees == "around":
            raise ValueError("an S4 mixer that sees later tokens cannot decode; set sees: past")
        return Recurrent(self.begin, self.fold)
