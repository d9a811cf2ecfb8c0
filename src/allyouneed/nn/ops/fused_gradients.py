"""Gradients with their sums over tokens (fused_backward.py), as operators that a compiler leaves as they are. Each is written
out; kernels/triton/fused_backward.py does it in one reading. Only who trains on a GPU imports this: it takes a fifth of a second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.ops.fused_backward import CURVES

ROWS = 64  # tokens whose sum is written down; what is left of them to add up is small


@torch.library.custom_op("allyouneed::sloped", mutates_args=())
def sloped(gradient: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient by x of what an activation makes of x (…, width), and its sums over tokens (parts, width)."""
    if usable(x):
        from allyouneed.kernels.triton import fused_backward as lean

        return lean.sloped(gradient.contiguous(), x.contiguous(), kind, ROWS)
    wide = torch.promote_types(x.dtype, torch.float32)
    found = gradient.to(wide) * CURVES[kind].slope(x.to(wide))
    return found.to(x.dtype).contiguous(), _summed(found)


@sloped.register_fake
def _(gradient: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), _sums_of(x)


@torch.library.custom_op("allyouneed::joined", mutates_args=())
def joined(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Parts (batch, heads, time, head_width), not all of as many heads, side by side as (batch, time, width), and the
    sums of that over tokens (parts, width)."""
    if usable(parts[0]):
        from allyouneed.kernels.triton import fused_backward as lean

        return lean.joined(parts, ROWS)
    found = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
    return found, _summed(found)


@joined.register_fake
def _(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch, _, time, _ = parts[0].shape
    found = parts[0].new_empty(batch, time, sum(part.shape[1] * part.shape[3] for part in parts))
    return found, _sums_of(found)


@torch.library.custom_op("allyouneed::unnormed", mutates_args=())
def unnormed(
    gradient: Tensor, passing: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient by x (…, width) of its layer norm, whose own is `gradient`, plus that of what passed by; and the
    sums over tokens of the gradients by weight and bias and of what passed by (3, parts, width)."""
    if usable(x):
        from allyouneed.kernels.triton import fused_backward as lean

        return lean.unnormed(gradient.contiguous(), passing.contiguous(), x.contiguous(), weight, mean, scale, ROWS)
    wide = torch.promote_types(x.dtype, torch.float32)
    normal, slope = (x.to(wide) - mean) * scale, gradient.to(wide) * weight
    slope -= slope.mean(-1, keepdim=True) + normal * (slope * normal).mean(-1, keepdim=True)
    found = passing.to(wide) + scale * slope
    sums = torch.stack([_summed(one) for one in (gradient.to(wide) * normal, gradient.to(wide), passing.to(wide))])
    return found.to(x.dtype).contiguous(), sums


@unnormed.register_fake
def _(
    gradient: Tensor, passing: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    sums = _sums_of(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums.new_empty(3, *sums.shape)


def _sums_of(x: Tensor) -> Tensor:
    rows, wide = x.numel() // x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(-(-rows // ROWS), x.shape[-1], dtype=wide)


def _summed(x: Tensor) -> Tensor:
    sums = _sums_of(x).zero_()
    sums[:1] = x.flatten(0, -2).to(sums.dtype).sum(0)
    return sums
