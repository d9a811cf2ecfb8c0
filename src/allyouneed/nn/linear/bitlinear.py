"""1.58-bit linear maps: Ma et al. 2024, "The Era of 1-bit LLMs" (BitNet b1.58); Wang et al. 2023, "BitNet".

While it trains, a map keeps its weights in full ("latent" weights) and computes with ternary ones. Both sides of the
product are whole numbers, and the steps they count in are multiplied in afterwards: in single precision the sums are
exact in any order (127 · inputs < 2^24), which is why `nn/linear/ternary.py` can give the same numbers from two bits a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.linear.dense import Linear, sizes
from allyouneed.nn.norms import RMSNorm

SMALLEST = 1e-5  # the least that a mean or a peak counts as: zeros have no size
MOST = 127  # int8, the same on both sides of zero
ALONE = Context(TokenLayout(torch.zeros(1, 1, dtype=torch.long)))  # what a norm is told that looks at one token only


class Bit(Linear):
    """y = (W̃ x̃) · steps + b, with W̃ ∈ {−1, 0, 1} (eq. 1–3) and x̃ ∈ [−128, 127] token by token (BitNet, eq. 4).

    Rounding passes gradients as if it were not there (BitNet, 2.1: straight-through estimator). `norm` comes before the
    rounding (BitNet, 2.1; RMSNorm in the authors' training tips); maps of one input made by one product share it.
    """

    kind: Literal["bit"] = "bit"
    norm: RMSNorm | None = None

    def build(self, inputs: int, outputs: int | Sequence[int], bias: bool) -> nn.Module:
        return BitLinear(self, inputs, sizes(outputs), bias)

    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost:
        total = Cost(parameters=outputs * (inputs + bias), flops=2 * inputs * outputs)
        return total if self.norm is None else total + self.norm.cost(inputs)


class BitLinear(nn.Linear):
    """`outputs`: of each map in it, whose weights are measured by themselves."""

    def __init__(self, config: Bit, inputs: int, outputs: tuple[int, ...], bias: bool) -> None:
        super().__init__(inputs, sum(outputs), bias=bias)
        self.outputs = outputs
        self.norm = None if config.norm is None else config.norm.build(inputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x, ALONE)
        tokens, token_step = rounded_tokens(x)
        weights, weight_step = ternary_weights(self.weight, self.outputs)
        # whole numbers to 127 are whole in bfloat16 too, but their sums would leave float16's range
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        sums = nn.functional.linear(tokens.to(dtype), weights.to(dtype))
        return in_steps(sums, token_step, weight_step, self.bias).to(x.dtype if dtype != x.dtype else sums.dtype)


def exactly(dtype: torch.dtype) -> torch.dtype:
    """What steps are measured in: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def rounded_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of each token's own step: (…, inputs) and (…, 1), a step being its largest entry / 127."""
    x = x.to(exactly(x.dtype))
    with torch.no_grad():
        peak = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    # by a product, because a GPU's division by a number is one: so CPU, GPU and kernel agree to the last bit
    return _straight_through(x * (MOST / peak), -MOST - 1, MOST), peak * (1 / MOST)


def ternary_weights(weight: Tensor, outputs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """−1, 0 or 1 (outputs, inputs), and the step of each output: the mean size of its map's weights (eq. 2–3)."""
    weight = weight.to(exactly(weight.dtype))
    with torch.no_grad():
        means = [part.abs().mean().clamp(min=SMALLEST).expand(len(part)) for part in weight.split(list(outputs))]
        step = torch.cat(means)
    return _straight_through(weight * (1 / step)[:, None], -1, 1), step


def in_steps(sums: Tensor, token_step: Tensor, weight_step: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of whole numbers as what they stand for."""
    found = sums.to(token_step.dtype) * (token_step * weight_step)
    return found if bias is None else found + bias


def _straight_through(x: Tensor, lowest: int, highest: int) -> Tensor:
    """x, which nobody else needs, rounded half to even and kept within bounds, with the gradient of x."""
    if not x.requires_grad:
        return x.round_().clamp_(lowest, highest)
    return x + (x.round().clamp(lowest, highest) - x).detach()  # which is exactly the rounded one
