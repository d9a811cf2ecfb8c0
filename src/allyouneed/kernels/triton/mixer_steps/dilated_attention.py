"""Attention of one new token per row to the dilated segments of LongNet (Ding et al. 2023, "dilated attention"), over
the caches of decode_attention.py. Definition: `DilatedBranches` in nn/ops/attention/decode.py.

One program per row, head, branch and split of the branch's keys: it reads no others. Branches that leave the query out
end at once. The others are joined by their softmax mass, as splits are; where there is only one, it writes the result
itself. A program adds up TILE keys at a time, and each line of the tile has a softmax of its own until the end, so that
warps exchange nothing in between. The first tile, of earlier steps, is loaded while the previous kernel may still
compute queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton.decode_attention import _slot_of, _sum_parts


@triton.jit
def _is_taken(query, segment, dilation, first):
    """Whether a branch has the query at this position; `segment` and what follows may be of several branches."""
    return query % segment % dilation == first


@triton.jit
def _place(at, first, RING: tl.constexpr):
    """Where a cache has the token at this position."""
    if RING > 0:
        at = tl.where(at < first, at, first + (at - first) % RING)
    return at


@triton.jit
def _tile(
    keys, values, table, row, table_row, start, end, begin, dilation, head, slots, f, first, EVERY: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Keys and values (TILE, WIDE) of a branch from its key `start` on, and which of them exist."""
    number = start + tl.arange(0, TILE)
    inside = number < end
    at = _place(begin + number * dilation, first, RING)
    spot = _slot_of(table, row, table_row, at, inside, head, slots, EVERY, HEADS)[:, None] * WIDTH + f[None, :]
    real = inside[:, None] & (f < WIDTH)[None, :]
    return tl.load(keys + spot, mask=real, other=0.0), tl.load(values + spot, mask=real, other=0.0), inside


@triton.jit
def _add_lines(query, key, value, inside, top, sum, mixed, scale):
    """Online softmax of each line of a tile: tops and sums (TILE,), mixed values (TILE, WIDE)."""
    scores = tl.sum(query[None, :] * key.to(tl.float32), 1) * scale
    scores = tl.where(inside, scores, float("-inf"))
    higher = tl.maximum(top, scores)
    safe = tl.where(higher > float("-inf"), higher, 0.0)
    fade, weight = tl.exp(top - safe), tl.exp(scores - safe)
    return higher, sum * fade + weight, mixed * fade[:, None] + weight[:, None] * value.to(tl.float32)


@triton.jit
def _rotated(at, part, turns, f, known, PARTS: tl.constexpr, TURNS: tl.constexpr, WIDTH: tl.constexpr):
    """A query or key (WIDE,), rotated by halves."""
    x = _sum_parts(at + f, part, known, PARTS)
    if TURNS:
        half: tl.constexpr = WIDTH // 2
        low = f < half
        other = _sum_parts(at + tl.where(low, f + half, f - half), part, known, PARTS)
        angle = turns + tl.where(low, f, f - half)
        cos, sin = tl.load(angle, mask=known, other=0.0), tl.load(angle + half, mask=known, other=0.0)
        x = x * cos + tl.where(low, -other, other) * sin
    return x


@triton.jit
def _dilated_attention(
    q, k, v, keys, values, table, seen, turns, branches, out, tops, sums, parts, arrived, q_row, k_row, v_row, q_part,
    table_row, slots, scale, first,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, EVERY: tl.constexpr, NEW: tl.constexpr,
    TURNS: tl.constexpr, BRANCHES: tl.constexpr, SOME: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, RING: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        if not NEW:  # keys of this step are in the cache
            gdc_wait()
    # data of earlier steps is visible, whatever the previous kernel still does
    query_at = tl.load(seen + row).to(tl.int32)
    if not NEW:
        query_at -= 1
    branches += head * (BRANCHES * 3)
    b = tl.arange(0, SOME)
    there, sizes = b < BRANCHES, branches + 3 * b
    every_segment = tl.load(sizes, mask=there, other=1)
    every_dilation, every_first = tl.load(sizes + 1, mask=there, other=1), tl.load(sizes + 2, mask=there, other=1)
    taken = _is_taken(query_at, every_segment, every_dilation, every_first)  # never of branches that do not exist
    programs = tl.sum(taken.to(tl.int32), 0) * SHARES
    own = branches + split // SHARES * 3
    segment, dilation, offset = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    active, share = _is_taken(query_at, segment, dilation, offset), split % SHARES
    begin = query_at // segment * segment + offset
    count = tl.where(active, (query_at - begin) // dilation, 0)  # keys before the query
    if not NEW:
        count += active.to(tl.int32)
    each = tl.cdiv(tl.cdiv(count, SHARES), TILE) * TILE
    start = share * each
    end = tl.minimum(count, start + each)
    f, line = tl.arange(0, WIDE), tl.arange(0, TILE)
    known = f < WIDTH
    key, value, inside = _tile(
        keys, values, table, row, table_row, start, end, begin, dilation, head, slots, f, first, EVERY, HEADS, WIDTH,
        TILE, RING,
    )  # fmt: skip
    if OVERLAP:  # noqa: SIM102
        if NEW:
            gdc_wait()
    kind = keys.dtype.element_ty
    turns += row * WIDTH
    if active | (split == 0):
        query = _rotated(q + row * q_row + head * WIDTH, q_part, turns, f, known, PARTS, TURNS, WIDTH)
        query = query.to(kind).to(tl.float32)
        top = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        sum, mixed = tl.zeros((TILE,), dtype=tl.float32), tl.zeros((TILE, WIDE), dtype=tl.float32)
        if NEW:  # noqa: SIM102  # NEW is a compile-time constant, the share is not
            if share == 0:  # the new key, in the first line
                new = _rotated(k + row * k_row + head * WIDTH, q_part, turns, f, known, PARTS, TURNS, WIDTH).to(kind)
                fresh = _sum_parts(v + row * v_row + head * WIDTH + f, q_part, known, PARTS).to(kind)
                if split == 0:
                    place = _place(query_at, first, RING)
                    target = _slot_of(table, row, table_row, place, True, head, slots, EVERY, HEADS) * WIDTH + f
                    tl.store(keys + target, new, mask=known)
                    tl.store(values + target, fresh, mask=known)
                mine = (line == 0) & active
                score = tl.sum(query * new.to(tl.float32), 0) * scale
                top = tl.where(mine, score, float("-inf"))
                sum = tl.where(mine, 1.0, 0.0)
                mixed = sum[:, None] * fresh.to(tl.float32)[None, :]
        top, sum, mixed = _add_lines(query, key, value, inside, top, sum, mixed, scale)
        for at in tl.range(start + TILE, end, TILE, num_stages=STAGES):
            key, value, inside = _tile(
                keys, values, table, row, table_row, at, end, begin, dilation, head, slots, f, first, EVERY, HEADS,
                WIDTH, TILE, RING,
            )  # fmt: skip
            top, sum, mixed = _add_lines(query, key, value, inside, top, sum, mixed, scale)
        highest = tl.max(top, 0)
        fade = tl.exp(top - tl.where(highest > float("-inf"), highest, 0.0))
        mass, found = tl.sum(sum * fade, 0), tl.sum(mixed * fade[:, None], 0)
        last = active | (programs == 0)  # zeros for a query that no branch has
        if active & (programs > 1):  # the last program joins them all by their softmax mass
            mark = (row * HEADS + head) * (BRANCHES * SHARES)
            tl.store(tops + mark + split, highest)
            tl.store(sums + mark + split, mass)
            tl.store(parts + (mark + split) * WIDTH + f, found, mask=known)
            tl.debug_barrier()
            last = tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel") == programs - 1
            if last:
                tl.store(arrived + row * HEADS + head, 0)  # reset for the next launch
                highest, mass, found = float("-inf"), 0.0, tl.zeros((WIDE,), dtype=tl.float32)
                for other in range(BRANCHES * SHARES):
                    of = branches + other // SHARES * 3
                    real = _is_taken(query_at, tl.load(of), tl.load(of + 1), tl.load(of + 2))
                    theirs = tl.load(tops + mark + other, mask=real, other=float("-inf"), cache_modifier=".cg")
                    higher = tl.maximum(highest, theirs)
                    safe = tl.where(higher > float("-inf"), higher, 0.0)
                    less, weight = tl.exp(highest - safe), tl.exp(theirs - safe)
                    more = tl.load(sums + mark + other, mask=real, other=0.0, cache_modifier=".cg")
                    spot = parts + (mark + other) * WIDTH + f
                    found = found * less + weight * tl.load(spot, mask=known & real, other=0.0, cache_modifier=".cg")
                    mass, highest = mass * less + weight * more, higher
        if last:
            found = found / tl.where(mass > 0, mass, 1.0)
            tl.store(out + (row * HEADS + head) * WIDTH + f, found.to(out.dtype.element_ty), mask=known)


class DilatedTile(NamedTuple):
    """Splits of a branch, keys per tile, warps per program, and tiles on their way (1: the compiler copies none ahead
    into shared memory)."""

    shares: int
    tile: int = 32
    warps: int = 2
    stages: int = 1


def dilated_tile(rows: int, heads: int, most: int) -> DilatedTile:
    """Enough splits to occupy the GPU, for branches of at most `most` keys."""
    return DilatedTile(max(1, min(triton.cdiv(most, 64), triton.cdiv(264, rows * heads))))


def dilated_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, seen: Tensor, scale: float, every: int, branches: Tensor,
    most: int, new: tuple[Tensor, Tensor] | None = None, turns: Tensor | None = None, arrived: Tensor | None = None,
    cut: DilatedTile | None = None, ring: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """`branches` (heads, branches, 3) and `most`: see `DilatedBranches`; the others as of `decode_attention`, with a
    key-value head for each head."""
    (rows, heads, width), slots, number = q.shape[-3:], keys.shape[2], branches.shape[1]
    k, v = new or (q, q)
    assert width % 2 == 0 and keys.shape[1] == heads and all(x.stride()[-2:] == (width, 1) for x in (q, k, v))
    count = q.shape[0] if q.dim() == 4 else 1
    assert count == 1 or q.stride(0) == k.stride(0) == v.stride(0)
    assert ring[1] == 0 or (every == 0 and new is not None)
    cut, overlap = cut or dilated_tile(rows, heads, most), has_pdl(q.device)
    out = torch.empty(rows, heads, width, dtype=keys.dtype, device=q.device)
    splits = number * cut.shares
    tops, sums = torch.empty(2, rows, heads, splits, device=q.device)
    pieces = torch.empty(rows, heads, splits, width, device=q.device)
    if arrived is None:
        arrived = torch.zeros(rows * heads, dtype=torch.int32, device=q.device)
    _dilated_attention[(rows, heads, splits)](
        q, k, v, keys, values, table, seen, q if turns is None else turns, branches.contiguous(), out, tops, sums,
        pieces, arrived, q.stride(-3), k.stride(-3), v.stride(-3), q.stride(0), table.stride(0), slots, scale, ring[0],
        HEADS=heads, WIDTH=width, WIDE=max(16, triton.next_power_of_2(width)), EVERY=every, NEW=new is not None,
        TURNS=turns is not None, BRANCHES=number, SOME=triton.next_power_of_2(number), SHARES=cut.shares,
        TILE=cut.tile, PARTS=count, RING=ring[1], STAGES=cut.stages, OVERLAP=overlap, num_warps=cut.warps,
        launch_pdl=overlap,
    )  # fmt: skip
    return out
