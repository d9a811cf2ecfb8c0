"""Packed ternary weights times int8 activations on GPUs; packing: `nn/linear/ternary.py`.

One kernel quantizes each token, one multiplies: a tile of bytes is read once, unpacked by shifts into four tiles of
weights, and multiplied with the four quarters of the inputs. Sums are int32, so tiling does not change results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from allyouneed.kernels import launches


@triton.jit
def _quantize(x, whole, step, inputs, smallest: tl.constexpr, most: tl.constexpr, WIDE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = at < inputs
    values = tl.load(x + row * inputs + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), 0), smallest)
    # bit-equal to torch: multiply by the reciprocal, round half to even
    rounded = libdevice.rint(values * (tl.div_rn(1.0, peak) * most))
    tl.store(whole + row * inputs + at, tl.minimum(rounded, most).to(tl.int8), mask=inside)
    tl.store(step + row, peak * (1 / most))


@triton.jit
def _ternary_matmul(
    whole, token_step, bytes, weight_step, out, tokens,
    inputs: tl.constexpr, outputs: tl.constexpr, quarter: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # weight rows
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    sums = tl.zeros((OUTPUTS, TOKENS), dtype=tl.int32)
    for start in range(0, quarter, INPUTS):
        at = start + tl.arange(0, INPUTS)
        here = bytes + row[:, None].to(tl.int64) * quarter + at[None, :]
        tile = tl.load(here, mask=(row < outputs)[:, None] & (at < quarter)[None, :], other=0)  # (OUTPUTS, INPUTS)
        for part in tl.static_range(4):
            weights = ((tile >> (2 * part)) & 3).to(tl.int8) - 1
            column = part * quarter + at
            known = (at < quarter) & (column < inputs)
            there = whole + token[None, :].to(tl.int64) * inputs + column[:, None]
            x = tl.load(there, mask=known[:, None] & (token < tokens)[None, :], other=0)  # (INPUTS, TOKENS)
            sums = tl.dot(weights, x, sums, out_dtype=tl.int32)
    inside = (row < outputs)[:, None] & (token < tokens)[None, :]
    steps = tl.load(weight_step + row, mask=row < outputs, other=0.0)[:, None]
    steps = tl.load(token_step + token, mask=token < tokens, other=0.0)[None, :] * steps
    target = out + token[None, :].to(tl.int64) * outputs + row[:, None]
    tl.store(target, sums.to(tl.float32) * steps, mask=inside)


def tile_sizes(tokens: int) -> tuple[int, int, int, int]:
    """Tokens, outputs and bytes per tile, and warps (the fastest of about thirty on an H200)."""
    return (16, 32, 128, 2) if tokens <= 16 else (64 if tokens <= 64 else 128, 64, 64, 4)


@launches
def ternary_linear(
    x: Tensor, bytes: Tensor, weight_step: Tensor, smallest: float, most: int, dtype: torch.dtype
) -> Tensor:
    """(…, inputs) to (…, outputs). The maximum of a token, at least `smallest`, maps to `most`."""
    inputs, (outputs, quarter) = x.shape[-1], bytes.shape
    flat = x.reshape(-1, inputs).contiguous()
    count, sizes = len(flat), (inputs, outputs, quarter)
    out = torch.empty(count, outputs, dtype=dtype, device=x.device)
    if count:
        whole = torch.empty(flat.shape, dtype=torch.int8, device=x.device)
        step = torch.empty(count, dtype=torch.float32, device=x.device)
        wide = triton.next_power_of_2(inputs)
        _quantize[(count,)](flat, whole, step, inputs, smallest, float(most), wide, num_warps=8)
        *tile, warps = tile_sizes(count)
        grid = (triton.cdiv(outputs, tile[1]), triton.cdiv(count, tile[0]))
        _ternary_matmul[grid](whole, step, bytes, weight_step, out, count, *sizes, *tile, num_warps=warps)
    return out.view(*x.shape[:-1], outputs)
