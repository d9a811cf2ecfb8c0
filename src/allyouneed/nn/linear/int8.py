"""Int8 linear maps and token embeddings for inference: a quarter of the memory, integer matmuls.

Weights are integers −127 … 127 of a step per output (symmetric, so 0 stays 0). Activations are quantized per token to
256 levels with a zero point:

    y_o = step_o · step_x · Σ_i codes_oi (q_i − zero) + b_o,   q = round(x / step_x) + zero,   step_x = (max − min)/255

(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", eq.
1 and 7), with min ≤ 0 ≤ max; or to −127 … 127 of a fixed scale a, which Marian stores with a model:

    y_o = step_o / a · Σ_i codes_oi q_i + b_o,   q = round(a x)

Integer sums are exact in any order, so the result does not depend on the batch.
`int8_linear_reference` is the definition; on x86, FBGEMM runs the matmul on weights that are packed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from allyouneed.torch_private import has_fbgemm, has_vnni, pack_linear, quantized_operator

MAX_CODE = 127  # largest weight code
MIN_STEP = 6.1e-5  # smallest token step, as in FBGEMM


class Int8Weight(NamedTuple):
    """Int8 codes (outputs, inputs) and the step of each output (outputs,)."""

    codes: Tensor
    step: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        if weight.is_meta:  # a meta model: weights are assigned later
            # not empty_like: on meta tensors it makes torch import its compiler
            empty = partial(torch.empty, device="meta")
            return cls(empty(weight.shape, dtype=torch.int8), empty(len(weight), dtype=torch.float32))
        weight = weight.detach().float()
        step = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / MAX_CODE
        return cls((weight / step[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE).to(torch.int8), step)


class WeightVersion:
    """Counts changes of any int8 weight, so that programs lowered from older weights are rebuilt."""

    count = 0


weight_version = WeightVersion()


class Int8Linear(nn.Module):
    """Int8 replacement of a dense map. `weight` dequantizes the codes. `input_scale`: of all activations; None: each
    token has its own."""

    codes: Tensor
    step: Tensor
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(self, codes: Int8Weight, bias: Tensor | None, input_scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("codes", codes.codes)
        self.register_buffer("step", codes.step)
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        self.register_buffer("input_scale", input_scale)
        self._product: Callable[[Tensor], Tensor] | None = None
        self.out_features, self.in_features = codes.codes.shape

    @property
    def weight(self) -> Tensor:
        return self.codes * self.step[:, None]

    def narrowed(self, outputs: Tensor) -> Int8Linear:
        """The map to these outputs (n,) alone."""
        bias = None if self.bias is None else self.bias[outputs]
        return Int8Linear(Int8Weight(self.codes.index_select(0, outputs), self.step[outputs]), bias, self.input_scale)

    @property
    def _has_kernel(self) -> bool:
        # without VNNI, sums of pairs of products would overflow where all 255 levels are used
        return has_fbgemm() and (self.input_scale is None or has_vnni())

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not x.numel() or not self._has_kernel:
            return int8_linear_reference(x, self.codes, self.step, self.bias, self.input_scale)
        if self._product is None:
            self._product = FbgemmLinear(self.codes, self.step, self.bias, self.input_scale)
        found = self._product(x if x.dtype is torch.float32 else x.float())
        return found if x.dtype is torch.float32 else found.to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """`model.to(bfloat16)` moves steps, bias and scale without rounding them."""
        held = {name: tensor for name, tensor in self.named_buffers() if name != "codes"}
        super()._apply(fn, recurse)
        for name, tensor in held.items():
            setattr(self, name, tensor.to(self.codes.device))
        self._product = None
        weight_version.count += 1
        return self

    def _load_from_state_dict(self, *given: Any, **named: Any) -> None:
        super()._load_from_state_dict(*given, **named)
        self._product = None
        weight_version.count += 1

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Codes(nn.Module):
    """A matrix in int8; `weight` dequantizes it."""

    codes: Tensor
    step: Tensor

    def __init__(self, codes: Int8Weight) -> None:
        super().__init__()
        self.register_buffer("codes", codes.codes)
        self.register_buffer("step", codes.step)

    @property
    def weight(self) -> Tensor:
        return self.codes * self.step[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`model.to(bfloat16)` moves steps without rounding them."""
        step = self.step
        super()._apply(fn, recurse)
        self.step = step.to(self.codes.device)
        return self


class Int8Table(Int8Codes):
    """Int8 replacement of a token embedding; a tied head shares its codes."""

    def __init__(self, codes: Int8Weight) -> None:
        super().__init__(codes)
        self.num_embeddings, self.embedding_dim = codes.codes.shape

    def forward(self, tokens: Tensor) -> Tensor:
        return self.codes[tokens] * self.step[tokens][..., None]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def quantize_tokens(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 … levels per token, not yet rounded (…, inputs); the step (…, 1); the zero point (…, 1)."""
    low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True).clamp_(min=0)
    step = (high.sub_(low)).mul_(1 / levels)
    zero = low.div_(step.clamp(min=torch.finfo(step.dtype).tiny)).round_().neg_()
    step = step.clamp_(min=MIN_STEP)
    return torch.addcmul(zero, x, step.reciprocal()), step, zero


def quantize_by_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Whole numbers −127 … 127, as floats."""
    return (x.float() * scale).round_().clamp_(-MAX_CODE, MAX_CODE)


def int8_linear_reference(
    x: Tensor, codes: Tensor, step: Tensor, bias: Tensor | None, input_scale: Tensor | None = None
) -> Tensor:
    """The definition, for any device."""
    if input_scale is None:
        codes_x, token_step, zero = quantize_tokens(x.float(), 255)
        whole = codes_x.round_().clamp_(0, 255) - zero
    else:
        whole, token_step = quantize_by_scale(x, input_scale), input_scale.reciprocal()
    found = nn.functional.linear(whole, codes.float()) * (token_step * step)
    return (found if bias is None else found + bias).to(x.dtype)


@cache
def activation_levels() -> int:
    """CPUs without VNNI add pairs of products in 16 bits, so activations use half the levels to avoid overflow."""
    return 255 if has_vnni() else 127


class FbgemmLinear:
    """The same with weights packed for FBGEMM. One token uses the dynamic kernel, which finds its range itself; several
    tokens, each with its own range, are pre-scaled and corrected for their zero points: step_x · (Σ codes q · step_o
    − zero · Σ codes · step_o) + b. With a fixed scale the zero point is 127, which the kernel knows."""

    def __init__(self, codes: Tensor, step: Tensor, bias: Tensor | None, input_scale: Tensor | None = None) -> None:
        self.input_scale = input_scale
        packed = pack_linear(codes, step, [None] if bias is None else [bias, None])
        self.biased_weight, self.unbiased_weight = packed[0], packed[-1]
        self.dynamic = quantized_operator("linear_dynamic")
        self.scaled = quantized_operator("linear_with_input_q_dq_qweight_dq_output_fp32")
        sums = codes.sum(1, dtype=torch.int64) * step
        self.corrections = torch.stack([sums, torch.zeros_like(sums) if bias is None else bias])  # (2, outputs)
        self.inputs, self.reduced = codes.shape[1], activation_levels() < 255

    def __call__(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            whole = quantize_by_scale(x.reshape(-1, self.inputs), self.input_scale)
            sums = self.scaled(whole, 1.0, MAX_CODE, self.unbiased_weight)
            return (sums / self.input_scale).add_(self.corrections[1]).view(*x.shape[:-1], -1)
        if x.numel() == self.inputs:
            return self.dynamic(x, self.biased_weight, self.reduced)
        flat = x.reshape(-1, self.inputs)
        codes_x, step, zero = quantize_tokens(flat, activation_levels())
        sums = self.scaled(codes_x, 1.0, 0, self.unbiased_weight)
        added = torch.cat([zero.mul_(step).neg_(), torch.ones_like(step)], 1)  # (tokens, 2)
        return sums.mul_(step).addmm_(added, self.corrections).view(*x.shape[:-1], -1)
