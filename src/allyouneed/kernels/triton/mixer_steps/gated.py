"""One token per row through a gated attention unit (Hua, Dai, Liu, Le 2022, "Transformer Quality in Linear Time", 2.2
and 3.2): queries and keys from the shared features Z, relu(q·k / n + bias)² over the keys, and the gate U. GAU attends
to a KV cache, mixed chunks to the current chunk and to the sums of those before it. Definitions: nn/mixers/gau.py.

One program per row and block of values. Those of GAU compute all scores that they need; those of mixed chunks, which
rotate all keys of the chunk in every step, have them from a launch before. The first tiles of what earlier steps stored
are loaded while the previous kernel may still compute. Features of queries and keys lie in two halves, which rotary
positions rotate together. Sums are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton.decode_attention import _slot_of, keys_of_share


@triton.jit
def _scaled(a, b, gains, offsets, number, f, known, cos, sin, half, TURNS: tl.constexpr):
    """γ z + β of one branch, rotated; z as halves a, b (…, half)."""
    line = 2 * half * number
    gain_a = tl.load(gains + line + f, mask=known, other=0.0).to(tl.float32)
    gain_b = tl.load(gains + line + half + f, mask=known, other=0.0).to(tl.float32)
    a = a * gain_a + tl.load(offsets + line + f, mask=known, other=0.0).to(tl.float32)
    b = b * gain_b + tl.load(offsets + line + half + f, mask=known, other=0.0).to(tl.float32)
    if TURNS:
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


@triton.jit
def _bias(distance, real, numbers, biases, BIAS: tl.constexpr):
    """What is added to scores at these distances: the bias of their buckets."""
    found = distance * 0.0
    if BIAS:
        bucket = tl.load(numbers + distance, mask=real, other=0)
        found = tl.load(biases + bucket, mask=real, other=0.0).to(tl.float32)
    return found


@triton.jit
def _weigh(scores, real):
    """relu(scores)², 0 where not `real`."""
    scores = tl.maximum(scores, 0.0)
    return tl.where(real, scores * scores, 0.0)


@triton.jit
def _lines(start, COUNT: tl.constexpr, LINES: tl.constexpr):
    """Numbers from `start` on (LINES, COUNT / LINES). A program whose threads load LINES lines at once spreads over the
    first dimension: a sum over the second one needs no exchange between threads."""
    each: tl.constexpr = COUNT // LINES
    return start + each * tl.arange(0, LINES)[:, None] + tl.arange(0, each)[None, :]


@triton.jit
def _cached(
    keys, values, table, row, table_row, slots, start, end, count, f, e, numbers, biases,
    KEYS: tl.constexpr, VALUES: tl.constexpr, EVERY: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Keys of a row from `start` on in halves, their values (LINES, TILE / LINES, BLOCK) and biases."""
    half: tl.constexpr = KEYS // 2
    at, line = start + tl.arange(0, TILE), _lines(start, TILE, LINES)
    spot = _slot_of(table, row, table_row, line, line < end, 0, slots, EVERY, 1)
    there = values + spot[:, :, None] * VALUES + e[None, None, :]
    tile = tl.load(there, mask=(line < end)[:, :, None] & (e < VALUES)[None, None, :], other=0.0)
    spot = _slot_of(table, row, table_row, at, at < end, 0, slots, EVERY, 1)
    here, both = keys + spot[:, None] * KEYS + f[None, :], (at < end)[:, None] & (f < half)[None, :]
    ka, kb = tl.load(here, mask=both, other=0.0), tl.load(here + half, mask=both, other=0.0)
    return ka, kb, tile, _bias(count - at, at < end, numbers, biases, BIAS)


@triton.jit
def _gau_step(
    u, v, z, gains, offsets, turns, numbers, biases, keys, values, table, seen, out, parts, arrived,
    row_stride, table_row, slots, length,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EVERY: tl.constexpr, TURNS: tl.constexpr, BIAS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, block, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = KEYS // 2
    f, e = tl.arange(0, HALF), block * BLOCK + tl.arange(0, BLOCK)
    known, real = f < half, e < VALUES
    if OVERLAP:
        gdc_launch_dependents()
    # data of earlier steps is visible, whatever the previous kernel still does
    count, begin, end = keys_of_share(seen, row, share, SHARES, TILE)
    ka, kb, tile, bias = _cached(
        keys, values, table, row, table_row, slots, begin, end, count, f, e, numbers, biases,
        KEYS, VALUES, EVERY, BIAS, TILE, LINES,
    )  # fmt: skip
    own_bias = _bias(0, True, numbers, biases, BIAS)
    if OVERLAP:
        gdc_wait()
    kind = keys.dtype.element_ty
    own = tl.load(v + row * row_stride + e, mask=real, other=0.0).to(kind)
    gate = tl.load(u + row * row_stride + e, mask=real, other=0.0)
    scale = 1.0 / tl.where(length > 0, length, count + 1).to(tl.float32)
    cos, sin = f * 0.0, f * 0.0
    if TURNS:
        cos = tl.load(turns + row * KEYS + f, mask=known, other=0.0)
        sin = tl.load(turns + row * KEYS + half + f, mask=known, other=0.0)
    za = tl.load(z + row * row_stride + f, mask=known, other=0.0).to(tl.float32)
    zb = tl.load(z + row * row_stride + half + f, mask=known, other=0.0).to(tl.float32)
    qa, qb = _scaled(za, zb, gains, offsets, 0, f, known, cos, sin, half, TURNS)
    qa, qb = qa.to(kind).to(tl.float32), qb.to(kind).to(tl.float32)
    mixed = tl.zeros((LINES, BLOCK), dtype=tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        scores = tl.sum(ka.to(tl.float32) * qa[None, :] + kb.to(tl.float32) * qb[None, :], 1) * scale + bias
        weights = tl.reshape(_weigh(scores, at < end), (LINES, TILE // LINES))
        mixed += tl.sum(weights[:, :, None] * tile.to(tl.float32), 1)
        ka, kb, tile, bias = _cached(
            keys, values, table, row, table_row, slots, start + TILE, end, count, f, e, numbers, biases,
            KEYS, VALUES, EVERY, BIAS, TILE, LINES,
        )  # fmt: skip
    total = tl.sum(mixed, 0)
    if share == 0:
        new_a, new_b = _scaled(za, zb, gains, offsets, 1, f, known, cos, sin, half, TURNS)
        new_a, new_b = new_a.to(kind), new_b.to(kind)
        target = _slot_of(table, row, table_row, count, True, 0, slots, EVERY, 1)
        if block == 0:
            tl.store(keys + target * KEYS + f, new_a, mask=known)
            tl.store(keys + target * KEYS + half + f, new_b, mask=known)
        tl.store(values + target * VALUES + e, own, mask=real)
        score = tl.sum(qa * new_a.to(tl.float32) + qb * new_b.to(tl.float32), 0) * scale
        total += _weigh(score + own_bias, True) * own.to(tl.float32)
    last = True
    if SHARES > 1:  # the last program adds up all splits
        mark = (row * BLOCKS + block) * SHARES
        tl.store(parts + (mark + share) * BLOCK + tl.arange(0, BLOCK), total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + row * BLOCKS + block, 1, sem="acq_rel") == SHARES - 1
        if last:
            tl.store(arrived + row * BLOCKS + block, 0)  # reset for the next launch
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for other in range(SHARES):
                total += tl.load(parts + (mark + other) * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    if last:
        tl.store(out + row * VALUES + e, (gate.to(tl.float32) * total).to(out.dtype.element_ty), mask=real)


@triton.jit
def _chunk_scores(
    z, gains, offsets, turns, numbers, biases, counts, current, weights, queries, keys, row_stride, farthest, length,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr,
    BIAS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some tokens of a row's chunk: their weights, and at the end of the chunk their keys for the sums."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    half: tl.constexpr = KEYS // 2
    f, at = tl.arange(0, HALF), first + tl.arange(0, TILE)
    known = f < half
    if OVERLAP:
        gdc_launch_dependents()
    # data of earlier steps is visible, whatever the previous kernel still does
    count = tl.load(counts + row)
    inside = count % CHUNK  # tokens of the chunk before this one
    if first <= inside:
        lines, columns = f[None, :], known[None, :]
        older, newest = (at < inside)[:, None] & columns, (at == inside)[:, None]
        here = current + (row * CHUNK + at[:, None]) * (KEYS + VALUES) + lines
        ta = tl.load(here, mask=older, other=0.0).to(tl.float32)
        tb = tl.load(here + half, mask=older, other=0.0).to(tl.float32)
        qcos, qsin, cos, sin = f * 0.0, f * 0.0, ta * 0.0, ta * 0.0
        if TURNS:
            angle = turns + tl.minimum(count, farthest) * KEYS + f
            qcos, qsin = tl.load(angle, mask=known, other=0.0), tl.load(angle + half, mask=known, other=0.0)
            angles = turns + tl.minimum(count - inside + at, farthest)[:, None] * KEYS + lines
            cos = tl.load(angles, mask=older | newest & columns, other=0.0)
            sin = tl.load(angles + half, mask=older | newest & columns, other=0.0)
        bias = _bias(inside - at, at <= inside, numbers, biases, BIAS)
        if OVERLAP:
            gdc_wait()
        za = tl.load(z + row * row_stride + f, mask=known, other=0.0)
        zb = tl.load(z + row * row_stride + half + f, mask=known, other=0.0)
        if inside < first + TILE:
            store = current + (row * CHUNK + inside) * (KEYS + VALUES) + f
            tl.store(store, za, mask=known)
            tl.store(store + half, zb, mask=known)
        wa, wb = za.to(tl.float32), zb.to(tl.float32)
        if first == 0:
            la, lb = _scaled(wa, wb, gains, offsets, 2, f, known, qcos, qsin, half, TURNS)
            tl.store(queries + row * KEYS + f, la, mask=known)
            tl.store(queries + row * KEYS + half + f, lb, mask=known)
        qa, qb = _scaled(wa, wb, gains, offsets, 0, f, known, qcos, qsin, half, TURNS)
        ta, tb = tl.where(newest, wa[None, :], ta), tl.where(newest, wb[None, :], tb)
        ka, kb = _scaled(ta, tb, gains, offsets, 1, lines, columns, cos, sin, half, TURNS)
        scale = 1.0 / tl.where(length > 0, length, inside + 1).to(tl.float32)
        found = _weigh(tl.sum(ka * qa[None, :] + kb * qb[None, :], 1) * scale + bias, at <= inside)
        tl.store(weights + row * CHUNK + at, found, mask=at <= inside)
        if inside == CHUNK - 1:
            ka, kb = _scaled(ta, tb, gains, offsets, 3, lines, columns, cos, sin, half, TURNS)
            target, owned = keys + (row * CHUNK + at[:, None]) * KEYS + lines, (at < CHUNK)[:, None] & columns
            tl.store(target, ka.to(keys.dtype.element_ty), mask=owned)
            tl.store(target + half, kb.to(keys.dtype.element_ty), mask=owned)


@triton.jit
def _plane(at, line, many, e, STRIDE: tl.constexpr, VALUES: tl.constexpr):
    """The lines below `many` of a matrix, at these columns; numbered as `_lines` does."""
    real = (line < many)[:, :, None] & (e < VALUES)[None, None, :]
    return tl.load(at + line[:, :, None] * STRIDE + e[None, None, :], mask=real, other=0.0)


@triton.jit
def _mixed_chunk_step(
    u, v, weights, queries, keys, counts, current, sums, out, arrived, row_stride, length,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, SOME: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, SUMS: tl.constexpr,
    SUM_LINES: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some values of a row. TILE, LINES: tokens of the chunk; SUMS, SUM_LINES: lines of the sums; see `_lines`. TOKENS:
    of the chunk, that join the sums together."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = block * BLOCK + tl.arange(0, BLOCK)
    real = e < VALUES
    if OVERLAP:
        gdc_launch_dependents()
    # data of earlier steps is visible, whatever the previous kernel still does
    count = tl.load(counts + row)
    inside = count % CHUNK
    begin = count - inside
    lines = tl.where(begin > 0, KEYS, 0)  # nothing to read before the first chunk ends
    kept, chunk = sums + row * KEYS * VALUES, current + row * CHUNK * (KEYS + VALUES) + KEYS
    plane = _plane(kept, _lines(0, SUMS, SUM_LINES), lines, e, VALUES, VALUES)
    tile = _plane(chunk, _lines(0, TILE, LINES), inside, e, KEYS + VALUES, VALUES)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + row, 1, sem="acq_rel") == BLOCKS - 1  # all programs have read the count
    if OVERLAP:
        gdc_wait()
    own = tl.load(v + row * row_stride + e, mask=real, other=0.0)
    gate = tl.load(u + row * row_stride + e, mask=real, other=0.0)
    tl.store(chunk + inside * (KEYS + VALUES) + e, own, mask=real)
    # the chunks before: linear attention
    far = tl.zeros((SUM_LINES, BLOCK), dtype=tl.float32)
    for start in range(0, lines, SUMS):
        g = _lines(start, SUMS, SUM_LINES)
        more = _plane(kept, g + SUMS, lines, e, VALUES, VALUES)
        query = tl.load(queries + row * KEYS + g, mask=g < KEYS, other=0.0)
        far += tl.sum(query[:, :, None] * plane, 1)
        plane = more
    # within the chunk: attention
    near = tl.zeros((LINES, BLOCK), dtype=tl.float32)
    for start in range(0, inside, TILE):
        at = _lines(start, TILE, LINES)
        weight = tl.load(weights + row * CHUNK + at, mask=at < inside, other=0.0)
        near += tl.sum(weight[:, :, None] * tile.to(tl.float32), 1)
        tile = _plane(chunk, at + TILE, inside, e, KEYS + VALUES, VALUES)
    mixed = tl.sum(near, 0) + tl.load(weights + row * CHUNK + inside) * own.to(tl.float32)
    mixed += tl.sum(far, 0) / tl.where(length > 0, length, tl.maximum(begin, 1)).to(tl.float32)
    tl.store(out + row * VALUES + e, (gate.to(tl.float32) * mixed).to(out.dtype.element_ty), mask=real)
    # a complete chunk joins the sums, some of the values at a time: this must not need more registers than the rest
    if inside == CHUNK - 1:
        tl.debug_barrier()  # all threads have read the sums
        d = tl.arange(0, WIDE)
        for first in range(0, BLOCK, SOME):
            s = block * BLOCK + first + tl.arange(0, SOME)
            some = s < VALUES
            new = tl.load(v + row * row_stride + s, mask=some, other=0.0)
            more = tl.zeros((WIDE, SOME), dtype=tl.float32)
            for start in range(0, CHUNK, TOKENS):
                at = start + tl.arange(0, TOKENS)
                own_keys = keys + (row * CHUNK + at[None, :]) * KEYS + d[:, None]
                key = tl.load(own_keys, mask=(at < CHUNK)[None, :] & (d < KEYS)[:, None], other=0.0)
                values = chunk + at[:, None] * (KEYS + VALUES) + s[None, :]
                those = tl.load(values, mask=(at < inside)[:, None] & some[None, :], other=0.0)
                those = tl.where((at == inside)[:, None], new[None, :], those)
                more = tl.dot(key, those, more, input_precision="ieee")
            target, both = kept + d[:, None] * VALUES + s[None, :], (d < KEYS)[:, None] & some[None, :]
            tl.store(target, tl.load(target, mask=both, other=0.0) + more, mask=both)
    if last:
        tl.store(arrived + row, 0)
        tl.store(counts + row, count + 1)


class GatedParts(NamedTuple):
    """What a gated attention unit makes queries and keys of: γ and β (branches, s), rotary positions `turns` (rows or
    positions, s), cosines beside sines, and T5's bias: the bucket `numbers` of each distance, the `biases` of buckets.
    `length`: what scores are divided by, 0 for the number of keys."""

    gains: Tensor
    offsets: Tensor
    turns: Tensor | None
    numbers: Tensor | None
    biases: Tensor | None
    length: int


def block_size(rows: int, values: int, keys: int) -> int:
    """Values of a program: few of them occupy the GPU with few rows, many read the keys less often."""
    most = max(16, (1 << 14) // triton.next_power_of_2(max(16, keys // 2)))
    wanted = 32 if rows < 4 else 64 if rows < 16 else 128 if rows < 64 else 256
    return min(most, wanted, max(16, triton.next_power_of_2(values)))


def lines_at_once(block: int, kind: torch.dtype, warps: int) -> int:
    """How many lines of `block` values a program loads at once, 16 bytes per thread."""
    return max(1, 32 * warps * 16 // (block * kind.itemsize))


def gau_step(
    uvz: Tensor, gated: GatedParts, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, every: int,
    arrived: Tensor, shares: int | None = None,
) -> Tensor:  # fmt: skip
    """U, V and Z side by side (rows, 2 e + s), to U ⊙ (A V) (rows, e). Key and value are stored at `seen` (rows,) in
    `keys` (blocks, 1, slots, s) and `values` (blocks, 1, slots, e), by the block tables of decode_attention.py.
    `arrived`: zeros, a row times the number of values of them."""
    rows, (slots, width), count = len(uvz), keys.shape[2:], values.shape[3]
    assert width % 2 == 0 and uvz.stride(1) == 1 and keys.is_contiguous() and values.is_contiguous()
    block = block_size(rows, count, width)
    blocks, warps = triton.cdiv(count, block), 4 if block <= 64 else 8
    lines = lines_at_once(block, values.dtype, warps)
    shares = shares or max(1, min(triton.cdiv(slots, 128), triton.cdiv(132, rows * blocks)))
    u, v, z = uvz.split([count, count, width], -1)
    out = torch.empty(rows, count, dtype=uvz.dtype, device=uvz.device)
    parts = torch.empty(rows, blocks, shares, block, device=uvz.device) if shares > 1 else out
    turns, numbers, biases = (uvz if x is None else x for x in (gated.turns, gated.numbers, gated.biases))
    _gau_step[(rows, blocks, shares)](
        u, v, z, gated.gains, gated.offsets, turns, numbers, biases, keys, values, table, seen, out, parts, arrived,
        uvz.stride(0), table.stride(0), slots, gated.length, KEYS=width, VALUES=count,
        HALF=max(16, triton.next_power_of_2(width // 2)), BLOCK=block, BLOCKS=blocks, EVERY=every,
        TURNS=gated.turns is not None, BIAS=gated.biases is not None, SHARES=shares,
        TILE=max(lines, 64 if rows < 16 else 32), LINES=lines, OVERLAP=has_pdl(uvz.device),
        launch_pdl=has_pdl(uvz.device), num_warps=warps, num_stages=2,
        maxnreg=80 if warps == 8 and values.itemsize == 2 else None,  # three programs on a multiprocessor
    )  # fmt: skip
    return out


class ChunkScores(NamedTuple):
    """Scores of a new token: `weights` of the chunk's tokens (rows, chunk), the rotated query of the sums (rows, s),
    and at the end of a chunk the keys that join them (rows, chunk, s)."""

    weights: Tensor
    queries: Tensor
    keys: Tensor


def chunk_scores(z: Tensor, gated: GatedParts, counts: Tensor, current: Tensor) -> ChunkScores:
    """Z (rows, s), which is stored in the `current` chunk (rows, chunk, s + e) behind `counts` (rows, 1) tokens.
    `gated.turns`: of every position."""
    (rows, width), (_, chunk, both) = z.shape, current.shape
    assert width % 2 == 0 and z.stride(1) == 1 and counts.is_contiguous() and current.is_contiguous()
    weights, queries = (torch.empty(rows, n, device=z.device) for n in (chunk, width))
    keys = torch.empty(rows, chunk, width, dtype=z.dtype, device=z.device)
    turns, numbers, biases = (z if x is None else x for x in (gated.turns, gated.numbers, gated.biases))
    _chunk_scores[(rows, triton.cdiv(chunk, 16))](
        z, gated.gains, gated.offsets, turns, numbers, biases, counts, current, weights, queries, keys, z.stride(0),
        0 if gated.turns is None else len(gated.turns) - 1, gated.length, CHUNK=chunk, KEYS=width,
        VALUES=both - width, HALF=triton.next_power_of_2(width // 2), TURNS=gated.turns is not None,
        BIAS=gated.biases is not None, TILE=16, OVERLAP=has_pdl(z.device), launch_pdl=has_pdl(z.device), num_warps=4,
    )  # fmt: skip
    return ChunkScores(weights, queries, keys)


def mixed_chunk_step(
    u: Tensor, v: Tensor, scores: ChunkScores, length: int, counts: Tensor, current: Tensor, sums: Tensor,
    arrived: Tensor,
) -> Tensor:  # fmt: skip
    """U and V (rows, e), parts of one tensor, to U ⊙ (V_quad + V_lin) (rows, e). The state of the rows is updated:
    tokens `counts` (rows, 1), V of the `current` chunk (rows, chunk, s + e), and `sums` Σ K_linᵀ V of those before
    (rows, s, e). `length`: see `GatedParts`. `arrived`: zeros for each row."""
    (rows, width, count), chunk = sums.shape, current.shape[1]
    assert u.stride() == v.stride() and u.stride(1) == 1 and sums.is_contiguous() and current.is_contiguous()
    block, wide = min(128, block_size(rows, count, width)), max(16, triton.next_power_of_2(width))
    blocks, warps = triton.cdiv(count, block), 4
    lines, sum_lines = lines_at_once(block, current.dtype, warps), min(wide, lines_at_once(block, sums.dtype, warps))
    out = torch.empty(rows, count, dtype=u.dtype, device=u.device)
    _mixed_chunk_step[(rows, blocks)](
        u, v, *scores, counts, current, sums, out, arrived, u.stride(0), length, CHUNK=chunk, KEYS=width, VALUES=count,
        WIDE=wide, BLOCK=block, BLOCKS=blocks, SOME=16, TILE=lines * (4 if rows < 16 else 8), LINES=lines,
        SUMS=min(wide, 8 * sum_lines), SUM_LINES=sum_lines, TOKENS=16, OVERLAP=has_pdl(u.device),
        launch_pdl=has_pdl(u.device), num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out
