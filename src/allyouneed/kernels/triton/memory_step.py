"""One token per row and a memory of a matrix per head, updated in place: the feature sums of Performer (Choromanski et
al. 2021, eq. 4, 5), which are written once in several tokens (mixer_steps/deferred.py), and the compressive memory of
Infini-attention (Munkhdalai et al. 2024, eq. 3-5, 7). Definitions: nn/mixers/performer.py, nn/mixers/attention/
infini.py; the form of the states: runtime/cuda/constant_states.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import overlaps
from allyouneed.kernels.triton.mixer_steps.deferred import fold_recent, load_recent, read_deferred, tiles


@triton.jit
def _performer_features(
    qkv, features, mass, tops, queries, new_keys, new_logs, row_stride, scale, floor, least, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, WIDE: tl.constexpr, MANY: tl.constexpr,
    RELU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """16 heads: φ(q) over its sum of weights, φ(k), and the log of what the old sums are multiplied by, since all keys
    are divided by the maximum so far. The last column of the sums, that of the weights, is updated here."""
    head = tl.program_id(0) * 16 + tl.arange(0, 16)  # of all rows
    m, f = tl.arange(0, MANY), tl.arange(0, WIDE)
    known, real, own = f < WIDTH, m < FEATURES, head < count
    both = own[:, None] & real[None, :]
    tile = tl.load(features + m[None, :] * WIDTH + f[:, None], mask=real[None, :] & known[:, None], other=0.0)
    old = tl.load(tops + head, mask=own, other=0.0)
    line = head.to(tl.int64)[:, None] * FEATURES + m[None, :]
    spot = mass + head.to(tl.int64)[:, None] * (FEATURES * (WIDTH + 1)) + m[None, :]
    sums = tl.load(spot, mask=both, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + ((head // HEADS).to(tl.int64) * row_stride + head % HEADS * WIDTH)[:, None] + f[None, :]
    there = own[:, None] & known[None, :]
    q = tl.load(at, mask=there, other=0.0).to(tl.float32) * scale
    k = tl.load(at + HEADS * WIDTH, mask=there, other=0.0).to(tl.float32) * scale
    left = tl.dot(q, tile, input_precision="tf32x3")
    right = tl.dot(k, tile, input_precision="tf32x3")
    if RELU:
        left = tl.where(both, tl.maximum(left, 0.0) + floor, 0.0)
        right = tl.where(both, tl.maximum(right, 0.0) + floor, 0.0)
        log = tl.zeros((16,), tl.float32)
    else:
        left = tl.where(real[None, :], left, float("-inf"))
        left = tl.exp(left - tl.max(left, 1)[:, None])
        right = tl.where(real[None, :], right - (tl.sum(k * k, 1) / 2)[:, None], float("-inf"))
        top = tl.maximum(old, tl.max(right, 1))
        log = old - top
        right = tl.exp(right - top[:, None])
        tl.store(tops + head, top, mask=own)
    sums = sums * tl.exp(log)[:, None] + right
    tl.store(spot, sums, mask=both)
    left /= tl.maximum(tl.sum(left * sums, 1), least)[:, None]
    tl.store(queries + line, left, mask=both)
    tl.store(new_keys + line, right, mask=both)
    tl.store(new_logs + head, log, mask=own)


@triton.jit
def _performer_step(
    v, queries, new_keys, new_logs, keys, values, logs, positions, sums, out, row_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, RECENT: tl.constexpr, MANY: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head, some of its columns: the sums are (width + 1, features)."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    count = (tl.load(positions + row) % RECENT).to(tl.int32)
    m, f = tl.arange(0, MANY), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, known, own = m < FEATURES, f < WIDTH, row * HEADS + head
    sums += own * ((WIDTH + 1) * FEATURES)
    v += row * row_stride + head * WIDTH
    state = tl.load(sums + f[:, None] * FEATURES + m[None, :], mask=known[:, None] & real[None, :], other=0.0)
    if OVERLAP:
        gdc_launch_dependents()  # before the recent tokens: no load of the sums waits for their number
    keys += own * (RECENT * FEATURES)
    values += own * (RECENT * WIDTH)
    logs += own * RECENT
    key, value, decays = load_recent(keys, values, logs, count, f, m, known, real, WIDTH, FEATURES, RECENT)
    if OVERLAP:
        gdc_wait()
    added = tl.load(v + f, mask=known, other=0.0).to(tl.float32)
    enter = tl.load(new_keys + own * FEATURES + m, mask=real, other=0.0)
    query = tl.load(queries + own * FEATURES + m, mask=real, other=0.0)
    log = tl.load(new_logs + own)
    found = read_deferred(state, key, value, decays, query, log, RECENT) + tl.sum(query * enter, 0) * added
    tl.store(out + own * WIDTH + f, found.to(out.dtype.element_ty), mask=known)
    if count == RECENT - 1:
        fold_recent(sums, keys, values, logs, v, 1.0, enter, log, m, real, WIDTH, FEATURES, RECENT, BLOCK, PIECE)
    else:
        tl.store(values + count * WIDTH + f, added, mask=known)
        if tl.program_id(0) == 0:
            tl.store(logs + count, log)
            tl.store(keys + count * FEATURES + m, enter, mask=real)


def performer_step(
    qkv: Tensor, features: Tensor, sums: Tensor, tops: Tensor, recent: tuple[Tensor, Tensor, Tensor],
    positions: Tensor, floor: float | None, least: float,
) -> Tensor:  # fmt: skip
    """qkv (rows, 3 · heads · width), features ω (m, width) fp32; `sums` (rows, heads, m, width + 1), stored by columns,
    `tops` (rows, heads, 1, 1) and the recent tokens are updated. `floor`: of ReLU features, which are max(0, ω·x) +
    floor; None: positive features. The result: (rows, heads · width)."""
    rows, heads, count, wide = sums.shape
    width, inner, both = wide - 1, heads * (wide - 1), rows * heads
    sums = sums.mT  # (rows, heads, width + 1, m)
    assert all(part.is_contiguous() for part in (sums, tops, features, *recent)) and qkv.stride(1) == 1
    out = torch.empty(rows, inner, dtype=qkv.dtype, device=qkv.device)
    # not written into the recent tokens at once, which the second kernel reads before the first has ended
    queries, keys = torch.empty(2, both, count, dtype=torch.float32, device=qkv.device)
    logs = torch.empty(both, dtype=torch.float32, device=qkv.device)
    many, early = triton.next_power_of_2(count), overlaps(qkv.device)
    sizes = {"HEADS": heads, "WIDTH": width, "FEATURES": count, "MANY": many, "OVERLAP": early, "launch_pdl": early}
    _performer_features[(triton.cdiv(both, 16),)](
        qkv, features, sums[:, :, width], tops, queries, keys, logs, qkv.stride(0), width**-0.25, floor or 0.0, least,
        both, WIDE=max(16, triton.next_power_of_2(width)), RELU=floor is not None, num_warps=8, **sizes,
    )  # fmt: skip
    sizes |= {"RECENT": recent[0].shape[2]} | tiles(both, width, many)
    _performer_step[(triton.cdiv(width, sizes["BLOCK"]), heads, rows)](
        qkv[:, 2 * inner :], queries, keys, logs, *recent, positions, sums, out, qkv.stride(0), num_warps=4, **sizes
    )
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
