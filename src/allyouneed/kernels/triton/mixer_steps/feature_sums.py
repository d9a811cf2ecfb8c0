"""One token per row and the feature sums of Performer (Choromanski et al. 2021, eq. 4, 5), a matrix per head that is
written once in several tokens (deferred.py). Definition: nn/mixers/performer.py; the form of the states:
runtime/cuda/constant_states.py.

Two launches. The first multiplies queries and keys with the features: all rows share these, so that tiles of a product
read them less often than programs of single heads would. The second has a program per row, head and BLOCK columns of
the matrix. It reads PIECE columns at a time, two pieces ahead; the first two before the kernels in front of it have
ended. With all columns of a head in one program, recent keys and the sums of weights are read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.mixer_steps.deferred import recent_weights

LANES = 128  # numbers of fp32 that a warp reads at once


@triton.jit
def _feature_exponents(
    qkv, features, out, row_stride, scale, vectors,
    EACH: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    RELU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 of all queries and keys, EACH of a row, and BLOCK features: ω·x − ‖x‖²/2, or ω·x of ReLU features."""
    vector = tl.program_id(0) * 16 + tl.arange(0, 16)
    m, f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    known, real, own = f < WIDTH, m < FEATURES, vector < vectors
    tile = tl.load(features + m[None, :] * WIDTH + f[:, None], mask=real[None, :] & known[:, None], other=0.0)
    await_inputs(OVERLAP)
    at = qkv + ((vector // EACH).to(tl.int64) * row_stride + vector % EACH * WIDTH)[:, None] + f[None, :]
    x = tl.load(at, mask=own[:, None] & known[None, :], other=0.0).to(tl.float32) * scale
    found = tl.dot(x, tile, input_precision="tf32x3")
    if not RELU:
        found -= (tl.sum(x * x, 1) / 2)[:, None]
    line = out + vector.to(tl.int64)[:, None] * FEATURES + m[None, :]
    tl.store(line, found, mask=own[:, None] & real[None, :])


@triton.jit
def _columns(matrix, f, m, end, FEATURES: tl.constexpr, EVICT: tl.constexpr):
    """Columns f before `end` of a matrix (columns, features), as (columns, parts of the features, LANES): the threads
    of a warp read whole columns, so that sums over features need no other warp."""
    there = (f < end)[:, None, None] & (m < FEATURES)[None, :, :]
    spot = matrix + f[:, None, None] * FEATURES + m[None, :, :]
    return tl.load(spot, mask=there, other=0.0, eviction_policy=EVICT)


@triton.jit
def _project(columns, query):
    """Products of columns and a query (parts, LANES): (columns,)"""
    return tl.sum(tl.sum(columns * query[None, :, :], 1), 1)


@triton.jit
def _fold_columns(
    state, keys, values, logs, source, enter, log, f, m, end, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    RECENT: tl.constexpr,
):  # fmt: skip
    """Columns f with all recent tokens, by the recurrence itself: RECENT − 1 stored ones, and a new one."""
    for number in range(RECENT - 1):
        key = tl.load(keys + number * FEATURES + m, mask=m < FEATURES, other=0.0)
        value = tl.load(values + number * WIDTH + f, mask=f < end, other=0.0)
        state = state * tl.exp(tl.load(logs + number)) + value[:, None, None] * key[None, :, :]
    value = tl.load(source + f, mask=f < end, other=0.0).to(tl.float32)
    return state * tl.exp(log) + value[:, None, None] * enter[None, :, :]


@triton.jit
def _performer_step(
    v, exponents, keys, values, logs, positions, sums, tops, arrived, out, row_stride, floor, least,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, RECENT: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr, RELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head, some of its columns: the sums are (width + 1, features), the last column that of the weights.
    All keys are divided by the maximum so far, `tops`; the old sums fade by as much as it grows."""
    row, head, first = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0) * BLOCK
    count = (tl.load(positions + row) % RECENT).to(tl.int32)
    m, lanes = tl.arange(0, PARTS * LANES), tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    c, f, place = tl.arange(0, PIECE), first + tl.arange(0, BLOCK), tl.arange(0, RECENT)
    real, known, own, end = m < FEATURES, f < WIDTH, row * HEADS + head, tl.minimum(WIDTH, first + BLOCK)
    sums += own * ((WIDTH + 1) * FEATURES)
    v += row * row_stride + head * WIDTH
    state = _columns(sums, first + c, lanes, end, FEATURES, "evict_first")
    following = _columns(sums, first + PIECE + c, lanes, end, FEATURES, "evict_first")
    if OVERLAP:
        gdc_launch_dependents()  # before the recent tokens: no load of the sums waits for their number
    mass, old = tl.load(sums + WIDTH * FEATURES + m, mask=real, other=0.0), tl.load(tops + own)
    keys += own * (RECENT * FEATURES)
    values += own * (RECENT * WIDTH)
    logs += own * RECENT
    key = _columns(keys, place, lanes, count, FEATURES, "")
    decays = tl.load(logs + place, mask=place < count, other=0.0)
    there = (place < count)[:, None] & known[None, :]
    value = tl.load(values + place[:, None] * WIDTH + f[None, :], mask=there, other=0.0)
    if OVERLAP:
        gdc_wait()
    added = tl.load(v + f, mask=known, other=0.0).to(tl.float32)
    at = exponents + (2 * row * HEADS + head) * FEATURES + m
    query = tl.load(at, mask=real, other=float("-inf"))
    enter = tl.load(at + HEADS * FEATURES, mask=real, other=float("-inf"))
    if RELU:
        query = tl.where(real, tl.maximum(query, 0.0) + floor, 0.0)
        enter = tl.where(real, tl.maximum(enter, 0.0) + floor, 0.0)
        top = old
    else:
        query = tl.exp(query - tl.max(query, 0))  # a factor per query cancels
        top = tl.maximum(old, tl.max(enter, 0))
        enter = tl.exp(enter - top)
    log = old - top
    mass = mass * tl.exp(log) + enter
    query /= tl.maximum(tl.sum(query * mass, 0), least)
    last = True
    if BLOCKS > 1:  # the last program may write what all have read
        tl.debug_barrier()
        last = tl.atomic_add(arrived + own, 1, sem="acq_rel") == BLOCKS - 1
    if last:
        tl.store(sums + WIDTH * FEATURES + m, mass, mask=real)
        tl.store(tops + own, top)
        if BLOCKS > 1:
            tl.store(arrived + own, 0)  # reset for the next launch
    spread = tl.reshape(query, (PARTS, LANES))
    weight, fade = recent_weights(_project(key, spread), decays, log, RECENT)
    near = tl.sum(weight[:, None] * value, 0) + tl.sum(query * enter, 0) * added
    far = tl.zeros((PIECE, BLOCK // PIECE), dtype=tl.float32)
    number = tl.arange(0, BLOCK // PIECE)[None, :]
    if count < RECENT - 1:
        for piece in tl.static_range(BLOCK // PIECE):
            more = following
            if piece + 2 < BLOCK // PIECE:
                more = _columns(sums, first + (piece + 2) * PIECE + c, lanes, end, FEATURES, "evict_first")
            far = tl.where(number == piece, _project(state, spread)[:, None], far)
            state, following = following, more
        tl.store(values + count * WIDTH + f, added, mask=known)
        if first == 0:
            tl.store(logs + count, log)
            tl.store(keys + count * FEATURES + m, enter, mask=real)
    else:
        new_key = tl.reshape(enter, (PARTS, LANES))
        for piece in range(BLOCK // PIECE):  # rare: it must not need more registers than the other
            g = first + piece * PIECE + c
            read = _columns(sums, g, lanes, end, FEATURES, "evict_first")
            far = tl.where(number == piece, _project(read, spread)[:, None], far)
            new = _fold_columns(read, keys, values, logs, v, new_key, log, g, lanes, end, WIDTH, FEATURES, RECENT)
            spot, inside = sums + g[:, None, None] * FEATURES + lanes[None, :, :], (g < end)[:, None, None]
            tl.store(spot, new, mask=inside & (lanes < FEATURES)[None, :, :], eviction_policy="evict_first")
    found = tl.reshape(tl.trans(far), (BLOCK,)) * fade + near
    tl.store(out + own * WIDTH + f, found.to(out.dtype.element_ty), mask=known)


class SumsTile(NamedTuple):
    """Columns of a program and of a piece that it reads at a time, powers of two; its warps, and the most registers of
    a thread (none: as the compiler chooses)."""

    block: int
    piece: int
    warps: int = 4
    registers: int | None = None


def sums_tile(matrices: int, width: int, features: int) -> SumsTile:
    """Pieces of 16 numbers a thread. All columns of a matrix, or fewer if that leaves multiprocessors without work; six
    programs on each of them, so that 768 matrices need no second turn."""
    block = triton.next_power_of_2(width)
    piece = min(block, max(1, 2048 // triton.next_power_of_2(features)))
    while block > piece and matrices * triton.cdiv(width, block) < 512:
        block //= 2
    return SumsTile(block, piece, 4, 80)


def performer_step(
    qkv: Tensor, features: Tensor, sums: Tensor, tops: Tensor, recent: tuple[Tensor, Tensor, Tensor],
    positions: Tensor, floor: float | None, least: float, arrived: Tensor | None = None, tile: SumsTile | None = None,
) -> Tensor:  # fmt: skip
    """qkv (rows, 3 · heads · width), features ω (m, width) fp32; `sums` (rows, heads, m, width + 1), stored by columns,
    `tops` (rows, heads, 1, 1) and the recent tokens are updated. `floor`: of ReLU features, which are max(0, ω·x) +
    floor; None: positive features. `arrived`: zeroed counters per row and head, zero again afterwards. The result:
    (rows, heads · width)."""
    rows, heads, count, wide = sums.shape
    width, vectors, early = wide - 1, 2 * rows * heads, has_pdl(qkv.device)
    sums = sums.mT  # (rows, heads, width + 1, m)
    assert all(part.is_contiguous() for part in (sums, tops, features, *recent)) and qkv.stride(1) == 1
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    exponents = torch.empty(vectors, count, dtype=torch.float32, device=qkv.device)
    many, relu = triton.next_power_of_2(count), floor is not None
    block = max(16, min(64, many))
    _feature_exponents[(triton.cdiv(vectors, 16), triton.cdiv(count, block))](
        qkv, features, exponents, qkv.stride(0), width**-0.25, vectors, EACH=2 * heads, WIDTH=width, FEATURES=count,
        WIDE=max(16, triton.next_power_of_2(width)), BLOCK=block, RELU=relu, OVERLAP=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    tile = tile or sums_tile(rows * heads, width, count)
    blocks = triton.cdiv(width, tile.block)
    if arrived is None:
        arrived = torch.zeros(rows * heads, dtype=torch.int32, device=qkv.device)
    _performer_step[(blocks, heads, rows)](
        qkv[:, 2 * heads * width :], exponents, *recent, positions, sums, tops, arrived, out, qkv.stride(0),
        floor or 0.0, least, HEADS=heads, WIDTH=width, FEATURES=count, RECENT=recent[0].shape[2],
        PARTS=many // min(many, LANES), LANES=min(many, LANES), BLOCK=tile.block, PIECE=tile.piece, BLOCKS=blocks,
        RELU=relu, OVERLAP=early, num_warps=tile.warps, maxnreg=tile.registers, launch_pdl=early,
    )  # fmt: skip
    return out
