"""One token per row through tensorised attention (Ma et al. 2019, 3.1-3.2): T[j, k] = Σ_r q_r g_r K_jr V_kr of all
pairs of tokens so far, and y = W^O vec(T). Weights of pairs with a later position are not read. The definition is
nn/mixers/attention/tensorized.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.decode_attention import _slot_of

PARTS = 8  # splits of the pairs, which the next kernel adds up


@triton.jit
def _factor(cache, new, row, table, table_row, count, at, g, slots, EVERY: tl.constexpr, RANK: tl.constexpr):
    """Some features of a row's tokens (tokens, features), the newest as it is given; 0 for later ones."""
    real = g < RANK
    spot = _slot_of(table, row, table_row, at, at < count, 0, slots, EVERY, 1)[:, None] * RANK + g[None, :]
    found = tl.load(cache + spot, mask=(at < count)[:, None] & real[None, :], other=0.0)
    own = tl.load(new + g, mask=real, other=0.0).to(found.dtype)
    return tl.where((at == count)[:, None], own[None, :], found)


@triton.jit
def _pairs(
    q, k, v, cores, keys, values, table, seen, out, row_stride, table_row, slots,
    RANK: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr, MANY: tl.constexpr, LENGTH: tl.constexpr,
    EVERY: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of T of one row; the first program of a row stores its key and value."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m = tl.program_id(2) * TILE + tl.arange(0, TILE)
    await_inputs(OVERLAP)
    count = tl.load(seen + row).to(tl.int32)
    kind = keys.dtype.element_ty
    q, k, v = q + row * row_stride, k + row * row_stride, v + row * row_stride
    found = tl.zeros((TILE, TILE), dtype=tl.float32)
    if (tl.program_id(1) * TILE <= count) & (tl.program_id(2) * TILE <= count):
        for start in range(0, RANK, FEATURES):
            g, b = start + tl.arange(0, FEATURES), tl.arange(0, MANY)
            core = tl.load(
                cores + b[:, None] * RANK + g[None, :], mask=(b < BLOCKS)[:, None] & (g < RANK)[None, :], other=0.0
            )
            scaled = tl.sum(core.to(tl.float32), 0) / BLOCKS * tl.load(q + g, mask=g < RANK, other=0.0).to(tl.float32)
            left = _factor(keys, k, row, table, table_row, count, j, g, slots, EVERY, RANK)
            left = (left.to(tl.float32) * scaled[None, :]).to(kind)
            right = _factor(values, v, row, table, table_row, count, m, g, slots, EVERY, RANK)
            found = tl.dot(left, tl.trans(right), found, input_precision="ieee")
    at = out + (row * LENGTH + j[:, None]) * LENGTH + m[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(j < LENGTH)[:, None] & (m < LENGTH)[None, :])
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        f = tl.arange(0, WIDE)
        target = _slot_of(table, row, table_row, count, True, 0, slots, EVERY, 1) * RANK + f
        tl.store(keys + target, tl.load(k + f, mask=f < RANK, other=0.0).to(kind), mask=f < RANK)
        tl.store(values + target, tl.load(v + f, mask=f < RANK, other=0.0).to(kind), mask=f < RANK)


@triton.jit
def _pair_linear(
    pairs, weight, seen, out, rows, outputs,
    LENGTH: tl.constexpr, EACH_ROW: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, ALIGN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Pairs (j, k) of the positions that some row has reached, `INPUTS` of them at a time, in order of memory. `ROWS`
    1: without tensor cores. `EACH_ROW`: at least the number of rows."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = n < outputs
    await_inputs(OVERLAP)
    all = tl.arange(0, EACH_ROW)
    last = tl.minimum(tl.max(tl.load(seen + all, mask=all < rows, other=0), 0).to(tl.int32), LENGTH - 1)
    end = (last + 1) * LENGTH
    found = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    here = weight + n.to(tl.int64) * (LENGTH * LENGTH)
    given = pairs + r.to(tl.int64) * (LENGTH * LENGTH)
    for start in range(part * INPUTS, end, PARTS * INPUTS):
        at = start + tl.arange(0, INPUTS)
        group = at // ALIGN  # groups of pairs are read together: T is 0 for those that are not needed
        real = (group < end // ALIGN) & (group % (LENGTH // ALIGN) <= last // ALIGN)
        row = tl.load(given[:, None] + at[None, :], mask=(r < rows)[:, None] & real[None, :], other=0.0)
        if ROWS == 1:
            tile = tl.load(here[:, None] + at[None, :], mask=inside[:, None] & real[None, :], other=0.0)
            found += tl.sum(tile.to(tl.float32) * row.to(tl.float32), 1)[None, :]
        else:
            tile = tl.load(here[None, :] + at[:, None], mask=inside[None, :] & real[:, None], other=0.0)
            found = tl.dot(row, tile, found, input_precision="ieee")  # (ROWS, INPUTS) (INPUTS, OUTPUTS)
    target = out + (part * rows + r[:, None]).to(tl.int64) * outputs + n[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=(r < rows)[:, None] & inside[None, :])


def pairs(
    qkv: Tensor, cores: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, every: int, length: int
) -> Tensor:
    """T (rows, length²) of the newest tokens qkv (rows, 3 · rank), whose keys and values are stored at `seen` (rows,)
    in `keys` and `values` (blocks, 1, slots, rank); 0 for positions behind it. `cores` (blocks, rank): their mean is g.
    Block tables are those of decode_attention.py."""
    rows, (slots, rank) = len(qkv), keys.shape[2:]
    assert qkv.stride(1) == 1 and all(x.is_contiguous() for x in (cores, keys, values))
    out = torch.empty(rows, length * length, dtype=qkv.dtype, device=qkv.device)
    tile = 32 if rows < 16 else 64
    q, k, v = qkv.split(rank, -1)
    _pairs[(rows, triton.cdiv(length, tile), triton.cdiv(length, tile))](
        q, k, v, cores, keys, values, table, seen, out, qkv.stride(0), table.stride(0), slots, RANK=rank,
        WIDE=triton.next_power_of_2(rank), BLOCKS=len(cores), MANY=triton.next_power_of_2(len(cores)), LENGTH=length,
        EVERY=every, TILE=tile, FEATURES=256 if rows < 16 and keys.itemsize == 2 else 64, OVERLAP=has_pdl(qkv.device),
        launch_pdl=has_pdl(qkv.device), num_warps=8, num_stages=4 if rows >= 16 and keys.itemsize == 2 else 2,
    )  # fmt: skip
    return out


def pair_linear(x: Tensor, weight: Tensor, seen: Tensor, length: int) -> Tensor:
    """Pairs x (rows, length²) of tokens at most at `seen` (rows,), weight (outputs, length²): parts of the result
    (parts, rows, outputs), fp32, that are still to be added up."""
    rows, outputs = len(x), len(weight)
    assert x.is_contiguous() and weight.is_contiguous()
    out = torch.empty(PARTS, rows, outputs, device=x.device)
    among = 1 if rows == 1 else min(64, max(16, triton.next_power_of_2(rows)))
    tile = {"OUTPUTS": 8, "INPUTS": 1024, "num_warps": 4, "num_stages": 2}
    if rows > 1:
        tile = {"OUTPUTS": 64, "INPUTS": 64, "num_warps": 4, "num_stages": 4}
    _pair_linear[(triton.cdiv(outputs, tile["OUTPUTS"]), PARTS, triton.cdiv(rows, among))](
        x, weight, seen, out, rows, outputs, LENGTH=length, EACH_ROW=triton.next_power_of_2(rows), PARTS=PARTS,
        ROWS=among, ALIGN=math.gcd(8, length), OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), **tile,
    )  # fmt: skip
    return out
