"""LSH attention of one new token per row (Kitaev, Kaiser, Levskaya 2020, "Reformer", 2): its key, its buckets, and the
attention to all earlier tokens that share a bucket with it, in one launch. Keys and values of other tokens are not
read.

The cache is (blocks, heads, slots, width) for keys and values, (blocks, heads, slots, rounds) for buckets; block tables
and splits of the keys are those of decode_attention.py. One program per row, head and split: each hashes the token, the
first one stores it. The definition is nn/mixers/attention/lsh.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.decode_attention import _slot_of, keys_of_share, split_config


@triton.jit
def _lsh_attention(
    q, v, directions, keys, values, buckets, table, seen, out, tops, sums, parts, arrived,
    q_row, v_row, table_row, slots, whole,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr, TURNS: tl.constexpr,
    HALF: tl.constexpr, MANY: tl.constexpr, EVERY: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, head, share = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    f, r = tl.arange(0, WIDE), tl.arange(0, TURNS)
    known = f < WIDTH
    # the directions R (heads, width, rounds, HALF) of a head, those of a round padded to MANY
    d = tl.arange(0, TURNS * MANY)
    turn, number = d // MANY, d % MANY
    drawn = ((turn < ROUNDS) & (number < HALF))[None, :] & known[:, None]
    directed = tl.load(
        directions + ((head * WIDTH + f[:, None]) * ROUNDS + turn[None, :]) * HALF + number[None, :],
        mask=drawn, other=0.0,
    )  # fmt: skip
    await_inputs(OVERLAP)
    count, begin, end = keys_of_share(seen, row, share, SHARES, TILE)
    kind = keys.dtype.element_ty
    query = tl.load(q + row * q_row + head * WIDTH + f, mask=known, other=0.0).to(tl.float32)
    new = query * tl.rsqrt(tl.sum(query * query, 0) / WIDTH + 1e-6) * tl.rsqrt(WIDTH * 1.0)
    new = new.to(kind)
    own = tl.zeros((TURNS,), dtype=tl.int32)  # the token's bucket in every round: argmax([xR; −xR])
    if HALF > 0:
        turned = tl.reshape(tl.sum(new.to(tl.float32)[:, None] * directed, 0), (TURNS, MANY))
        real = (tl.arange(0, MANY) < HALF)[None, :]
        ahead, behind = tl.where(real, turned, float("-inf")), tl.where(real, -turned, float("-inf"))
        is_ahead = tl.max(ahead, 1) >= tl.max(behind, 1)
        own = tl.where(is_ahead, tl.argmax(ahead, 1), HALF + tl.argmax(behind, 1)).to(tl.int32)
    if share == 0:
        target = _slot_of(table, row, table_row, count, True, head, slots, EVERY, HEADS)
        tl.store(keys + target * WIDTH + f, new, mask=known)
        stored = tl.load(v + row * v_row + head * WIDTH + f, mask=known, other=0.0).to(kind)
        tl.store(values + target * WIDTH + f, stored, mask=known)
        tl.store(buckets + target * ROUNDS + r, own, mask=r < ROUNDS)
    top = tl.full((1,), float("-inf"), dtype=tl.float32)
    sum = tl.zeros((1,), dtype=tl.float32)
    mixed = tl.zeros((WIDE,), dtype=tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        spot = _slot_of(table, row, table_row, at, inside, head, slots, EVERY, HEADS)
        theirs = tl.load(
            buckets + spot[:, None] * ROUNDS + r[None, :], mask=inside[:, None] & (r < ROUNDS)[None, :], other=-1
        )
        met = tl.max(((theirs == own[None, :]) & (r < ROUNDS)[None, :]).to(tl.int32), 1) > 0
        met = inside & (met | (count < whole))
        read = met[:, None] & known[None, :]
        here = spot[:, None] * WIDTH + f[None, :]
        key = tl.load(keys + here, mask=read, other=0.0).to(tl.float32)
        value = tl.load(values + here, mask=read, other=0.0).to(tl.float32)
        scores = tl.where(met, tl.sum(key * query[None, :], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        weights, fade = tl.exp(scores - safe), tl.exp(top - safe)
        sum = sum * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(weights[:, None] * value, 0)
        top = higher
    last = True
    if SHARES > 1:  # the last program merges all splits by their softmax mass
        one = tl.arange(0, 1)
        mark = (row * HEADS + head) * SHARES
        tl.store(tops + mark + share + one, top)
        tl.store(sums + mark + share + one, sum)
        tl.store(parts + (mark + share) * WIDTH + f, mixed, mask=known)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel") == SHARES - 1
        if last:
            tl.store(arrived + row * HEADS + head, 0)  # reset for the next launch
            top = tl.full((1,), float("-inf"), dtype=tl.float32)
            sum = tl.zeros((1,), dtype=tl.float32)
            mixed = tl.zeros((WIDE,), dtype=tl.float32)
            for other in range(SHARES):
                their_top = tl.load(tops + mark + other + one, cache_modifier=".cg")
                higher = tl.maximum(top, their_top)
                safe = tl.where(higher > float("-inf"), higher, 0.0)
                fade, weight = tl.exp(top - safe), tl.exp(their_top - safe)
                sum = sum * fade + weight * tl.load(sums + mark + other + one, cache_modifier=".cg")
                there = tl.load(parts + (mark + other) * WIDTH + f, mask=known, other=0.0, cache_modifier=".cg")
                mixed = mixed * fade + weight * there
                top = higher
    if last:
        # a token that shares no bucket with an earlier one attends to itself
        itself = tl.load(v + row * v_row + head * WIDTH + f, mask=known, other=0.0).to(kind).to(tl.float32)
        result = tl.where(sum > 0, mixed / tl.where(sum > 0, sum, 1.0), itself)
        tl.store(out + (row * HEADS + head) * WIDTH + f, result.to(out.dtype.element_ty), mask=known)


def direction_count(width: int, rounds: int, half: int) -> int:
    """Numbers that a program holds to hash a token."""
    return triton.next_power_of_2(width) * triton.next_power_of_2(rounds) * triton.next_power_of_2(max(1, half))


def lsh_attention(
    q: Tensor, v: Tensor, directions: Tensor, keys: Tensor, values: Tensor, buckets: Tensor, table: Tensor,
    seen: Tensor, every: int, whole: int, arrived: Tensor, shares: int | None = None,
) -> Tensor:  # fmt: skip
    """q, v (rows, heads · width) to (rows, heads · width); the token's key, value and buckets are stored at `seen`
    (rows,). `directions` R (heads, width, rounds, buckets / 2), fp32; empty if there is one bucket. The first `whole`
    tokens of a text attend to all. `arrived`: zeros for each row and head."""
    (rows, _), (_, heads, slots, width) = q.shape, keys.shape
    half, rounds = directions.shape[3], buckets.shape[3]
    assert all(x.is_contiguous() for x in (keys, values, buckets, directions)) and q.stride(1) == v.stride(1) == 1
    cut = split_config(rows, heads, 1, slots)
    shares = shares or min(cut.shares, triton.cdiv(slots, cut.least))
    out = torch.empty(rows, heads * width, dtype=keys.dtype, device=q.device)
    tops = sums = pieces = out
    if shares > 1:
        tops, sums = torch.empty(2, rows, heads, shares, device=q.device)
        pieces = torch.empty(rows, heads, shares, width, device=q.device)
    drawn = direction_count(width, rounds, half)
    _lsh_attention[(rows, heads, shares)](
        q, v, directions, keys, values, buckets, table, seen, out, tops, sums, pieces, arrived, q.stride(0),
        v.stride(0), table.stride(0), slots, whole, HEADS=heads, WIDTH=width, WIDE=triton.next_power_of_2(width),
        ROUNDS=rounds, TURNS=triton.next_power_of_2(rounds), HALF=half, MANY=triton.next_power_of_2(max(1, half)),
        EVERY=every, SHARES=shares, TILE=cut.tile, OVERLAP=has_pdl(q.device), launch_pdl=has_pdl(q.device),
        num_warps=min(8, max(2, drawn // 2048)), num_stages=2,
    )  # fmt: skip
    return out
