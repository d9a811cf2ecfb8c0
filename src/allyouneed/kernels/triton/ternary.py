"""Ternary weights at two bits each times int8 activations, for GPUs. `nn/linear/ternary.py` says how the bytes are laid out.

One kernel rounds each token to whole numbers of its step, one multiplies: a tile of bytes is read once, gives four
tiles of weights by shifts, and meets the four quarters of the inputs. Sums are int32, so tiles change no number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


@triton.jit
def _round(x, whole, step, inputs, smallest: tl.constexpr, most: tl.constexpr, WIDE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = at < inputs
    values = tl.load(x + row * inputs + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), 0), smallest)
    # as torch does it, to the last bit: a number over a tensor is the inverse times the number; halves go to even
    rounded = libdevice.rint(values * (tl.div_rn(1.0, peak) * most))
    tl.store(whole + row * inputs + at, tl.minimum(rounded, most).to(tl.int8), mask=inside)
    tl.store(step + row, peak * (1 / most))


@triton.jit
def _multiply(
    whole, token_step, bytes, weight_step, out, tokens,
    inputs: tl.constexpr, outputs: tl.constexpr, quarter: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # of the weights
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


def tiles(tokens: int) -> tuple[int, int, int, int]:
    """Tokens, outputs and bytes of a tile, and how many warps work on it (the fastest of some thirty on an H200)."""
    return (16, 32, 128, 2) if tokens <= 16 else (64 if tokens <= 64 else 128, 64, 64, 4)


def linear(x: Tensor, bytes: Tensor, weight_step: Tensor, smallest: float, most: int, dtype: torch.dtype) -> Tensor:
    """(…, inputs) to (…, outputs). A token's peak counts as at least `smallest`, and becomes `most`."""
    inputs, (outputs, quarter) = x.shape[-1], bytes.shape
    flat = x.reshape(-1, inputs).contiguous()
    count, sizes = len(flat), (inputs, outputs, quarter)
    out = torch.empty(count, outputs, dtype=dtype, device=x.device)
    if count:
        whole = torch.empty(flat.shape, dtype=torch.int8, device=x.device)
        step = torch.empty(count, dtype=torch.float32, device=x.device)
        wide = triton.next_power_of_2(inputs)
        _round[(count,)](flat, whole, step, inputs, smallest, float(most), wide, num_warps=8)
        *tile, warps = tiles(count)
        grid = (triton.cdiv(outputs, tile[1]), triton.cdiv(count, tile[0]))
        _multiply[grid](whole, step, bytes, weight_step, out, count, *sizes, *tile, num_warps=warps)
    return out.view(*x.shape[:-1], outputs)
