"""Attention of one new token per row over cached latents (DeepSeek-AI 2024, "DeepSeek-V2", 2.1.2: W^UK absorbed into
the queries, W^UV into the output), so that a step reads each token's latent once for all heads.

The cache is (blocks, 1, slots, rank + rope): the normalised latent and the rotated key that all heads share; the latent
is also the value. Block tables and splits are those of decode_attention.py. One program per row, group of heads and
split of the keys; the first split normalises, rotates and stores the new token. The definition is
`LatentAttentionModule.attend_absorbed` (nn/mixers/attention/mla.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.decode_attention import _rotate, _slot_of, keys_of_share
from allyouneed.kernels.triton.recurrent_step import HeadNorm

QUERIES = 16  # heads of a program: the smallest tile of a tensor core


@triton.jit
def _latent_attention(
    ql, qr, new, cache, table, seen, turns, weight, out, tops, sums, parts, arrived,
    ql_row, ql_head, qr_row, qr_head, new_row, table_row, slots, rows, scale, eps, offset,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    QUERIES: tl.constexpr, STEP: tl.constexpr, EVERY: tl.constexpr, TURNS: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, group, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width: tl.constexpr = RANK + ROPE
    half: tl.constexpr = ROPE // 2
    apart: tl.constexpr = 1 if STEP == 2 else ROPE // 2
    f, p = tl.arange(0, WIDE), tl.arange(0, HALF)
    known, paired = f < RANK, p < half
    await_inputs(OVERLAP)
    count, begin, end = keys_of_share(seen, row, share, SHARES, TILE)
    kind = cache.dtype.element_ty
    g = tl.arange(0, QUERIES)
    heads = group * QUERIES + g
    mine = heads < HEADS
    here = ql + row.to(tl.int64) * ql_row + heads[:, None].to(tl.int64) * ql_head + f[None, :]
    q = tl.load(here, mask=mine[:, None] & known[None, :], other=0.0).to(kind)  # (QUERIES, WIDE)
    here = qr + row.to(tl.int64) * qr_row + heads[:, None] * qr_head + p[None, :] * STEP
    inside = mine[:, None] & paired[None, :]
    qa = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    qb = tl.load(here + apart, mask=inside, other=0.0).to(tl.float32)
    cos, sin = p * 0.0, p * 0.0
    if TURNS:
        cos = tl.load(turns + row * ROPE + p, mask=paired, other=0.0)
        sin = tl.load(turns + row * ROPE + half + p, mask=paired, other=0.0)
        qa, qb = _rotate(qa, qb, cos[None, :], sin[None, :])
    qa, qb = qa.to(kind), qb.to(kind)
    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    sum = tl.zeros((QUERIES,), dtype=tl.float32)
    total = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
    if share == 0:
        at = new + row.to(tl.int64) * new_row
        latent = tl.load(at + f, mask=known, other=0.0).to(tl.float32)
        if NORM:
            latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
            if WEIGHT:
                latent *= tl.load(weight + f, mask=known, other=0.0).to(tl.float32) + offset
        latent = latent.to(kind)
        ka = tl.load(at + RANK + p * STEP, mask=paired, other=0.0).to(tl.float32)
        kb = tl.load(at + RANK + p * STEP + apart, mask=paired, other=0.0).to(tl.float32)
        if TURNS:
            ka, kb = _rotate(ka, kb, cos, sin)
        ka, kb = ka.to(kind), kb.to(kind)
        if group == 0:
            target = cache + _slot_of(table, row, table_row, count, True, 0, slots, EVERY, 1) * width
            tl.store(target + f, latent, mask=known)
            tl.store(target + RANK + p * STEP, ka, mask=paired)
            tl.store(target + RANK + p * STEP + apart, kb, mask=paired)
        top = tl.sum(q.to(tl.float32) * latent.to(tl.float32)[None, :], 1)
        top += tl.sum(qa.to(tl.float32) * ka.to(tl.float32)[None, :], 1)
        top = (top + tl.sum(qb.to(tl.float32) * kb.to(tl.float32)[None, :], 1)) * scale
        sum += 1.0
        total += latent.to(tl.float32)[None, :]
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        real = at < end
        spot = _slot_of(table, row, table_row, at, real, 0, slots, EVERY, 1)[:, None] * width
        tile = tl.load(cache + spot + f[None, :], mask=real[:, None] & known[None, :], other=0.0)  # (TILE, WIDE)
        pairs = cache + spot + RANK + p[None, :] * STEP
        both = real[:, None] & paired[None, :]
        ka, kb = tl.load(pairs, mask=both, other=0.0), tl.load(pairs + apart, mask=both, other=0.0)
        scores = tl.dot(q, tl.trans(tile), input_precision="ieee")
        scores = tl.dot(qa, tl.trans(ka), scores, input_precision="ieee")
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision="ieee") * scale
        scores = tl.where(real[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        weights, fade = tl.exp(scores - safe[:, None]), tl.exp(top - safe)
        sum = sum * fade + tl.sum(weights, 1)
        total = tl.dot(weights.to(kind), tile, total * fade[:, None], input_precision="ieee")
        top = higher
    last = True
    keep = mine[:, None] & known[None, :]
    if SHARES > 1:  # the last program merges all splits by their softmax mass
        mark = (row.to(tl.int64) * HEADS + heads) * SHARES
        tl.store(tops + mark + share, top, mask=mine)
        tl.store(sums + mark + share, sum, mask=mine)
        tl.store(parts + (mark + share)[:, None] * RANK + f[None, :], total, mask=keep)
        tl.debug_barrier()
        groups: tl.constexpr = (HEADS + QUERIES - 1) // QUERIES
        last = tl.atomic_add(arrived + row * groups + group, 1, sem="acq_rel") == SHARES - 1
        if last:
            tl.store(arrived + row * groups + group, 0)  # reset for the next launch
            top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
            sum = tl.zeros((QUERIES,), dtype=tl.float32)
            total = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
            for other in range(SHARES):
                theirs = tl.load(tops + mark + other, mask=mine, other=float("-inf"), cache_modifier=".cg")
                higher = tl.maximum(top, theirs)
                safe = tl.where(higher > float("-inf"), higher, 0.0)
                fade, more = tl.exp(top - safe), tl.exp(theirs - safe)
                sum = sum * fade + more * tl.load(sums + mark + other, mask=mine, other=0.0, cache_modifier=".cg")
                there = parts + (mark + other)[:, None] * RANK + f[None, :]
                total = total * fade[:, None] + more[:, None] * tl.load(
                    there, mask=keep, other=0.0, cache_modifier=".cg"
                )
                top = higher
    if last:
        found = total / tl.where(sum > 0, sum, 1.0)[:, None]
        target = out + (heads[:, None].to(tl.int64) * rows + row) * RANK + f[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=keep)


def latent_attention(
    ql: Tensor, qr: Tensor, new: Tensor, cache: Tensor, table: Tensor, seen: Tensor, scale: float, every: int,
    rotation: Tensor | None, interleaved: bool, norm: HeadNorm | None, arrived: Tensor,
    shares: int | None = None,
) -> Tensor:  # fmt: skip
    """Queries in the latent space ql (heads, rows, rank) and rotary ones qr (rows, heads, rope) to (heads, rows, rank).
    `new` (rows, rank + rope): latent and rotary key of the new token, neither normalised nor rotated; stored at `seen`
    (rows,). `rotation` (rows, rope): cosines beside sines. `arrived`: zeros for each row and group of heads."""
    heads, rows, rank = ql.shape
    rope, slots = qr.shape[2], cache.shape[2]
    assert rope % 2 == 0 and cache.is_contiguous() and all(x.stride(-1) == 1 for x in (ql, qr, new))
    groups = triton.cdiv(heads, QUERIES)
    shares = shares or max(1, min(triton.cdiv(slots, 128), triton.cdiv(132, rows * groups)))
    out = torch.empty(heads, rows, rank, dtype=cache.dtype, device=cache.device)
    tops = sums = pieces = out
    if shares > 1:
        tops, sums = torch.empty(2, rows, heads, shares, device=out.device)
        pieces = torch.empty(rows, heads, shares, rank, device=out.device)
    _latent_attention[(rows, groups, shares)](
        ql, qr, new, cache, table, seen, seen if rotation is None else rotation,
        new if norm is None or norm.weight is None else norm.weight, out, tops, sums, pieces, arrived,
        ql.stride(1), ql.stride(0), qr.stride(0), qr.stride(1), new.stride(0), table.stride(0), slots, rows, scale,
        0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset, HEADS=heads, RANK=rank, ROPE=rope,
        WIDE=max(16, triton.next_power_of_2(rank)), HALF=max(16, triton.next_power_of_2(rope // 2)), QUERIES=QUERIES,
        STEP=2 if interleaved else 1, EVERY=every, TURNS=rotation is not None, NORM=norm is not None,
        WEIGHT=norm is not None and norm.weight is not None, SHARES=shares, TILE=32, OVERLAP=has_pdl(out.device),
        launch_pdl=has_pdl(out.device), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
