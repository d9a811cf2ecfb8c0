"""1.58-bit linear maps: Ma et al. 2024, "The Era of 1-bit LLMs" (BitNet b1.58); Wang et al. 2023, "BitNet".

Training keeps full-precision ("latent") weights and computes with ternary ones. Both factors of the matmul are
integers, scaled afterwards: in single precision the sums are exact in any order (127 · inputs < 2^24), so
`nn/linear/ternary.py` gives the same numbers from two bits per weight.
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

MIN_SCALE = 1e-5  # lower bound of a mean or maximum, so that zeros have a scale
MAX_CODE = 127  # symmetric int8
SINGLE_TOKEN = Context(TokenLayout(torch.zeros(1, 1, dtype=torch.long)))  # dummy context for norms over one token


class Bit(Linear):
    """y = (W̃ x̃) · steps + b, with W̃ ∈ {−1, 0, 1} (eq. 1–3) and x̃ ∈ [−128, 127] per token (BitNet, eq. 4).

    Rounding uses the straight-through estimator (BitNet, 2.1). `norm` is applied before the rounding (BitNet, 2.1;
    RMSNorm in the authors' training tips); merged maps of one input share it.
    """

    kind: Literal["bit"] = "bit"
    norm: RMSNorm | None = None
    """RMS norm of the input before it is rounded; default: none."""

    def build(self, inputs: int, outputs: int | Sequence[int], bias: bool) -> nn.Module:
        return BitLinear(self, inputs, sizes(outputs), bias)

    def cost(self, inputs: int, outputs: int, bias: bool) -> Cost:
        total = Cost(parameters=outputs * (inputs + bias), flops=2 * inputs * outputs)
        return total if self.norm is None else total + self.norm.cost(inputs)


class BitLinear(nn.Linear):
    """`outputs`: sizes of the merged maps, each with its own weight scale."""

    def __init__(self, config: Bit, inputs: int, outputs: tuple[int, ...], bias: bool) -> None:
        super().__init__(inputs, sum(outputs), bias=bias)
        self.outputs = outputs
        self.norm = None if config.norm is None else config.norm.build(inputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x, SINGLE_TOKEN)
        tokens, token_step = quantize_tokens(x)
        weights, weight_step = quantize_ternary(self.weight, self.outputs)
        # integers up to 127 are exact in bfloat16 too, but their sums overflow float16
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        sums = nn.functional.linear(tokens.to(dtype), weights.to(dtype))
        return rescale(sums, token_step, weight_step, self.bias).to(x.dtype if dtype != x.dtype else sums.dtype)


def step_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scales: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers (…, inputs) and the step (…, 1) of each token: its largest absolute value / 127."""
    x = x.to(step_dtype(x.dtype))
    with torch.no_grad():
        peak = x.abs().amax(-1, keepdim=True).clamp(min=MIN_SCALE)
    # multiply by the reciprocal, as GPUs do: CPU, GPU and kernel agree to the last bit
    return _straight_through(x * (MAX_CODE / peak), -MAX_CODE - 1, MAX_CODE), peak * (1 / MAX_CODE)


def quantize_ternary(weight: Tensor, outputs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """−1, 0 or 1 (outputs, inputs), and the step of each output: the mean absolute weight of its map (eq. 2–3)."""
    weight = weight.to(step_dtype(weight.dtype))
    with torch.no_grad():
        means = [part.abs().mean().clamp(min=MIN_SCALE).expand(len(part)) for part in weight.split(list(outputs))]
        step = torch.cat(means)
    return _straight_through(weight * (1 / step)[:, None], -1, 1), step


def rescale(sums: Tensor, token_step: Tensor, weight_step: Tensor, bias: Tensor | None) -> Tensor:
    """Integer sums scaled by token and weight steps, plus the bias."""
    found = sums.to(token_step.dtype) * (token_step * weight_step)
    return found if bias is None else found + bias


def _straight_through(x: Tensor, lowest: int, highest: int) -> Tensor:
    """x rounded half to even and clamped, with the gradient of x. Overwrites x when no gradient is needed."""
    if not x.requires_grad:
        return x.round_().clamp_(lowest, highest)
    return x + (x.round().clamp(lowest, highest) - x).detach()  # equals the rounded value exactly
