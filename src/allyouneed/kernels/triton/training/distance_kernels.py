"""The Triton functions of distance_attention.py, which explains them. `q` and `k` are indices of queries and keys in
their row that broadcast to a tile, in either order of axes."""

from __future__ import annotations

import triton
import triton.language as tl

from allyouneed.kernels.triton.training.tiled_kernels import LOG2E, _load_rows, _store_rows


@triton.jit
def _by_distance(table, q, k, time, columns, far, KIND: tl.constexpr):
    """What the table has for the queries at the distances of their keys. KIND: 1 of each pair, 2 all keys are far
    behind, 3 far ahead."""
    column = tl.zeros_like(q)
    if KIND == 1:
        column = tl.minimum(tl.maximum(k - q, -far), columns - 1 - far) + far
    if KIND == 3:
        column += columns - 1
    return tl.load(table + q.to(tl.int64) * columns + column, mask=q < time, other=0.0).to(tl.float32)


@triton.jit
def _masked(scores, q, k, begin, until, codes, time, ROUNDS: tl.constexpr):
    """-inf for keys outside of the query's sentence, and for those that share no code with it."""
    scores = tl.where((k >= begin) & (k <= until), scores, float("-inf"))
    if ROUNDS > 0:
        same = q < 0
        for number in tl.static_range(ROUNDS):
            own = tl.load(codes + q.to(tl.int64) * ROUNDS + number, mask=q < time, other=0)
            same = same | (own == tl.load(codes + k.to(tl.int64) * ROUNDS + number, mask=k < time, other=0))
        scores = tl.where(same & (q != k), scores, float("-inf"))
    return scores


@triton.jit
def _limits(starts, ends, at, time, CAUSAL: tl.constexpr):
    """The first and last key that each query sees."""
    begin = tl.load(starts + at, mask=at < time, other=1 << 30)
    until = at
    if not CAUSAL:
        until = tl.load(ends + at, mask=at < time, other=-1)
    return begin, until


@triton.jit
def _key_range(starts, ends, start, time, columns, far, CAUSAL: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr,
               N: tl.constexpr):  # fmt: skip
    """First keys of the tiles that the queries from `start` on see: all from `first` to `last`, of them far behind
    before `near`, far ahead from `ahead` on."""
    first = tl.load(starts + start) // N * N
    last = tl.minimum(start + M, time)
    near, ahead = first, last
    if not CAUSAL:
        last = tl.load(ends + last - 1) + 1
        ahead = last
    if KIND:
        near = tl.maximum(first, tl.maximum(start - far + 1, 0) // N * N)
        if not CAUSAL:
            ahead = tl.maximum(near, tl.minimum(last, tl.cdiv(start + M + columns - 2 - far, N) * N))
    return first, near, ahead, last


@triton.jit
def _attend(
    a, q, begin, until, top, total, out, first, last, k, v, table, codes, k_time, v_time, time, columns, far, scale,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first … last − 1."""
    for start in range(first, last, N):
        at = start + tl.arange(0, N)
        b = _load_rows(k, at, at < time, k_time, WIDTH, FEATURES)
        c = _load_rows(v, at, at < time, v_time, VALUES, WIDE)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        if KIND:
            scores += _by_distance(table, q[:, None], at[None, :], time, columns, far, KIND) * LOG2E
        scores = _masked(scores, q[:, None], at[None, :], begin[:, None], until[:, None], codes, time, ROUNDS)
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        weights, fade = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
        total = total * fade + tl.sum(weights, 1)
        out = tl.dot(weights.to(c.dtype), c, out * fade[:, None], input_precision=PRECISION)
        top = higher
    return top, total, out


@triton.jit
def outputs(
    q, k, v, table, codes, starts, ends, out, lse,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time,
    heads, time, columns, far, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), (blocks - 1 - tl.program_id(0) % blocks) * M
    row, head = line // heads, line % heads
    starts, ends = starts + row * time, ends + row * time
    k, v = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    table, codes = table + line * time * columns, codes + line * time * ROUNDS
    at = start + tl.arange(0, M)
    inside = at < time
    begin, until = _limits(starts, ends, at, time, CAUSAL)
    reached = _key_range(starts, ends, start, time, columns, far, CAUSAL, KIND, M, N)
    a = _load_rows(q + row * q_row + head * q_head, at, inside, q_time, WIDTH, FEATURES)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    found = tl.zeros((M, WIDE), tl.float32)
    for part in tl.static_range(0 if KIND else 1, 3 if KIND and not CAUSAL else 2):
        top, total, found = _attend(
            a, at, begin, until, top, total, found, reached[part], reached[part + 1], k, v, table, codes, k_time,
            v_time, time, columns, far, scale, 2 if part == 0 else 3 if part == 2 else KIND, ROUNDS, WIDTH,
            FEATURES, VALUES, WIDE, N, PRECISION,
        )  # fmt: skip
    there = total > 0
    whole = tl.where(there, total, 1.0)
    _store_rows(out + row * o_row + head * o_head, found / whole[:, None], at, inside, o_time, VALUES, WIDE, False)
    tl.store(lse + line * time + at, tl.where(there, top + tl.log2(whole), float("-inf")), mask=inside)


@triton.jit
def _spread(into, value, q, k, begin, until, behind, ahead, time, columns, far, least):
    """Store what belongs to a distance of its own, add up what is at the farthest ones: `far` behind, `least`."""
    apart = q[:, None] - k[None, :]
    keep = (apart < far) & (apart > least) & (k[None, :] >= begin[:, None]) & (k[None, :] <= until[:, None])
    there = into + q[:, None].to(tl.int64) * columns + (far - apart)
    tl.store(there, value.to(into.dtype.element_ty), mask=keep & (q < time)[:, None])
    behind += tl.sum(tl.where(apart >= far, value, 0.0), 1)
    ahead += tl.sum(tl.where(apart <= least, value, 0.0), 1)
    return behind, ahead


@triton.jit
def _store_far(into, behind, ahead, q, time, columns, CAUSAL: tl.constexpr):
    here = into + q.to(tl.int64) * columns
    tl.store(here, behind.to(into.dtype.element_ty), mask=q < time)
    if not CAUSAL:
        tl.store(here + columns - 1, ahead.to(into.dtype.element_ty), mask=q < time)


@triton.jit
def _load_lse(lse, at, time):
    """Infinite for queries without keys, so that their weights are 0."""
    low = tl.load(lse + at, mask=at < time, other=float("inf"))
    return tl.where(low > float("-inf"), low, float("inf"))


@triton.jit
def _span_sums(
    a, low, q, begin, until, behind, ahead, first, last, k, table, codes, sums, k_time, time, columns, far, least,
    scale,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, N):
        at = start + tl.arange(0, N)
        b = _load_rows(k, at, at < time, k_time, WIDTH, FEATURES)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        scores += _by_distance(table, q[:, None], at[None, :], time, columns, far, KIND) * LOG2E
        scores = _masked(scores, q[:, None], at[None, :], begin[:, None], until[:, None], codes, time, ROUNDS)
        weights = tl.exp2(scores - low[:, None])
        if KIND == 1:
            behind, ahead = _spread(sums, weights, q, at, begin, until, behind, ahead, time, columns, far, least)
        if KIND == 2:
            behind += tl.sum(weights, 1)
        if KIND == 3:
            ahead += tl.sum(weights, 1)
    return behind, ahead


@triton.jit
def weight_sums(
    q, k, table, codes, starts, ends, lse, sums, q_row, q_head, q_time, k_row, k_head, k_time,
    heads, time, columns, far, least, scale,
    CAUSAL: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of each query by distance; `sums` (batch, heads, time, columns) holds zeros."""
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), (blocks - 1 - tl.program_id(0) % blocks) * M
    row, head = line // heads, line % heads
    starts, ends, k = starts + row * time, ends + row * time, k + row * k_row + head * k_head
    table, codes, sums = table + line * time * columns, codes + line * time * ROUNDS, sums + line * time * columns
    at = start + tl.arange(0, M)
    begin, until = _limits(starts, ends, at, time, CAUSAL)
    reached = _key_range(starts, ends, start, time, columns, far, CAUSAL, 1, M, N)
    a = _load_rows(q + row * q_row + head * q_head, at, at < time, q_time, WIDTH, FEATURES)
    low = _load_lse(lse + line * time, at, time)
    behind, ahead = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    for part in tl.static_range(0, 2 if CAUSAL else 3):
        behind, ahead = _span_sums(
            a, low, at, begin, until, behind, ahead, reached[part], reached[part + 1], k, table, codes, sums, k_time,
            time, columns, far, least, scale, 2 if part == 0 else 3 if part == 2 else 1, ROUNDS, WIDTH, FEATURES, N,
            PRECISION,
        )  # fmt: skip
    _store_far(sums, behind, ahead, at, time, columns, CAUSAL)


@triton.jit
def _span_q(
    a, g, low, mean, q, begin, until, dq, behind, ahead, first, last, k, v, table, of_sums, codes, d_table,
    k_time, v_time, time, columns, far, least, scale,
    KIND: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, N):
        at = start + tl.arange(0, N)
        b = _load_rows(k, at, at < time, k_time, WIDTH, FEATURES)
        c = _load_rows(v, at, at < time, v_time, VALUES, WIDE)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        if KIND:
            scores += _by_distance(table, q[:, None], at[None, :], time, columns, far, KIND) * LOG2E
        scores = _masked(scores, q[:, None], at[None, :], begin[:, None], until[:, None], codes, time, ROUNDS)
        slope = tl.dot(g, tl.trans(c), input_precision=PRECISION)
        if SUMS:
            slope += _by_distance(of_sums, q[:, None], at[None, :], time, columns, far, KIND)
        grad = tl.exp2(scores - low[:, None]) * (slope - mean[:, None])
        if KIND == 1:
            behind, ahead = _spread(d_table, grad, q, at, begin, until, behind, ahead, time, columns, far, least)
        if KIND == 2:
            behind += tl.sum(grad, 1)
        if KIND == 3:
            ahead += tl.sum(grad, 1)
        dq = tl.dot(grad.to(b.dtype), b, dq, input_precision=PRECISION)
    return dq, behind, ahead


@triton.jit
def grad_q(
    q, k, v, table, of_sums, codes, starts, ends, out, do, lse, delta, dq, d_table,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time, g_row, g_head, g_time,
    dq_row, dq_head, dq_time, heads, time, columns, far, least, scale, factor,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Also adds out · do of each token and head to `delta`, and stores the gradient of the table (zeros before)."""
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), (blocks - 1 - tl.program_id(0) % blocks) * M
    row, head = line // heads, line % heads
    starts, ends = starts + row * time, ends + row * time
    k, v = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    table, codes = table + line * time * columns, codes + line * time * ROUNDS
    of_sums, d_table = of_sums + line * time * columns, d_table + line * time * columns
    at = start + tl.arange(0, M)
    inside = at < time
    begin, until = _limits(starts, ends, at, time, CAUSAL)
    reached = _key_range(starts, ends, start, time, columns, far, CAUSAL, KIND, M, N)
    a = _load_rows(q + row * q_row + head * q_head, at, inside, q_time, WIDTH, FEATURES)
    g = _load_rows(do + row * g_row + head * g_head, at, inside, g_time, VALUES, WIDE)
    seen = _load_rows(out + row * o_row + head * o_head, at, inside, o_time, VALUES, WIDE)
    low, mean = _load_lse(lse + line * time, at, time), tl.sum(seen.to(tl.float32) * g.to(tl.float32), 1)
    if SUMS:
        mean += tl.load(delta + line * time + at, mask=inside, other=0.0)
    tl.store(delta + line * time + at, mean, mask=inside)
    found = tl.zeros((M, FEATURES), tl.float32)
    behind, ahead = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    for part in tl.static_range(0 if KIND else 1, 3 if KIND and not CAUSAL else 2):
        found, behind, ahead = _span_q(
            a, g, low, mean, at, begin, until, found, behind, ahead, reached[part], reached[part + 1], k, v, table,
            of_sums, codes, d_table, k_time, v_time, time, columns, far, least, scale,
            2 if part == 0 else 3 if part == 2 else KIND, SUMS, ROUNDS, WIDTH, FEATURES, VALUES, WIDE, N, PRECISION,
        )  # fmt: skip
    _store_rows(dq + row * dq_row + head * dq_head, found * factor, at, inside, dq_time, WIDTH, FEATURES, False)
    if KIND:
        _store_far(d_table, behind, ahead, at, time, columns, CAUSAL)


@triton.jit
def _span_kv(
    b, c, k, dk, dv, first, last, q, do, lse, delta, table, of_sums, codes, starts, ends, q_time, g_time, time,
    columns, far, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Transposed: keys are rows, queries first … last − 1 columns. KIND 2: far behind, 3: far ahead of them."""
    for start in range(first, last, N):
        at = start + tl.arange(0, N)
        begin, until = _limits(starts, ends, at, time, CAUSAL)
        a = _load_rows(q, at, at < time, q_time, WIDTH, FEATURES)
        g = _load_rows(do, at, at < time, g_time, VALUES, WIDE)
        low, mean = _load_lse(lse, at, time), tl.load(delta + at, mask=at < time, other=0.0)
        scores = tl.dot(b, tl.trans(a), input_precision=PRECISION) * scale
        if KIND:
            scores += _by_distance(table, at[None, :], k[:, None], time, columns, far, KIND) * LOG2E
        scores = _masked(scores, at[None, :], k[:, None], begin[None, :], until[None, :], codes, time, ROUNDS)
        weights = tl.exp2(scores - low[None, :])
        dv = tl.dot(weights.to(g.dtype), g, dv, input_precision=PRECISION)
        slope = tl.dot(c, tl.trans(g), input_precision=PRECISION)
        if SUMS:
            slope += _by_distance(of_sums, at[None, :], k[:, None], time, columns, far, KIND)
        dk = tl.dot((weights * (slope - mean[None, :])).to(a.dtype), a, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def grad_kv(
    q, k, v, table, of_sums, codes, starts, ends, do, lse, delta, dk, dv,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, g_row, g_head, g_time,
    dk_row, dk_head, dk_time, dv_row, dv_head, dv_time, heads, time, columns, far, scale, factor,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, SUMS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """M keys of a program."""
    blocks = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * M
    row, head = line // heads, line % heads
    starts, ends = starts + row * time, ends + row * time
    q, do = q + row * q_row + head * q_head, do + row * g_row + head * g_head
    table, codes = table + line * time * columns, codes + line * time * ROUNDS
    of_sums, lse, delta = of_sums + line * time * columns, lse + line * time, delta + line * time
    at = start + tl.arange(0, M)
    inside = at < time
    b = _load_rows(k + row * k_row + head * k_head, at, inside, k_time, WIDTH, FEATURES)
    c = _load_rows(v + row * v_row + head * v_head, at, inside, v_time, VALUES, WIDE)
    last = tl.load(ends + tl.minimum(start + M, time) - 1) + 1
    first = start // N * N
    if not CAUSAL:
        first = tl.load(starts + start) // N * N
    near, beyond = first, last
    if KIND:  # queries that are far behind of all these keys come first, those far ahead of them last
        if not CAUSAL:
            near = tl.maximum(first, tl.maximum(start + far - columns + 2, 0) // N * N)
        beyond = tl.maximum(near, tl.minimum(last, tl.cdiv(start + M - 1 + far, N) * N))
    for_k, for_v = tl.zeros((M, FEATURES), tl.float32), tl.zeros((M, WIDE), tl.float32)
    if KIND and not CAUSAL:
        for_k, for_v = _span_kv(
            b, c, at, for_k, for_v, first, near, q, do, lse, delta, table, of_sums, codes, starts, ends, q_time, g_time,
            time, columns, far, scale, CAUSAL, 3, SUMS, ROUNDS, WIDTH, FEATURES, VALUES, WIDE, N, PRECISION,
        )  # fmt: skip
    for_k, for_v = _span_kv(
        b, c, at, for_k, for_v, near, beyond, q, do, lse, delta, table, of_sums, codes, starts, ends, q_time, g_time,
        time, columns, far, scale, CAUSAL, KIND, SUMS, ROUNDS, WIDTH, FEATURES, VALUES, WIDE, N, PRECISION,
    )  # fmt: skip
    if KIND:
        for_k, for_v = _span_kv(
            b, c, at, for_k, for_v, beyond, last, q, do, lse, delta, table, of_sums, codes, starts, ends, q_time,
            g_time, time, columns, far, scale, CAUSAL, 2, SUMS, ROUNDS, WIDTH, FEATURES, VALUES, WIDE, N, PRECISION,
        )  # fmt: skip
    _store_rows(dk + row * dk_row + head * dk_head, for_k * factor, at, inside, dk_time, WIDTH, FEATURES, False)
    _store_rows(dv + row * dv_row + head * dv_head, for_v, at, inside, dv_time, VALUES, WIDE, False)
