"""Linear maps for few rows, limited by reading the weights. `gated` maps compute two products and multiply them (GLU).
Accumulation is fp32.

A map with too few outputs to occupy the GPU is split along its inputs; the parts (parts, rows, outputs) are summed by
the next kernel, a norm (add_norm.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + libdevice.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu-tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _gate(x, other, ACTIVATION: tl.constexpr):
    """The activated first half of the outputs times the second, or times its sigmoid ("glu")."""
    if ACTIVATION == "glu":
        other = tl.sigmoid(other)
    return _activate(x, ACTIVATION) * other


@triton.jit
def _prefetch(at):
    """Prefetch these addresses to L2 without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _one_row(
    x, weight, bias, out, outputs, inputs: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, without tensor cores. Weights are loaded one iteration ahead, the first before the input is ready."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    inside = n < outputs
    each: tl.constexpr = (inputs + PARTS * INPUTS - 1) // (PARTS * INPUTS) * INPUTS
    end = tl.minimum((part + 1) * each, inputs)
    sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    other = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    here = weight + n[:, None].to(tl.int64) * inputs
    there = here + tl.cast(outputs, tl.int64) * inputs
    at = part * each + tl.arange(0, INPUTS)
    real = inside[:, None] & (at < end)[None, :]
    tile = tl.load(here + at[None, :], mask=real, other=0.0, eviction_policy="evict_first")
    twin = tile
    if GATED:
        twin = tl.load(there + at[None, :], mask=real, other=0.0, eviction_policy="evict_first")
    await_inputs(OVERLAP)
    for _ in range(0, each, INPUTS):
        given = tl.load(x + at, mask=at < end, other=0.0).to(tl.float32)[None, :]
        at += INPUTS
        real = inside[:, None] & (at < end)[None, :]
        following = tl.load(here + at[None, :], mask=real, other=0.0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * given
        tile = following
        if GATED:
            following = tl.load(there + at[None, :], mask=real, other=0.0, eviction_policy="evict_first")
            other += twin.to(tl.float32) * given
            twin = following
    found = tl.sum(sums, 1)
    if BIAS:
        found += tl.load(bias + n, mask=inside & (part == 0), other=0.0).to(tl.float32)
    if GATED:
        more = tl.sum(other, 1)
        if BIAS:
            more += tl.load(bias + outputs + n, mask=inside, other=0.0).to(tl.float32)
        found = _gate(found, more, ACTIVATION)
    else:
        found = _activate(found, ACTIVATION)
    tl.store(out + part * outputs + n, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few_rows(
    x, weight, bias, out, rows, outputs, inputs: tl.constexpr, x_row,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, LINES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = n < outputs
    each: tl.constexpr = (inputs + PARTS * INPUTS - 1) // (PARTS * INPUTS) * INPUTS
    if OVERLAP:
        gdc_launch_dependents()
        if LINES > 0:  # prefetch the first weights while the input is still being computed
            line = tl.minimum(part * each + tl.arange(0, LINES) * 64, inputs - 1)
            first = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs + line[None, :]
            _prefetch(first)
            if GATED:
                _prefetch(first + tl.cast(outputs, tl.int64) * inputs)
        gdc_wait()
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    other = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    here = weight + n[:, None].to(tl.int64) * inputs
    for start in range(0, each, INPUTS):
        at = part * each + start + tl.arange(0, INPUTS)
        real = inside[:, None] & (at < inputs)[None, :]
        given = tl.load(
            x + r[None, :].to(tl.int64) * x_row + at[:, None],
            mask=(r < rows)[None, :] & (at < inputs)[:, None],
            other=0.0,
        )  # (INPUTS, ROWS)
        sums = tl.dot(tl.load(here + at[None, :], mask=real, other=0.0), given, sums)
        if GATED:
            there = here + tl.cast(outputs, tl.int64) * inputs + at[None, :]
            other = tl.dot(tl.load(there, mask=real, other=0.0), given, other)
    if BIAS:
        sums += tl.load(bias + n, mask=inside & (part == 0), other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            other += tl.load(bias + outputs + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        found = _gate(sums, other, ACTIVATION)
    else:
        found = _activate(sums, ACTIVATION)
    target = out + (part * rows + r[None, :]).to(tl.int64) * outputs + n[:, None]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside[:, None] & (r < rows)[None, :])


PREFETCH_LINES = 4  # 128-byte lines per output; more would slow down the previous kernel


class MatmulTile(NamedTuple):
    """Tiling of a matmul: outputs and inputs per tile, warps, pipeline stages, splits of the inputs."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    parts: int = 1


def tile_config(rows: int, outputs: int, inputs: int, gated: bool, parts: bool) -> MatmulTile:
    """The fastest tested tilings on an H200. `parts`: the reader can sum parts."""
    if rows == 1:
        if inputs < 1024:
            return MatmulTile(2 if gated else 4, 512, 2, 2)
        if parts and inputs >= 4096:
            return MatmulTile(2, 2048, 4, 2, 2)
        return MatmulTile(1 if gated else 2, 1024, 2, 2)
    if gated and outputs < 1024:
        return MatmulTile(32, 128, 4, 4)
    if gated or outputs >= 8192:
        return MatmulTile(64, 64, 4, 6)
    programs = triton.cdiv(outputs, 64) * triton.cdiv(rows, 64)
    count = 1
    while parts and count < 4 and 2 * count * programs <= 132 and inputs >= 256 * count:  # multiprocessors of an H200
        count *= 2
    return MatmulTile(64, 64, 4, 5) if programs > 132 else MatmulTile(64, 128, 4, 4, count)


def is_small_batch(rows: int, weight: Tensor) -> bool:
    """Whether reading the weights or launching takes longer than the arithmetic."""
    return rows <= 64 or (rows <= 512 and weight.numel() <= 1 << 20)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "", gated: bool = False, parts: bool = False,
    cut: MatmulTile | None = None,
) -> Tensor:  # fmt: skip
    """x (rows, inputs), weight (outputs, inputs) to (rows, outputs); `gated`: the activated first half of the outputs
    times the second, or as it is times the sigmoid of the second (activation "glu"). `parts`: the result may be fp32
    parts (parts, rows, outputs)."""
    (rows, inputs), outputs = x.shape, weight.shape[0] // (2 if gated else 1)
    assert x.stride(1) == 1 and weight.is_contiguous()
    cut = cut or tile_config(rows, outputs, inputs, gated, parts)
    shape = (cut.parts, rows, outputs) if cut.parts > 1 else (rows, outputs)
    out = torch.empty(shape, dtype=torch.float32 if cut.parts > 1 else x.dtype, device=x.device)
    how = {"GATED": gated, "ACTIVATION": activation, "BIAS": bias is not None, "PARTS": cut.parts}
    how |= {"OVERLAP": has_pdl(x.device), "launch_pdl": has_pdl(x.device)}
    sizes = {"OUTPUTS": cut.outputs, "INPUTS": cut.inputs, "num_warps": cut.warps, "num_stages": cut.stages}
    grid = (triton.cdiv(outputs, cut.outputs), cut.parts)
    bias = x if bias is None else bias
    if rows == 1:
        _one_row[grid](x, weight, bias, out, outputs, inputs, **how, **sizes)
    else:
        among = min(64, max(16, triton.next_power_of_2(rows)))
        lines = triton.next_power_of_2(triton.cdiv(inputs, cut.parts * 64))
        sizes["LINES"] = min(PREFETCH_LINES // 2 if gated else PREFETCH_LINES, lines)
        _few_rows[(*grid, triton.cdiv(rows, among))](
            x, weight, bias, out, rows, outputs, inputs, x.stride(0), **how, ROWS=among, **sizes
        )
    return out
