"""Attention of one new token per row over a paged KV cache (Kwon et al. 2023, "PagedAttention", arXiv:2309.06180, 4.3;
split over the keys as in Dao et al. 2023, "Flash-Decoding").

The cache is (blocks, heads, slots, width). The block table locates the token at position p of a row:

    every = 0    table (rows, 1): one block per row, slot p
    every = 1    table (rows, positions): one block per token, slot p (beams with shared prefixes)
    every = n    table (rows, positions / n): n tokens per block, slot p % n (block pool)

With a ring (every = 0), positions from `first` on take turns in RING slots behind the first ones.

One program per row, key-value head and split of the keys. The first split handles the new token: it rotates its key,
stores key and value, and starts the sum with them, so no program reads what is being written. With grouped queries and
a new token, the first keys are loaded while the previous kernel may still compute queries: they were written in earlier
steps. Relative positions are rows of a table, looked up by distance. The plain definition is in
`nn/ops/attention/decode.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl


@triton.jit
def _sum_parts(at, part, mask, PARTS: tl.constexpr):
    """Sum of the parts of a split matmul (small_batch_linear.py)."""
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(1, PARTS):
        found += tl.load(at + number * part, mask=mask, other=0.0)
    return found


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def keys_of_share(seen, row, share, SHARES: tl.constexpr, TILE: tl.constexpr):
    """How many keys a row has seen, and the first and the one after the last of those that this share of them reads."""
    count = tl.load(seen + row).to(tl.int32)
    each = tl.cdiv(tl.cdiv(count, SHARES), TILE) * TILE
    begin = share * each
    return count, begin, tl.minimum(count, begin + each)


@triton.jit
def _slot_of(table, row, table_row, at, inside, kv, slots, EVERY: tl.constexpr, KV: tl.constexpr):
    """Cache slot of a row's token at this position."""
    if EVERY == 0:
        block, place = tl.load(table + row) + at * 0, at
    elif EVERY == 1:
        block, place = tl.load(table + row * table_row + at, mask=inside, other=0), at
    else:
        block, place = tl.load(table + row * table_row + at // EVERY, mask=inside, other=0), at % EVERY
    return (block.to(tl.int64) * KV + kv) * slots + place


@triton.jit
def _tile(
    keys, values, table, row, table_row, start, end, kv, slots, f, half, query, place, first, near, near_values,
    farthest, EVERY: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, RING: tl.constexpr,
    NEAR: tl.constexpr, NEAR_VALUES: tl.constexpr,
):  # fmt: skip
    """Keys and values of a row from `start` on and the vectors of their distances to the query, in feature halves, and
    which of them exist. `place`: the slot of a ring that the new token takes."""
    at = start + tl.arange(0, TILE)
    inside = at < end
    away = query - at
    if RING > 0:
        inside = inside & (at != place)
        away = tl.where(at < first, away, away % RING)
    spot = _slot_of(table, row, table_row, at, inside, kv, slots, EVERY, KV)[:, None] * WIDTH + f[None, :]
    real = inside[:, None] & (f < half)[None, :]
    ka, kb = tl.load(keys + spot, mask=real, other=0.0), tl.load(keys + spot + half, mask=real, other=0.0)
    wa, wb = tl.load(values + spot, mask=real, other=0.0), tl.load(values + spot + half, mask=real, other=0.0)
    ra, rb = ka, kb
    line = tl.maximum(tl.minimum(away, farthest), 0)[:, None] * WIDTH + f[None, :]
    if NEAR:
        ra, rb = tl.load(near + line, mask=real, other=0.0), tl.load(near + line + half, mask=real, other=0.0)
    if NEAR_VALUES:
        more_a = tl.load(near_values + line, mask=real, other=0.0).to(tl.float32)
        more_b = tl.load(near_values + line + half, mask=real, other=0.0).to(tl.float32)
        wa, wb = (wa.to(tl.float32) + more_a).to(wa.dtype), (wb.to(tl.float32) + more_b).to(wb.dtype)
    return ka, kb, wa, wb, ra, rb, inside


@triton.jit
def _accumulate(
    qa, qb, pa, pb, ka, kb, wa, wb, ra, rb, inside, top, sum, va, vb, scale, bias, begin, bias_size, mine,
    QUERIES: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Online softmax: extend the running sums by these keys. `bias` (QUERIES,): where the biases of a query begin."""
    if QUERIES == 1:
        product = qa.to(tl.float32) * ka.to(tl.float32) + qb.to(tl.float32) * kb.to(tl.float32)
        if NEAR:
            product += pa.to(tl.float32) * ra.to(tl.float32) + pb.to(tl.float32) * rb.to(tl.float32)
        scores = tl.sum(product, 1)[None, :] * scale
    else:
        scores = tl.dot(qa, tl.trans(ka), input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee")
        if NEAR:
            scores = tl.dot(pa, tl.trans(ra), scores, input_precision="ieee")
            scores = tl.dot(pb, tl.trans(rb), scores, input_precision="ieee")
        scores = scores * scale
    if BIAS:
        at = begin + tl.arange(0, TILE)
        known = mine[:, None] & (inside & (at < bias_size))[None, :]
        scores += tl.load(bias[:, None] + at[None, :], mask=known, other=float("-inf")).to(tl.float32)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher > float("-inf"), higher, 0.0)
    weights = tl.exp(scores - safe[:, None])
    fade = tl.exp(top - safe)
    sum = sum * fade + tl.sum(weights, 1)
    va, vb = va * fade[:, None], vb * fade[:, None]
    if QUERIES == 1:
        wide = tl.trans(weights)
        va += tl.sum(wide * wa.to(tl.float32), 0)[None, :]
        vb += tl.sum(wide * wb.to(tl.float32), 0)[None, :]
    else:
        va = tl.dot(weights.to(wa.dtype), wa, va, input_precision="ieee")
        vb = tl.dot(weights.to(wb.dtype), wb, vb, input_precision="ieee")
    return higher, sum, va, vb


@triton.jit
def _decode_attention(
    q, k, v, keys, values, table, seen, turns, biases, near, near_values, content, position, out, tops, sums, parts,
    arrived, q_row, k_row, v_row, q_part, table_row, slots, scale, bias_row, bias_head, bias_size, first, near_head,
    farthest,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr,
    EVERY: tl.constexpr, NEW: tl.constexpr, TURNS: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, RING: tl.constexpr, NEAR: tl.constexpr, NEAR_VALUES: tl.constexpr,
    QUERY_BIASES: tl.constexpr, LEAST: tl.constexpr, WAIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, kv, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        if WAIT:
            gdc_wait()
    # data of earlier steps is visible, whatever the previous kernel still does
    count = tl.load(seen + row).to(tl.int32)
    query = count if NEW else count - 1  # its position
    place, stored = count, count
    if RING > 0:
        place = tl.where(count < first, count, first + (count - first) % RING)
        stored = tl.minimum(count, first + RING)
    each = tl.maximum(tl.cdiv(tl.cdiv(stored, SHARES), TILE) * TILE, LEAST)
    begin = share * each
    end = tl.minimum(stored, begin + each)
    near += kv.to(tl.int64) * near_head
    kind = keys.dtype.element_ty
    half: tl.constexpr = WIDTH // 2
    f = tl.arange(0, HALF)  # features in two halves, which rotary positions rotate together
    known = f < half
    ka, kb, wa, wb, ra, rb, inside = _tile(
        keys, values, table, row, table_row, begin, end, kv, slots, f, half, query, place, first, near, near_values,
        farthest, EVERY, KV, WIDTH, TILE, RING, NEAR, NEAR_VALUES,
    )  # fmt: skip
    if OVERLAP:  # noqa: SIM102
        if not WAIT:
            gdc_wait()
    g = tl.arange(0, QUERIES)
    heads = kv * GROUP + g
    mine = (g < GROUP)[:, None] & known[None, :]
    bias = biases + row.to(tl.int64) * bias_row + heads * bias_head
    here = q + row.to(tl.int64) * q_row + heads[:, None] * WIDTH + f[None, :]
    qa, qb = _sum_parts(here, q_part, mine, PARTS), _sum_parts(here + half, q_part, mine, PARTS)
    cos, sin = f * 0.0, f * 0.0
    if TURNS:
        cos = tl.load(turns + row * WIDTH + f, mask=known, other=0.0)
        sin = tl.load(turns + row * WIDTH + half + f, mask=known, other=0.0)
        qa, qb = _rotate(qa, qb, cos[None, :], sin[None, :])
    pa, pb = qa, qb  # what the vectors of distances are multiplied with
    if QUERY_BIASES:
        own = heads[:, None] * WIDTH + f[None, :]
        pa = qa + tl.load(position + own, mask=mine, other=0.0).to(tl.float32)
        pb = qb + tl.load(position + own + half, mask=mine, other=0.0).to(tl.float32)
        qa += tl.load(content + own, mask=mine, other=0.0).to(tl.float32)
        qb += tl.load(content + own + half, mask=mine, other=0.0).to(tl.float32)
    qa, qb, pa, pb = qa.to(kind), qb.to(kind), pa.to(kind), pb.to(kind)
    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    sum = tl.zeros((QUERIES,), dtype=tl.float32)
    va, vb = tl.zeros((QUERIES, HALF), dtype=tl.float32), tl.zeros((QUERIES, HALF), dtype=tl.float32)
    if NEW:  # noqa: SIM102  # NEW is a compile-time constant, the share is not
        if share == 0:
            new = k + row.to(tl.int64) * k_row + kv * WIDTH + f
            new_a, new_b = _sum_parts(new, q_part, known, PARTS), _sum_parts(new + half, q_part, known, PARTS)
            if TURNS:
                new_a, new_b = _rotate(new_a, new_b, cos, sin)
            new_a, new_b = new_a.to(kind), new_b.to(kind)
            new = v + row.to(tl.int64) * v_row + kv * WIDTH + f
            own_a = _sum_parts(new, q_part, known, PARTS).to(kind)
            own_b = _sum_parts(new + half, q_part, known, PARTS).to(kind)
            target = _slot_of(table, row, table_row, place, True, kv, slots, EVERY, KV) * WIDTH + f
            tl.store(keys + target, new_a, mask=known)
            tl.store(keys + target + half, new_b, mask=known)
            tl.store(values + target, own_a, mask=known)
            tl.store(values + target + half, own_b, mask=known)
            product = qa.to(tl.float32) * new_a.to(tl.float32)[None, :]
            product += qb.to(tl.float32) * new_b.to(tl.float32)[None, :]
            if NEAR:
                at_a = tl.load(near + f, mask=known, other=0.0).to(tl.float32)
                at_b = tl.load(near + half + f, mask=known, other=0.0).to(tl.float32)
                product += pa.to(tl.float32) * at_a[None, :] + pb.to(tl.float32) * at_b[None, :]
            top = tl.sum(product, 1) * scale
            counted = tl.full((QUERIES,), 1.0, dtype=tl.float32)
            if BIAS:
                top += tl.load(bias + place, mask=(g < GROUP) & (place < bias_size), other=float("-inf")).to(tl.float32)
                counted = tl.where(top > float("-inf"), 1.0, 0.0)
            sum += counted
            value_a, value_b = own_a.to(tl.float32), own_b.to(tl.float32)
            if NEAR_VALUES:
                value_a += tl.load(near_values + f, mask=known, other=0.0).to(tl.float32)
                value_b += tl.load(near_values + half + f, mask=known, other=0.0).to(tl.float32)
            va += counted[:, None] * value_a[None, :]
            vb += counted[:, None] * value_b[None, :]
    top, sum, va, vb = _accumulate(
        qa, qb, pa, pb, ka, kb, wa, wb, ra, rb, inside, top, sum, va, vb, scale, bias, begin, bias_size, g < GROUP,
        QUERIES, TILE, BIAS, NEAR,
    )  # fmt: skip
    for start in range(begin + TILE, end, TILE):
        ka, kb, wa, wb, ra, rb, inside = _tile(
            keys, values, table, row, table_row, start, end, kv, slots, f, half, query, place, first, near, near_values,
            farthest, EVERY, KV, WIDTH, TILE, RING, NEAR, NEAR_VALUES,
        )  # fmt: skip
        top, sum, va, vb = _accumulate(
            qa, qb, pa, pb, ka, kb, wa, wb, ra, rb, inside, top, sum, va, vb, scale, bias, start, bias_size, g < GROUP,
            QUERIES, TILE, BIAS, NEAR,
        )  # fmt: skip
    last = True
    if SHARES > 1:
        active = tl.cdiv(stored, each)  # splits that have keys
        last = share == 0
        if (active > 1) & (share < active):  # the last program merges them by their softmax mass
            mark = (row.to(tl.int64) * KV * GROUP + heads) * SHARES
            tl.store(tops + mark + share, top, mask=g < GROUP)
            tl.store(sums + mark + share, sum, mask=g < GROUP)
            tl.store(parts + (mark + share)[:, None] * WIDTH + f[None, :], va, mask=mine)
            tl.store(parts + (mark + share)[:, None] * WIDTH + half + f[None, :], vb, mask=mine)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + row * KV + kv, 1, sem="acq_rel") == active - 1
            if last:
                tl.store(arrived + row * KV + kv, 0)  # reset for the next launch
                top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
                sum = tl.zeros((QUERIES,), dtype=tl.float32)
                va, vb = tl.zeros((QUERIES, HALF), dtype=tl.float32), tl.zeros((QUERIES, HALF), dtype=tl.float32)
                for other in range(active):
                    theirs = tl.load(tops + mark + other, mask=g < GROUP, other=float("-inf"), cache_modifier=".cg")
                    higher = tl.maximum(top, theirs)
                    safe = tl.where(higher > float("-inf"), higher, 0.0)
                    fade, weight = tl.exp(top - safe), tl.exp(theirs - safe)
                    sum = sum * fade + weight * tl.load(
                        sums + mark + other, mask=g < GROUP, other=0.0, cache_modifier=".cg"
                    )
                    there = parts + (mark + other)[:, None] * WIDTH + f[None, :]
                    va = va * fade[:, None] + weight[:, None] * tl.load(
                        there, mask=mine, other=0.0, cache_modifier=".cg"
                    )
                    there += half
                    vb = vb * fade[:, None] + weight[:, None] * tl.load(
                        there, mask=mine, other=0.0, cache_modifier=".cg"
                    )
                    top = higher
    if last:
        whole = tl.where(sum > 0, sum, 1.0)[:, None]  # zeros for a row without keys
        target = out + (row.to(tl.int64) * KV * GROUP + heads[:, None]) * WIDTH + f[None, :]
        tl.store(target, (va / whole).to(out.dtype.element_ty), mask=mine)
        tl.store(target + half, (vb / whole).to(out.dtype.element_ty), mask=mine)


LEAST = 128  # keys of a split


class SplitConfig(NamedTuple):
    """Splits of a row's keys, keys per tile, warps per program, and keys that a split has at least: one without keys
    ends at once."""

    shares: int
    tile: int
    warps: int
    least: int = 1


def split_config(rows: int, kv_heads: int, group: int, most: int) -> SplitConfig:
    """Enough splits to occupy the GPU; one if rows have at most `most` keys, fewer than two splits would have. It does
    not depend on `most` otherwise: a kernel would be compiled for each number of splits."""
    count = 1 if most <= LEAST else max(1, triton.cdiv(132, rows * kv_heads))
    return SplitConfig(count, 64, 4, LEAST) if group > 1 else SplitConfig(count, 32, 1, LEAST)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, every: int,
    new: tuple[Tensor, Tensor] | None = None, turns: Tensor | None = None, arrived: Tensor | None = None,
    cut: SplitConfig | None = None, bias: Tensor | None = None, ring: tuple[int, int] = (0, 0),
    relative: Sequence[Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """q (rows, heads, width); keys and values: see above; `seen` (rows,): cached tokens. `new`: key and value (rows, kv
    heads, width) to append. All three may come in unsummed parts (parts, rows, heads, width). `turns` (rows, width):
    cosines and sines that rotate queries and new keys in halves. `arrived`: zeroed counters per row and head, zero
    again afterwards. `bias` (rows or 1, heads or 1, slots) is added to the scores; -inf hides a key. `ring`: `first`
    and RING. `relative`: see `RelativeTables`."""
    rows, heads, width = q.shape[-3:]
    _, kv_heads, slots, _ = keys.shape
    k, v = new or (q, q)
    assert width % 2 == 0 and all(x.stride()[-2:] == (width, 1) for x in (q, k, v))
    parts = q.shape[0] if q.dim() == 4 else 1
    assert parts == 1 or q.stride(0) == k.stride(0) == v.stride(0)
    group, most = heads // kv_heads, slots if every <= 1 else table.shape[1] * every
    cut, overlap = cut or split_config(rows, kv_heads, group, most), has_pdl(q.device)
    out = torch.empty(rows, heads, width, dtype=keys.dtype, device=q.device)
    tops = sums = pieces = out
    if cut.shares > 1:
        tops, sums = torch.empty(2, rows, heads, cut.shares, device=q.device)
        pieces = torch.empty(rows, heads, cut.shares, width, device=q.device)
        if arrived is None:
            arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
    wide = q if bias is None else bias
    assert bias is None or (bias.dim() == 3 and bias.stride(2) == 1)
    near, near_values, content, position = relative or (None, None, None, None)
    assert near is None or (near.is_contiguous() and (len(near) == 1 or group == 1))
    assert ring[1] == 0 or (every == 0 and new is not None)
    others = [q if x is None else x for x in (near, near_values, content, position)]
    _decode_attention[(rows, kv_heads, cut.shares)](
        q, k, v, keys, values, table, seen, seen if turns is None else turns, wide, *others, out, tops, sums, pieces,
        seen if arrived is None else arrived, q.stride(-3), k.stride(-3), v.stride(-3), q.stride(0), table.stride(0),
        slots, scale, wide.stride(0) if wide.shape[0] > 1 else 0, wide.stride(1) if wide.shape[1] > 1 else 0,
        wide.shape[-1], ring[0], near.stride(0) if near is not None and len(near) > 1 else 0,
        0 if near is None else near.shape[1] - 1, KV=kv_heads, GROUP=group, WIDTH=width,
        HALF=max(16, triton.next_power_of_2(width // 2)),
        QUERIES=1 if group == 1 else max(16, triton.next_power_of_2(group)), EVERY=every, NEW=new is not None,
        TURNS=turns is not None, SHARES=cut.shares, TILE=cut.tile, PARTS=parts, BIAS=bias is not None,
        RING=ring[1], NEAR=near is not None, NEAR_VALUES=near_values is not None, QUERY_BIASES=content is not None,
        LEAST=cut.least if cut.shares > 1 else 1, WAIT=group == 1 or new is None, OVERLAP=overlap,
        num_warps=cut.warps, num_stages=3 if group == 1 else 2, launch_pdl=overlap,
    )  # fmt: skip
    return out
