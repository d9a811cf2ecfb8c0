"""One token per row and a memory of a matrix per head, updated in place: the feature sums of Performer (Choromanski et
al. 2021, eq. 4, 5), the compressive memory of Infini-attention (Munkhdalai et al. 2024, eq. 3-5, 7) and the sums of
mixed chunks (Hua et al. 2022, eq. 7). Definitions: nn/mixers/performer.py, nn/mixers/attention/infini.py,
nn/mixers/gau.py; the form of the states: runtime/cuda/constant_states.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import launches, overlaps


@triton.jit
def _feature_logs(
    qkv, features, logs, row_stride, scale, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ω·x of some features ω for 16 heads of queries or keys, less ‖x‖²/2 if `NORM`."""
    head = tl.program_id(0) * 16 + tl.arange(0, 16)  # of all rows
    m, f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    known, real = f < WIDTH, m < FEATURES
    tile = tl.load(features + m[None, :] * WIDTH + f[:, None], mask=real[None, :] & known[:, None], other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = (head // HEADS).to(tl.int64) * row_stride + (tl.program_id(2) * HEADS + head % HEADS) * WIDTH
    own = (head < count)[:, None] & known[None, :]
    x = tl.load(qkv + at[:, None] + f[None, :], mask=own, other=0.0).to(tl.float32) * scale
    found = tl.dot(x, tile, input_precision="ieee")
    if NORM:
        found -= (tl.sum(x * x, 1) / 2)[:, None]
    target = logs + (tl.program_id(2).to(tl.int64) * count + head[:, None]) * FEATURES + m[None, :]
    tl.store(target, found, mask=(head < count)[:, None] & real[None, :])


@triton.jit
def _performer_step(
    v, logs, sums, tops, out, row_stride, floor, least, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
    RELU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head: the sums are (width + 1, features), the last row those of the weights."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, m = row * HEADS + head, tl.arange(0, MANY)
    real = m < FEATURES
    base = sums + own * FEATURES * (WIDTH + 1)
    mass = tl.load(base + WIDTH * FEATURES + m, mask=real, other=0.0)
    old = tl.load(tops + own)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    nothing = 0.0 if RELU else float("-inf")
    queries = tl.load(logs + own * FEATURES + m, mask=real, other=nothing)
    keys = tl.load(logs + (count + own) * FEATURES + m, mask=real, other=nothing)
    fade = 1.0
    if RELU:
        queries = tl.where(real, tl.maximum(queries, 0.0) + floor, 0.0)
        keys = tl.where(real, tl.maximum(keys, 0.0) + floor, 0.0)
    else:
        queries = tl.exp(queries - tl.max(queries, 0))
        top = tl.maximum(old, tl.max(keys, 0))
        fade = tl.exp(old - top)
        keys = tl.exp(keys - top)
        tl.store(tops + own, top)
    mass = mass * fade + keys
    tl.store(base + WIDTH * FEATURES + m, mass, mask=real)
    total = tl.maximum(tl.sum(queries * mass, 0), least)
    for start in range(0, WIDTH, BLOCK):
        f = start + tl.arange(0, BLOCK)
        known = f < WIDTH
        value = tl.load(v + row * row_stride + head * WIDTH + f, mask=known, other=0.0).to(tl.float32)
        spot, both = base + f[:, None] * FEATURES + m[None, :], known[:, None] & real[None, :]
        new = tl.load(spot, mask=both, other=0.0) * fade + value[:, None] * keys[None, :]
        tl.store(spot, new, mask=both)
        found = tl.sum(new * queries[None, :], 1) / total
        tl.store(out + own * WIDTH + f, found.to(out.dtype.element_ty), mask=known)


@launches
def performer_step(
    qkv: Tensor, features: Tensor, sums: Tensor, tops: Tensor, floor: float | None, least: float
) -> Tensor:
    """qkv (rows, 3 · heads · width), features ω (m, width) fp32; `sums` (rows, heads, m, width + 1), stored by columns,
    and `tops` (rows, heads, 1, 1) are updated. `floor`: of ReLU features, which are max(0, ω·x) + floor; None: positive
    features. The result: (rows, heads · width)."""
    rows, heads, count, wide = sums.shape
    width, inner, both = wide - 1, heads * (wide - 1), rows * heads
    sums = sums.mT
    assert sums.is_contiguous() and tops.is_contiguous() and features.is_contiguous() and qkv.stride(1) == 1
    out = torch.empty(rows, inner, dtype=qkv.dtype, device=qkv.device)
    logs = torch.empty(2, rows, heads, count, dtype=torch.float32, device=qkv.device)
    sizes = {"HEADS": heads, "WIDTH": width, "FEATURES": count, "OVERLAP": overlaps(qkv.device)}
    _feature_logs[(triton.cdiv(both, 16), triton.cdiv(count, 64), 2)](
        qkv, features, logs, qkv.stride(0), width**-0.25, both, WIDE=max(16, triton.next_power_of_2(width)), BLOCK=64,
        NORM=floor is None, launch_pdl=overlaps(qkv.device), num_warps=4, **sizes,
    )  # fmt: skip
    many = triton.next_power_of_2(count)
    _performer_step[(rows, heads)](
        qkv[:, 2 * inner :], logs, sums, tops, out, qkv.stride(0), floor or 0.0, least, both, MANY=many,
        BLOCK=min(triton.next_power_of_2(width), max(1, 4096 // many)), RELU=floor is not None,
        launch_pdl=overlaps(qkv.device), num_warps=4, **sizes,
    )  # fmt: skip
    return out


@triton.jit
def _infini_step(
    q, k, v, near, places, positions, gates, memory, following, out, row_stride, segment, least,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, DELTA: tl.constexpr, LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head: memory and `following` are (width + 1, width), the last row the normaliser z. What a step
    begins with has been stored by the step before, so it is read before the kernels in front of this one have ended."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.arange(0, WIDE)
    known = f < WIDTH
    base = (row * HEADS + head) * WIDTH * (WIDTH + 1)
    spot, both = base + f[:, None] * WIDTH + f[None, :], known[:, None] & known[None, :]
    last = base + WIDTH * WIDTH + f
    next_sums = tl.load(following + spot, mask=both, other=0.0)
    next_z = tl.load(following + last, mask=known, other=0.0)
    sums = tl.load(memory + spot, mask=both, other=0.0)
    z = tl.load(memory + last, mask=known, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    begins = tl.load(places + row) == 0
    at = row * row_stride + head * WIDTH + f
    key, query = tl.load(k + at, mask=known, other=0.0), tl.load(q + at, mask=known, other=0.0)
    key, query = key.to(tl.float32), query.to(tl.float32)
    key = tl.where(known, tl.where(key > 0, key + 1.0, tl.exp(key)), 0.0)  # elu + 1
    query = tl.where(known, tl.where(query > 0, query + 1.0, tl.exp(query)), 0.0)
    value = tl.load(v + at, mask=known, other=0.0).to(tl.float32)
    sums, z = tl.where(begins, next_sums, sums), tl.where(begins, next_z, z)
    if begins:
        tl.store(memory + spot, sums, mask=both)
        tl.store(memory + last, z, mask=known)
    if DELTA:
        value -= tl.sum(key[None, :] * sums, 1) / tl.maximum(tl.sum(key * z, 0), least)
    tl.store(following + spot, next_sums + value[:, None] * key[None, :], mask=both)
    tl.store(following + last, next_z + key, mask=known)
    far = tl.sum(query[None, :] * sums, 1) / tl.maximum(tl.sum(query * z, 0), least)
    gate = tl.sigmoid(tl.load(gates + head).to(tl.float32))
    if LOCAL:
        gate = tl.where(tl.load(positions + row) >= segment, gate, 0.0)
    target = (row * HEADS + head) * WIDTH + f
    found = gate * far + (1.0 - gate) * tl.load(near + target, mask=known, other=0.0).to(tl.float32)
    tl.store(out + target, found.to(out.dtype.element_ty), mask=known)


@launches
def infini_step(
    qkv: Tensor, near: Tensor, places: Tensor, positions: Tensor, gates: Tensor, memory: Tensor, following: Tensor,
    segment: int, delta: bool, local: bool, least: float,
) -> Tensor:  # fmt: skip
    """`near` (rows, heads, width) is the local attention, `places` (rows,) the position in the segment. `memory` and
    `following` (rows, heads, width, width + 1), stored by columns, are updated. The result: (rows, heads · width)."""
    rows, heads, width, _ = memory.shape
    memory, following = memory.mT, following.mT
    assert all(x.is_contiguous() for x in (near, memory, following)) and qkv.stride(1) == 1
    q, k, v = qkv.split(heads * width, -1)
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    _infini_step[(rows, heads)](
        q, k, v, near, places, positions, gates, memory, following, out, qkv.stride(0), segment, least, HEADS=heads,
        WIDTH=width, WIDE=triton.next_power_of_2(width), DELTA=delta, LOCAL=local, OVERLAP=overlaps(qkv.device),
        launch_pdl=overlaps(qkv.device), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _add_chunk(
    counts, keys, current, sums,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, LONG: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, some of the values: nothing to do but at the end of a chunk."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counts + row) % CHUNK == CHUNK - 1:
        j, d, f = tl.arange(0, LONG), tl.arange(0, WIDE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        own = (d < KEYS)[:, None] & (j < CHUNK)[None, :]
        key = tl.load(keys + (row * CHUNK + j[None, :]) * KEYS + d[:, None], mask=own, other=0.0)  # (WIDE, LONG)
        own = (j < CHUNK)[:, None] & (f < VALUES)[None, :]
        at = current + (row * CHUNK + j[:, None]) * (KEYS + VALUES) + KEYS + f[None, :]
        value = tl.load(at, mask=own, other=0.0)
        at = sums + (row * KEYS + d[:, None]) * VALUES + f[None, :]
        own = (d < KEYS)[:, None] & (f < VALUES)[None, :]
        found = tl.load(at, mask=own, other=0.0) + tl.dot(key, value, input_precision="ieee")
        tl.store(at, found, mask=own)


@launches
def add_chunk(counts: Tensor, keys: Tensor, current: Tensor, sums: Tensor) -> None:
    """sums (rows, s, e) += Σ kᵀ v of a chunk, in rows whose newest token, after `counts` (rows, 1) others, completes
    one; keys (rows, chunk, s), values behind s other features in `current` (rows, chunk, s + e)."""
    rows, chunk, width = keys.shape
    values = sums.shape[2]
    assert all(x.is_contiguous() for x in (counts, keys, current, sums))
    _add_chunk[(rows, triton.cdiv(values, 64))](
        counts, keys, current, sums, CHUNK=chunk, KEYS=width, VALUES=values,
        LONG=max(16, triton.next_power_of_2(chunk)), WIDE=max(16, triton.next_power_of_2(width)), BLOCK=64, num_warps=4,
    )  # fmt: skip
