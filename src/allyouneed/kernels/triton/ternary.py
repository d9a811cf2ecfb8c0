"""Packed ternary weights times int8 activations on GPUs; packing: `nn/linear/ternary.py`.

A tile of bytes is read once, unpacked by shifts into four tiles of weights, and multiplied with the four quarters of
the inputs. Sums are integers, so tiling does not change results. Up to `FEW` tokens are quantized by the kernel that
multiplies them; a single one needs no tensor cores, if its inputs come in words. More are quantized once, by a kernel
of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs

FEW = 16


@triton.jit
def _code(values, rate):
    """Integers with the code in their lowest byte, bit-equal to torch: the product, then its sum with 1.5 · 2^23, which
    rounds half to even. No value exceeds the maximum, so that none has to be clamped."""
    return libdevice.add_rn(libdevice.mul_rn(values, rate), 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _quantize(
    x, whole, step, inputs, x_row, smallest: tl.constexpr, most: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    await_inputs(OVERLAP)
    inside = at < inputs
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), 0), smallest)
    found = _code(values, libdevice.rcp_rn(peak) * most).to(tl.int8)
    tl.store(whole + row * inputs + at, found, mask=inside)
    tl.store(step + row, peak * (1 / most))


@triton.jit
def _dot4(digits, codes):
    """Four products of the bytes of two words, summed: unsigned times signed."""
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, 0;", "=r,r,r", [digits, codes], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _peak(values):
    """The largest absolute value. Bits of positive numbers have their order, and one instruction finds a warp's largest
    integer."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _codes(values, rate):
    """(words, 4) values to words of four codes."""
    return tl.sum((_code(values, rate) & 255) << 8 * tl.arange(0, 4)[None, :], 1)


@triton.jit
def _products(tile, shift, codes):
    """Words of weights (OUTPUTS, words), shifted to those of their quarter, times codes (words,): (w + 1) x − x."""
    ones = tl.full(codes.shape, 0x01010101, tl.int32)
    return _dot4((tile >> shift) & 0x03030303, codes[None, :]) - _dot4(ones, codes)[None, :]


@triton.jit
def _one_token(
    x, words, weight_step, bias, out, outputs, inputs: tl.constexpr, quarter: tl.constexpr,
    smallest: tl.constexpr, most: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token, without tensor cores: one instruction multiplies the four bytes of a word. The words of all four
    quarters of the inputs are one axis, so each word of weights is loaded four times. What does not depend on the input
    is loaded before it is ready."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < outputs
    width: tl.constexpr = quarter // 4
    here = words + n[:, None].to(tl.int64) * width
    word, part = tl.arange(0, 4 * WORDS) % WORDS, tl.arange(0, 4 * WORDS) // WORDS
    shift = (2 * part)[None, :]
    real = inside[:, None] & (word < width)[None, :]
    tile = tl.load(here + word[None, :], mask=real, other=0)
    step = tl.load(weight_step + n, mask=inside, other=0.0)
    added = step
    if BIAS:
        added = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    column = (part * quarter + 4 * word)[:, None] + tl.arange(0, 4)[None, :]
    values = tl.load(x + column, mask=(word < width)[:, None] & (column < inputs), other=0.0).to(tl.float32)
    peak = tl.maximum(_peak(values), smallest)
    for start in tl.static_range(WORDS, width, WORDS):
        known = (word < width - start)[:, None] & (column < inputs - 4 * start)
        more = tl.load(x + column + 4 * start, mask=known, other=0.0).to(tl.float32)
        peak = tl.maximum(_peak(more), peak)
    rate = libdevice.rcp_rn(peak) * most
    codes = _codes(values, rate)
    sums = _products(tile, shift, codes)
    for start in tl.static_range(WORDS, width, WORDS):
        known = (word < width - start)[:, None] & (column < inputs - 4 * start)
        codes = _codes(tl.load(x + column + 4 * start, mask=known, other=0.0).to(tl.float32), rate)
        real = inside[:, None] & (word < width - start)[None, :]
        sums += _products(tl.load(here + start + word[None, :], mask=real, other=0), shift, codes)
    scale = peak * (1 / most)
    found = tl.sum(sums, 1).to(tl.float32) * (scale * step)
    if BIAS:
        found += added
    tl.store(out + n, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lowest(tile):
    """The weight in the lowest bits of each byte, four bytes at a time: adding 127 and flipping the sign takes one away
    without a borrow."""
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x03030303; add.u32 $0, $0, 0x7f7f7f7f; xor.b32 $0, $0, 0x80808080;", "=r,r", [tile],
        dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _next(tile):
    """The following weight of each byte moves to its lowest bits; what comes from the byte above stays in others."""
    return tl.inline_asm_elementwise("shr.b32 $0, $1, 2;", "=r,r", [tile], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit(do_not_specialize=["tokens"])  # prompts have any length: compiled once for all
def _matmul(
    x, token_step, bytes, weight_step, bias, out, tokens, outputs, x_row, inputs: tl.constexpr, quarter: tl.constexpr,
    smallest: tl.constexpr, most: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """WHOLE: the tokens are integers already."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)  # weight rows
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside, real = n < outputs, token < tokens
    given = x + token[None, :].to(tl.int64) * x_row
    row_step = tl.load(weight_step + n, mask=inside, other=0.0)[:, None]  # before the input is ready
    await_inputs(OVERLAP)
    if WHOLE:
        rate = tl.zeros((TOKENS,), tl.float32)
        step = tl.load(token_step + token, mask=real, other=0.0)
    else:
        tops = tl.zeros((TOKENS,), tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            values = tl.load(given + at[:, None], mask=(at < inputs)[:, None] & real[None, :], other=0.0)
            tops = tl.maximum(tops, tl.max(tl.abs(values.to(tl.float32)), 0))
        peak = tl.maximum(tops, smallest)
        rate, step = libdevice.rcp_rn(peak) * most, peak * (1 / most)
    here = bytes + n[:, None].to(tl.int64) * quarter
    sums = tl.zeros((OUTPUTS, TOKENS), dtype=tl.int32)
    for start in range(0, quarter, INPUTS):
        at = start + tl.arange(0, INPUTS)
        packed = inside[:, None] & (at < quarter)[None, :]
        tile = tl.load(here + at[None, :], mask=packed, other=0)  # (OUTPUTS, INPUTS)
        for part in tl.static_range(4):
            column = part * quarter + at
            known = ((at < quarter) & (column < inputs))[:, None] & real[None, :]
            values = tl.load(given + column[:, None], mask=known, other=0)  # (INPUTS, TOKENS)
            codes = values
            if not WHOLE:
                codes = _code(values.to(tl.float32), rate[None, :]).to(tl.int8)
            sums = tl.dot(_lowest(tile), codes, sums, out_dtype=tl.int32)
            tile = _next(tile)
    found = sums.to(tl.float32) * (step[None, :] * row_step)
    if BIAS:
        found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * outputs + n[:, None]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


class TernaryTile(NamedTuple):
    """Tokens, outputs and bytes of a tile, and warps."""

    tokens: int
    outputs: int
    inputs: int
    warps: int


def tile_config(tokens: int, outputs: int, quarter: int) -> TernaryTile:
    narrow = 64 if quarter % 128 else 128
    if tokens == 1 and quarter % 4 == 0:  # more outputs share its quantization, fewer occupy the GPU
        return TernaryTile(1, 4 if outputs <= 4096 else 8, min(1024, triton.next_power_of_2(quarter)), 4)
    if tokens <= FEW:
        return TernaryTile(16, 32 if outputs >= 2048 else 16, narrow, 2)
    return TernaryTile(64, 32, 64, 4) if tokens <= 64 else TernaryTile(128, 64, 64, 4)


def ternary_linear(
    x: Tensor, bytes: Tensor, weight_step: Tensor, bias: Tensor | None, smallest: float, most: int
) -> Tensor:
    """(…, inputs) to (…, outputs). The maximum of a token, at least `smallest`, maps to `most`."""
    inputs, (outputs, quarter) = x.shape[-1], bytes.shape
    flat = x.reshape(-1, inputs)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    count, overlap = len(flat), has_pdl(x.device)
    tile = tile_config(count, outputs, quarter)
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    how = {"smallest": smallest, "most": float(most), "BIAS": bias is not None, "OVERLAP": overlap}
    how |= {"launch_pdl": overlap}
    shift = flat if bias is None else bias
    if tile.tokens == 1:
        _one_token[(triton.cdiv(outputs, tile.outputs),)](
            flat, bytes.view(torch.int32), weight_step, shift, out, outputs, inputs, quarter, **how,
            OUTPUTS=tile.outputs, WORDS=tile.inputs // 4, num_warps=tile.warps,
        )  # fmt: skip
    elif count:
        step = weight_step
        if count > FEW:
            step = torch.empty(count, dtype=torch.float32, device=x.device)
            whole = torch.empty(flat.shape, dtype=torch.int8, device=x.device)
            _quantize[(count,)](
                flat, whole, step, inputs, flat.stride(0), smallest, float(most), triton.next_power_of_2(inputs),
                OVERLAP=overlap, launch_pdl=overlap, num_warps=8,
            )  # fmt: skip
            flat = whole
        grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(count, tile.tokens))
        _matmul[grid](
            flat, step, bytes, weight_step, shift, out, count, outputs, flat.stride(0), inputs, quarter, **how,
            WHOLE=count > FEW, TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            num_warps=tile.warps,
        )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)
