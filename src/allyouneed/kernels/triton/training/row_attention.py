"""Attention of packed rows of few tokens, forward and backward. A program has a block of queries (or of keys, for their
gradients) of one row and head. It finds the keys (queries) of the same sentences at once, since all marks of a row fit
into a tile, and reads those alone: of rows that hold many sentences, most scores are never computed. Definition:
nn/ops/attention/short_rows.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Tile = tuple[int, int, int]  # tokens of a block, of a window of the other side, and warps


@triton.jit
def _marks(segments, row, i, time):
    """Sentences of some tokens, and the first and last of them."""
    own = tl.load(segments + row * time + i, mask=i < time, other=0)
    return own, tl.min(tl.where(own > 0, own, 1 << 30), 0), tl.max(own, 0)


@triton.jit
def _span(segments, row, low, high, time, ALL: tl.constexpr):
    """From the first to behind the last token of the sentences `low` to `high`."""
    at = tl.arange(0, ALL)
    marks = tl.load(segments + row * time + at, mask=at < time, other=0)
    wanted = (marks >= low) & (marks <= high) & (marks > 0)
    return tl.min(tl.where(wanted, at, ALL), 0), tl.max(tl.where(wanted, at + 1, 0), 0)


@triton.jit
def _seen(ours, theirs, q_positions, k_positions, row, i, j, queries, keys, CAUSAL: tl.constexpr):
    """(i, j): both tokens are of one sentence, and the key is not later. `ours`, `theirs`: sentences of queries i and
    keys j."""
    found = (ours[:, None] == theirs[None, :]) & (ours > 0)[:, None]
    if CAUSAL:
        at = tl.load(q_positions + row * queries + i, mask=i < queries, other=0)
        before = tl.load(k_positions + row * keys + j, mask=j < keys, other=0)
        found = found & (at[:, None] >= before[None, :])
    return found


@triton.jit
def _tile(x, row, head, i, f, time, by_row, by_head, by_time):
    """x[row, head] (time, width)"""
    at = x + row * by_row + head * by_head + i.to(tl.int64)[:, None] * by_time + f[None, :]
    return tl.load(at, mask=(i < time)[:, None], other=0.0)


@triton.jit
def _forward(
    q, k, v, q_segments, k_segments, q_positions, k_positions, out, lse, scale, queries, keys,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, f, g = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    ours, low, high = _marks(q_segments, row, i, queries)
    first, end = _span(k_segments, row, low, high, keys, KEYS)
    left = _tile(q, row, head, i, f, queries, q_row, q_head, q_time)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, found = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, VALUES), tl.float32)
    for start in range(first, end, WINDOW):
        j = start + tl.arange(0, WINDOW)
        theirs = tl.load(k_segments + row * keys + j, mask=j < keys, other=-1)
        right = _tile(k, row, head // GROUP, j, f, keys, k_row, k_head, k_time)
        value = _tile(v, row, head // GROUP, j, g, keys, v_row, v_head, v_time)
        seen = _seen(ours, theirs, q_positions, k_positions, row, i, j, queries, keys, CAUSAL)
        scores = tl.where(seen, tl.dot(left, tl.trans(right)) * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        by = tl.where(highest == float("-inf"), 0.0, highest)  # a token that sees nothing
        weights, fade = tl.exp(scores - by[:, None]), tl.exp(top - by)
        total = total * fade + tl.sum(weights, 1)
        found = found * fade[:, None] + tl.dot(weights.to(value.dtype), value)
        top = highest
    total = tl.where(total == 0.0, 1.0, total)
    here = i < queries
    at = out + row * o_row + head * o_head + i.to(tl.int64)[:, None] * o_time + g[None, :]
    tl.store(at, (found / total[:, None]).to(out.dtype.element_ty), mask=here[:, None])
    top = tl.where(top == float("-inf"), 0.0, top)
    tl.store(lse + (row * HEADS + head) * queries + i, top + tl.log(total), mask=here)


@triton.jit
def _slopes(left, right, value, above, seen, lse, out, row, head, i, g, queries, o_row, o_head, o_time, scale,
            HEADS: tl.constexpr):  # fmt: skip
    """Weights of the scores, and the gradients of the scores (queries, keys)."""
    logs = tl.load(lse + (row * HEADS + head) * queries + i, mask=i < queries, other=0.0)
    weights = tl.where(seen, tl.exp(tl.dot(left, tl.trans(right)) * scale - logs[:, None]), 0.0)
    result = _tile(out, row, head, i, g, queries, o_row, o_head, o_time)
    mean = tl.sum(above.to(tl.float32) * result.to(tl.float32), 1)  # of the weights' gradients (Dao et al. 2022, B.4)
    return weights, weights * (tl.dot(above, tl.trans(value)) - mean[:, None]) * scale


@triton.jit
def _backward(
    gradient, out, q, k, v, q_segments, k_segments, q_positions, k_positions, lse, dq, dk, dv, sums, scale, queries,
    keys, g_row, g_head, g_time, o_row, o_head, o_time, q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head,
    v_time, dq_time, dk_time, dv_time, sums_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """First the programs of key blocks, whose heads read all queries of their group, then those of query blocks. Heads
    of a token lie side by side in the gradients. `SUMS`: also those over the tokens of a block."""
    row, owner, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own, mark = tl.arange(0, BLOCK), tl.arange(0, WINDOW)
    f, g = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    key_blocks, query_blocks = tl.cdiv(keys, BLOCK), tl.cdiv(queries, BLOCK)
    if block < key_blocks:
        j = block * BLOCK + own
        theirs, low, high = _marks(k_segments, row, j, keys)
        first, end = _span(q_segments, row, low, high, queries, QUERIES)
        right = _tile(k, row, owner, j, f, keys, k_row, k_head, k_time)
        value = _tile(v, row, owner, j, g, keys, v_row, v_head, v_time)
        of_keys, of_values = tl.zeros((BLOCK, WIDTH), tl.float32), tl.zeros((BLOCK, VALUES), tl.float32)
        for head in range(owner * GROUP, (owner + 1) * GROUP):
            for start in range(first, end, WINDOW):
                i = start + mark
                ours = tl.load(q_segments + row * queries + i, mask=i < queries, other=0)
                seen = _seen(ours, theirs, q_positions, k_positions, row, i, j, queries, keys, CAUSAL)
                left = _tile(q, row, head, i, f, queries, q_row, q_head, q_time)
                above = _tile(gradient, row, head, i, g, queries, g_row, g_head, g_time)
                weights, slopes = _slopes(
                    left, right, value, above, seen, lse, out, row, head, i, g, queries, o_row, o_head, o_time, scale,
                    HEADS,
                )  # fmt: skip
                of_values += tl.dot(tl.trans(weights.to(above.dtype)), above)
                of_keys += tl.dot(tl.trans(slopes.to(left.dtype)), left)
        at, there = (row * keys + j)[:, None], (j < keys)[:, None]
        tl.store(dk + at * dk_time + owner * WIDTH + f[None, :], of_keys.to(dk.dtype.element_ty), mask=there)
        tl.store(dv + at * dv_time + owner * VALUES + g[None, :], of_values.to(dv.dtype.element_ty), mask=there)
        if SUMS:
            spot = sums + (row * key_blocks + block) * sums_row + HEADS * WIDTH + owner * WIDTH
            tl.store(spot + f, tl.sum(of_keys, 0))
            tl.store(spot + HEADS // GROUP * WIDTH + g, tl.sum(of_values, 0))
    else:
        head, block = owner * GROUP + (block - key_blocks) // query_blocks, (block - key_blocks) % query_blocks
        i = block * BLOCK + own
        ours, low, high = _marks(q_segments, row, i, queries)
        first, end = _span(k_segments, row, low, high, keys, KEYS)
        left = _tile(q, row, head, i, f, queries, q_row, q_head, q_time)
        above = _tile(gradient, row, head, i, g, queries, g_row, g_head, g_time)
        found = tl.zeros((BLOCK, WIDTH), tl.float32)
        for start in range(first, end, WINDOW):
            j = start + mark
            theirs = tl.load(k_segments + row * keys + j, mask=j < keys, other=-1)
            seen = _seen(ours, theirs, q_positions, k_positions, row, i, j, queries, keys, CAUSAL)
            right = _tile(k, row, owner, j, f, keys, k_row, k_head, k_time)
            value = _tile(v, row, owner, j, g, keys, v_row, v_head, v_time)
            _, slopes = _slopes(
                left, right, value, above, seen, lse, out, row, head, i, g, queries, o_row, o_head, o_time, scale, HEADS
            )
            found += tl.dot(slopes.to(right.dtype), right)
        at, here = (row * queries + i)[:, None], (i < queries)[:, None]
        tl.store(dq + at * dq_time + head * WIDTH + f[None, :], found.to(dq.dtype.element_ty), mask=here)
        if SUMS:
            tl.store(sums + (row * query_blocks + block) * sums_row + head * WIDTH + f, tl.sum(found, 0))


def _sizes(q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: Tile) -> dict[str, Any]:
    heads, (block, window, warps) = q.shape[1], tile
    return {
        "HEADS": heads, "GROUP": heads // k.shape[1], "WIDTH": q.shape[3], "VALUES": v.shape[3], "BLOCK": block,
        "WINDOW": window, "KEYS": triton.next_power_of_2(k.shape[2]), "CAUSAL": causal, "num_warps": warps,
        "num_stages": 1,
    }  # fmt: skip


def _near(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def row_attention(
    q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor, k_positions: Tensor,
    causal: bool, scale: float, out: Tensor, tile: Tile,
) -> Tensor:  # fmt: skip
    """Fills `out` (batch, heads, queries, width of v); the log-sum-exp of the scores (batch, heads, queries)."""
    batch, heads, queries, _ = q.shape
    q, k, v = _near(q), _near(k), _near(v)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel():
        _forward[(batch, heads, triton.cdiv(queries, tile[0]))](
            q, k, v, q_segments, k_segments, q_positions, k_positions, out, lse, scale, queries, k.shape[2],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], **_sizes(q, k, v, causal, tile),
        )  # fmt: skip
    return lse


def row_attention_backward(
    gradient: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor,
    q_positions: Tensor, k_positions: Tensor, causal: bool, scale: float, lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, tile: Tile, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the gradients (batch, heads, time, width), heads of a token side by side in memory; and, of queries, keys
    and values side by side, the `sums` (batch · blocks, width) over the tokens of a block."""
    gradient, out, q, k, v = _near(gradient), _near(out), _near(q), _near(k), _near(v)
    assert lse.is_contiguous() and all(x.stride()[1::2] == (x.shape[3], 1) for x in (dq, dk, dv))
    assert all(x.stride(0) == x.shape[2] * x.stride(2) for x in (dq, dk, dv)) and (sums is None or sums.is_contiguous())
    batch, heads, queries, _ = q.shape
    owners, keys = k.shape[1:3]
    if batch:
        _backward[(batch, owners, triton.cdiv(keys, tile[0]) + heads // owners * triton.cdiv(queries, tile[0]))](
            gradient, out, q, k, v, q_segments, k_segments, q_positions, k_positions, lse, dq, dk, dv,
            lse if sums is None else sums, scale, queries, keys, *gradient.stride()[:3], *out.stride()[:3],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], dq.stride(2), dk.stride(2), dv.stride(2),
            0 if sums is None else sums.stride(0), QUERIES=triton.next_power_of_2(queries), SUMS=sums is not None,
            **_sizes(q, k, v, causal, tile),
        )  # fmt: skip
