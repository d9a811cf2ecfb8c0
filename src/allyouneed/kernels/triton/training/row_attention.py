"""Attention of packed rows whose keys fit into one tile, forward and backward: one program per row and head of the
keys, forward per block of queries too. Definition: nn/ops/attention/short_rows.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class QueryTile(NamedTuple):
    """Queries at a time, so that scores and gradients stay in registers and several programs fit; warps per program."""

    queries: int
    warps: int


FORWARD, BACK = QueryTile(64, 4), QueryTile(32, 4)


@triton.jit
def _allowed(q_segments, k_segments, q_positions, k_positions, row, i, j, queries, keys, CAUSAL: tl.constexpr):
    """(i, j): both tokens are of one sentence, and the key is not later."""
    here, there = i < queries, j < keys
    sentence = tl.load(q_segments + row * queries + i, mask=here, other=0)
    other = tl.load(k_segments + row * keys + j, mask=there, other=-1)
    found = (sentence[:, None] == other[None, :]) & (sentence > 0)[:, None]
    if CAUSAL:
        at = tl.load(q_positions + row * queries + i, mask=here, other=0)
        before = tl.load(k_positions + row * keys + j, mask=there, other=0)
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
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, out_row, out_head, out_time,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    f, g = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    left = _tile(q, row, head, i, f, queries, q_row, q_head, q_time)
    right = _tile(k, row, head // GROUP, j, f, keys, k_row, k_head, k_time)
    value = _tile(v, row, head // GROUP, j, g, keys, v_row, v_head, v_time)
    seen = _allowed(q_segments, k_segments, q_positions, k_positions, row, i, j, queries, keys, CAUSAL)
    scores = tl.where(seen, tl.dot(left, tl.trans(right)) * scale, float("-inf"))
    top = tl.max(scores, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # a token that sees nothing
    weights = tl.exp(scores - top[:, None])
    total = tl.sum(weights, 1)
    total = tl.where(total == 0.0, 1.0, total)
    found = tl.dot(weights.to(value.dtype), value) / total[:, None]
    here = i < queries
    at = out + row * out_row + head * out_head + i.to(tl.int64)[:, None] * out_time + g[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=here[:, None])
    tl.store(lse + (row * HEADS + head) * queries + i, top + tl.log(total), mask=here)


@triton.jit
def _backward(
    gradient, q, k, v, q_segments, k_segments, q_positions, k_positions, lse, dq, dk, dv, sums, scale, queries, keys,
    g_row, g_head, g_time, q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, dq_time, dk_time,
    dv_time, sums_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Heads of a token lie side by side in the gradients. `SUMS`: also those over the tokens of the row."""
    row, owner = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j, f, g = tl.arange(0, COLUMNS), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    right = _tile(k, row, owner, j, f, keys, k_row, k_head, k_time)
    value = _tile(v, row, owner, j, g, keys, v_row, v_head, v_time)
    of_keys = tl.zeros((COLUMNS, WIDTH), tl.float32)
    of_values = tl.zeros((COLUMNS, VALUES), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    there = j < keys
    blocks = tl.cdiv(queries, ROWS)
    for number in range(GROUP * blocks):
        head, block = owner * GROUP + number // blocks, number % blocks
        i = block * ROWS + tl.arange(0, ROWS)
        here = i < queries
        seen = _allowed(q_segments, k_segments, q_positions, k_positions, row, i, j, queries, keys, CAUSAL)
        left = _tile(q, row, head, i, f, queries, q_row, q_head, q_time)
        above = _tile(gradient, row, head, i, g, queries, g_row, g_head, g_time)
        logs = tl.load(lse + (row * HEADS + head) * queries + i, mask=here, other=0.0)
        scores = tl.dot(left, tl.trans(right)) * scale
        weights = tl.where(seen, tl.exp(scores - logs[:, None]), 0.0)
        of_values += tl.dot(tl.trans(weights.to(above.dtype)), above)
        grads = tl.dot(above, tl.trans(value))
        grads = weights * (grads - tl.sum(weights * grads, 1)[:, None]) * scale
        grads = grads.to(left.dtype)
        of_keys += tl.dot(tl.trans(grads), left)
        found = tl.dot(grads, right)
        at = dq + (row * queries + i)[:, None] * dq_time + head * WIDTH + f[None, :]
        tl.store(at, found.to(dq.dtype.element_ty), mask=here[:, None])
        if SUMS:
            total = tl.where(block == 0, 0.0, total) + tl.sum(found, 0)
            if block == blocks - 1:
                tl.store(sums + row * sums_row + head * WIDTH + f, total)
    at = (row * keys + j)[:, None]
    tl.store(dk + at * dk_time + owner * WIDTH + f[None, :], of_keys.to(dk.dtype.element_ty), mask=there[:, None])
    tl.store(dv + at * dv_time + owner * VALUES + g[None, :], of_values.to(dv.dtype.element_ty), mask=there[:, None])
    if SUMS:
        spot = sums + row * sums_row + HEADS * WIDTH + owner * WIDTH
        tl.store(spot + f, tl.sum(of_keys, 0))
        tl.store(spot + HEADS // GROUP * WIDTH + g, tl.sum(of_values, 0))


def _sizes(q: Tensor, k: Tensor, v: Tensor, causal: bool, most: int) -> dict[str, Any]:
    def tile(time: int) -> int:
        return max(16, triton.next_power_of_2(time))

    heads, rows, columns = q.shape[1], min(most, tile(q.shape[2])), tile(k.shape[2])
    return {
        "HEADS": heads, "GROUP": heads // k.shape[1], "WIDTH": q.shape[3], "VALUES": v.shape[3], "ROWS": rows,
        "COLUMNS": columns, "CAUSAL": causal,
    }  # fmt: skip


def _near(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def row_attention(
    q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor, k_positions: Tensor,
    causal: bool, scale: float, out: Tensor,
) -> Tensor:  # fmt: skip
    """Fills `out` (batch, heads, queries, width of v); the log-sum-exp of the scores (batch, heads, queries)."""
    batch, heads, queries, _ = q.shape
    q, k, v = _near(q), _near(k), _near(v)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if lse.numel():
        sizes = _sizes(q, k, v, causal, FORWARD.queries)
        _forward[(batch, heads, triton.cdiv(queries, sizes["ROWS"]))](
            q, k, v, q_segments, k_segments, q_positions, k_positions, out, lse, scale, queries, k.shape[2],
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], num_warps=FORWARD.warps, **sizes,
        )  # fmt: skip
    return lse


def row_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor,
    k_positions: Tensor, causal: bool, scale: float, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the gradients (batch, heads, time, width), heads of a token side by side in memory; and, of queries, keys
    and values side by side, the `sums` (batch, width) over tokens."""
    gradient, q, k, v = _near(gradient), _near(q), _near(k), _near(v)
    assert lse.is_contiguous() and all(x.stride()[1::2] == (x.shape[3], 1) for x in (dq, dk, dv))
    assert all(x.stride(0) == x.shape[2] * x.stride(2) for x in (dq, dk, dv)) and (sums is None or sums.is_contiguous())
    if len(q):
        _backward[(len(q), k.shape[1])](
            gradient, q, k, v, q_segments, k_segments, q_positions, k_positions, lse, dq, dk, dv,
            lse if sums is None else sums, scale, q.shape[2], k.shape[2], *gradient.stride()[:3], *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], dq.stride(2), dk.stride(2), dv.stride(2),
            0 if sums is None else sums.stride(0), SUMS=sums is not None, num_warps=BACK.warps, num_stages=1,
            **_sizes(q, k, v, causal, BACK.queries),
        )  # fmt: skip
