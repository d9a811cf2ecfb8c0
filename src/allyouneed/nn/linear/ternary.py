"""Inference from ternary weights at two bits each, with the same numbers as in training.

A byte holds four weights: with the inputs cut into four quarters, byte j of a row holds weight j of each quarter, the
first in its lowest bits, as w + 1. One shift and one mask unpack a contiguous quarter. Products of int8 activations are
summed as integers and scaled as in `BitLinear` (Ma et al. 2024, 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.linear.bitlinear import (
    MAX_CODE,
    MIN_SCALE,
    SINGLE_TOKEN,
    BitLinear,
    quantize_ternary,
    quantize_tokens,
    rescale,
)
from allyouneed.torch_private import int8_matmul

UNPACK_BYTES = 2**22  # bytes of weights unpacked at a time


def pack_weights(weights: Tensor) -> Tensor:
    """−1, 0, 1 (outputs, inputs) to bytes (outputs, ⌈inputs / 4⌉)."""
    quarter = -(-weights.shape[1] // 4)
    codes = nn.functional.pad(weights.to(torch.int8) + 1, (0, 4 * quarter - weights.shape[1])).to(torch.uint8)
    parts = codes.split(quarter, 1)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def unpack_weights(bytes: Tensor, inputs: int) -> Tensor:
    """The inverse: int8 (outputs, inputs)."""
    return torch.cat([(bytes >> shift) & 3 for shift in (0, 2, 4, 6)], 1)[:, :inputs].to(torch.int8) - 1


class PackedBitLinear(nn.Module):
    """Packed replacement of a `BitLinear`. Results are equal bit for bit in single and double precision; in bfloat16
    they are more precise, since sums are integers."""

    packed: Tensor
    step: Tensor
    bias: Tensor | None

    def __init__(self, linear: BitLinear) -> None:
        super().__init__()
        weights, step = quantize_ternary(linear.weight.detach(), linear.outputs)
        self.inputs, self.outputs = linear.in_features, linear.out_features
        self.splits = linear.outputs
        self.norm = linear.norm
        self.register_buffer("packed", pack_weights(weights))
        self.register_buffer("step", step)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.norm is None else self.norm(x, SINGLE_TOKEN)
        if usable(x):
            from allyouneed.kernels.triton.ternary import ternary_linear as kernel

            return kernel(x, self.packed, self.step, self.bias, MIN_SCALE, MAX_CODE)
        tokens, token_step = quantize_tokens(x)
        product = ternary_linear_cpu if x.device.type == "cpu" else ternary_linear_reference
        return rescale(product(tokens, self.packed), token_step, self.step, self.bias).to(x.dtype)

    def latent_weight(self) -> Tensor:
        """Weights (outputs, inputs) that a `BitLinear` rounds to these: their mean absolute value is the step of each
        merged map."""
        maps = unpack_weights(self.packed, self.inputs).to(self.step.dtype).split(list(self.splits))
        scales = [1 / ternary.abs().mean().clamp(min=MIN_SCALE) for ternary in maps]
        scaled = torch.cat([ternary * scale for ternary, scale in zip(maps, scales, strict=True)])
        return scaled * self.step[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedBitLinear:
        """`model.to(bfloat16)` moves the steps without rounding them."""
        step = self.step
        super()._apply(fn, recurse)
        self.step = step.to(self.packed.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}, bias={self.bias is not None}"


def ternary_linear_reference(tokens: Tensor, bytes: Tensor) -> Tensor:
    """The definition, for any device: integers (…, inputs) times packed weights, exact."""
    return nn.functional.linear(tokens, unpack_weights(bytes, tokens.shape[-1]).to(tokens.dtype))


def ternary_linear_cpu(tokens: Tensor, bytes: Tensor) -> Tensor:
    """The same in int8 with int32 sums, unpacking some rows of weights at a time: Σ (w + 1) x − Σ x."""
    outputs, quarter = bytes.shape
    flat = tokens.reshape(-1, tokens.shape[-1]).to(torch.int8)
    x = nn.functional.pad(flat, (0, 4 * quarter - flat.shape[1]))
    sums = torch.empty(len(x), outputs, dtype=torch.int32)
    rows = max(16, UNPACK_BYTES // (4 * quarter))
    codes = torch.empty(min(rows, outputs), 4 * quarter, dtype=torch.uint8)
    for start in range(0, outputs, rows):
        block = bytes[start : start + rows]
        for number, part in enumerate(codes[: len(block)].split(quarter, 1)):
            torch.bitwise_right_shift(block, 2 * number, out=part)
            part.bitwise_and_(3)
        sums[:, start : start + rows] = int8_matmul(x, codes[: len(block)].view(torch.int8).t())
    sums -= x.sum(-1, keepdim=True, dtype=torch.int32)
    return sums.view(*tokens.shape[:-1], outputs)


def pack_model(model: nn.Module) -> nn.Module:
    """Pack every `BitLinear` of the model in place; the model can no longer be trained.

    A shared map stays shared. To load the `state_dict` of such a model: build, pack, load.
    """
    packed: dict[nn.Module, PackedBitLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BitLinear):
                packed[child] = packed.get(child) or PackedBitLinear(child)
                setattr(parent, name, packed[child])
    return model.eval()
