"""What decode kernels share whose matrices are written once in RECENT tokens. Definition: nn/ops/deferred.py.

A program has some columns of the matrix of one row and head in registers, (columns, N) with N contiguous. Matrix and
recent tokens have been stored by the steps before, so they are read before the kernels in front of it have ended.
"""

from __future__ import annotations

import triton
import triton.language as tl


def tiles(matrices: int, width: int, many: int) -> dict[str, int]:
    """How many columns of `many` numbers a program takes of each matrix, and how many at a time it folds: enough for 64
    and 32 numbers in each of its threads; fewer if that leaves multiprocessors without work."""
    most = triton.next_power_of_2(width)
    large, small = (min(most, max(1, size // many)) for size in (8192, 4096))
    block = large if matrices * triton.cdiv(width, large) >= 1024 else small
    return {"BLOCK": block, "PIECE": small}


@triton.jit
def load_recent(
    keys, values, logs, count, f, n, known, real, WIDTH: tl.constexpr, STATES: tl.constexpr, RECENT: tl.constexpr
):
    """The first `count` recent tokens: keys (RECENT, N), values (RECENT, columns), log decays (RECENT,)."""
    place = tl.arange(0, RECENT)
    there = place < count
    key = tl.load(keys + place[:, None] * STATES + n[None, :], mask=there[:, None] & real[None, :], other=0.0)
    value = tl.load(values + place[:, None] * WIDTH + f[None, :], mask=there[:, None] & known[None, :], other=0.0)
    return key, value, tl.load(logs + place, mask=there, other=0.0)


@triton.jit
def recent_weights(products, logs, log, RECENT: tl.constexpr):
    """Weights of the recent tokens before one with this log decay, given its query times their keys; and the factor of
    the matrix."""
    place = tl.arange(0, RECENT)
    later = tl.sum(tl.where(place[None, :] > place[:, None], logs[None, :], 0.0), 1)
    return products * tl.exp(later + log), tl.exp(tl.sum(logs, 0) + log)


@triton.jit
def read_deferred(state, key, value, logs, query, log, RECENT: tl.constexpr):
    """qᵀ h after a token with this log decay, but without its own key and value: (columns,)"""
    weight, fade = recent_weights(tl.sum(key * query[None, :], 1), logs, log, RECENT)
    return tl.sum(state * query[None, :], 1) * fade + tl.sum(weight[:, None] * value, 0)


@triton.jit
def fold_recent(
    matrix, keys, values, logs, source, scale, key, log, n, real, WIDTH: tl.constexpr, STATES: tl.constexpr,
    RECENT: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Add all recent tokens to a program's columns of a matrix, by the recurrence itself: RECENT − 1 stored ones, and a
    new one with this key and log decay whose value is `source` times `scale`. Few columns at a time, which are read
    again: this is rare, and a program that kept them would leave room for fewer others."""
    place = tl.arange(0, RECENT)[:, None]
    old = tl.load(keys + place * STATES + n[None, :], mask=(place < RECENT - 1) & real[None, :], other=0.0)
    for piece in range(BLOCK // PIECE):
        f = tl.program_id(0) * BLOCK + piece * PIECE + tl.arange(0, PIECE)
        known = f < WIDTH
        spot, both = matrix + f[:, None] * STATES + n[None, :], known[:, None] & real[None, :]
        state = tl.load(spot, mask=both, other=0.0)
        for number in tl.static_range(RECENT - 1):
            old_key = tl.sum(tl.where(place == number, old, 0.0), 0)  # already in the registers
            old_value = tl.load(values + number * WIDTH + f, mask=known, other=0.0)
            state = state * tl.exp(tl.load(logs + number)) + old_value[:, None] * old_key[None, :]
        value = tl.load(source + f, mask=known, other=0.0).to(tl.float32) * scale
        tl.store(spot, state * tl.exp(log) + value[:, None] * key[None, :], mask=both)
