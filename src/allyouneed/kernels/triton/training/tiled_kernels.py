"""The Triton functions of tiled_attention.py, which explains them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MARGIN = tl.constexpr(128)  # at least the tokens of a tile


@triton.jit
def _load_rows(x, at, inside, stride, WIDTH: tl.constexpr, FEATURES: tl.constexpr):
    """(len(at), FEATURES)"""
    f = tl.arange(0, FEATURES)
    keep = inside[:, None] & (f < WIDTH)[None, :]
    return tl.load(x + at[:, None].to(tl.int64) * stride + f[None, :], mask=keep, other=0.0)


@triton.jit
def _store_rows(x, value, at, inside, stride, WIDTH: tl.constexpr, FEATURES: tl.constexpr, MORE: tl.constexpr):
    """MORE: add to what is there."""
    f = tl.arange(0, FEATURES)
    keep = inside[:, None] & (f < WIDTH)[None, :]
    there = x + at[:, None].to(tl.int64) * stride + f[None, :]
    if MORE:
        value += tl.load(there, mask=keep, other=0.0).to(tl.float32)
    tl.store(there, value.to(x.dtype.element_ty), mask=keep)


@triton.jit
def _slots(order, start, time, SORTED: tl.constexpr, COUNT: tl.constexpr):
    """Slots from `start` on, their tokens, and which of them exist."""
    slot = start + tl.arange(0, COUNT)
    inside = slot < time
    at = slot
    if SORTED:
        at = tl.load(order + slot, mask=inside, other=0)
    return slot, at, inside


@triton.jit
def _adjust(
    scores, q, k, first_q, first_k, bias, segments, tile, time,
    MASKED: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Scores (base 2) plus the bias, -inf where masked. q and k: slots, which broadcast to the scores. BIAS: 1 by pair,
    2 that of the first pair for all."""
    if BIAS == 1:
        scores += tl.load(bias + (q - k + (time - 1 + MARGIN))).to(tl.float32)
    if BIAS == 2:
        scores += tl.load(bias + (first_q - first_k + (time - 1 + MARGIN))).to(tl.float32)
    if MASKED:
        if TILES:
            scores = tl.where(tl.load(tile + q % TABLE * TABLE + k % TABLE) != 0, scores, float("-inf"))
        else:
            scores = tl.where(k < time, scores, float("-inf"))
            if CAUSAL:
                scores = tl.where(k <= q, scores, float("-inf"))
            if SEGMENTS > 0:
                there = tl.load(segments + k, mask=k < time, other=0)
                scores = tl.where(there > 0, scores, float("-inf"))
                if SEGMENTS > 1:
                    here = tl.load(segments + q, mask=q < time, other=0)
                    scores = tl.where(here == there, scores, float("-inf"))
    return scores


@triton.jit
def _attend(
    a, slot, begin, top, total, out, first, last, k, v, bias, segments, order, entries, tiles, masks, k_time, v_time,
    time, scale,
    MASKED: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    TABLE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the entries first … last − 1 of a query block."""
    each: tl.constexpr = TABLE // N
    for step in range(first * each, last * each):
        entry = step // each
        start = tl.load(entries + entry) * TABLE + step % each * N
        k_slot, at, inside = _slots(order, start, time, SORTED, N)
        tile = masks
        if MASKED and TILES:
            tile += tl.load(tiles + entry).to(tl.int64) * (TABLE * TABLE)
        b = _load_rows(k, at, inside, k_time, WIDTH, FEATURES)
        c = _load_rows(v, at, inside, v_time, VALUES, WIDE)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        scores = _adjust(
            scores, slot[:, None], k_slot[None, :], begin, start, bias, segments, tile, time,
            MASKED, TILES, CAUSAL, SEGMENTS, BIAS, TABLE,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        weights, fade = tl.exp2(scores - safe[:, None]), tl.exp2(top - safe)
        total = total * fade + tl.sum(weights, 1)
        out = tl.dot(weights.to(c.dtype), c, out * fade[:, None], input_precision=PRECISION)
        top = higher
    return top, total, out


@triton.jit
def _ends(counts, entries, block, row, blocks, many, ROWS: tl.constexpr, BIAS: tl.constexpr):
    """Where the entries of a block that are far away, unmasked, and masked begin and end; and the first entry."""
    if ROWS > 1:
        block += row * blocks
    far, full = tl.load(counts + block), tl.load(counts + ROWS * blocks + block)
    some = tl.load(counts + 2 * ROWS * blocks + block)
    far = far if BIAS else 0
    return (0, far, full, some), entries + block.to(tl.int64) * many


@triton.jit
def outputs(
    q, k, v, bias, segments, order, counts, entries, masks, out, lse,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time,
    heads, time, blocks, many, apart, scale,
    ROWS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, TABLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`blocks`: query blocks of a row, `many`: entries of each, `apart`: from an index to its mask. ROWS: of the
    tables, 1 if all rows share them."""
    starts = blocks * (TABLE // M)
    line, start = (tl.program_id(0) // starts).to(tl.int64), (starts - 1 - tl.program_id(0) % starts) * M
    row, head = line // heads, line % heads
    ends, entries = _ends(counts, entries, start // TABLE, row, blocks, many, ROWS, BIAS)
    tiles = entries + apart
    segments += row * time
    bias += head * (2 * time - 1 + 2 * MARGIN)
    k += row * k_row + head // GROUP * k_head
    v += row * v_row + head // GROUP * v_head
    out += row * o_row + head * o_head
    slot, at, inside = _slots(order, start, time, SORTED, M)
    a = _load_rows(q + row * q_row + head * q_head, at, inside, q_time, WIDTH, FEATURES)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    found = tl.zeros((M, WIDE), tl.float32)
    if MORE:
        top = tl.load(lse + line * time + at, mask=inside, other=float("-inf"))
        total = tl.where(top > float("-inf"), 1.0, 0.0)
        found = _load_rows(out, at, inside, o_time, VALUES, WIDE).to(tl.float32)
    for part in tl.static_range(0 if BIAS else 1, 3):
        top, total, found = _attend(
            a, slot, start, top, total, found, ends[part], ends[part + 1], k, v, bias, segments, order, entries, tiles,
            masks, k_time, v_time, time, scale, part == 2, TILES, CAUSAL, SEGMENTS, BIAS if part else 2, SORTED, WIDTH,
            FEATURES, VALUES, WIDE, TABLE, N, PRECISION,
        )  # fmt: skip
    there = total > 0
    whole = tl.where(there, total, 1.0)
    _store_rows(out, found / whole[:, None], at, inside, o_time, VALUES, WIDE, False)
    tl.store(lse + line * time + at, tl.where(there, top + tl.log2(whole), float("-inf")), mask=inside)


@triton.jit
def deltas(
    out, do, delta, o_row, o_head, o_time, g_row, g_head, g_time, heads, time,
    VALUES: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """out · do of each token and head."""
    starts = tl.cdiv(time, M)
    line, start = (tl.program_id(0) // starts).to(tl.int64), tl.program_id(0) % starts * M
    row, head = line // heads, line % heads
    at = start + tl.arange(0, M)
    inside = at < time
    a = _load_rows(out + row * o_row + head * o_head, at, inside, o_time, VALUES, WIDE).to(tl.float32)
    b = _load_rows(do + row * g_row + head * g_head, at, inside, g_time, VALUES, WIDE).to(tl.float32)
    tl.store(delta + line * time + at, tl.sum(a * b, 1), mask=inside)


@triton.jit
def _load_sums(lse, delta, at, inside):
    """Log-sum-exp, infinite for queries without keys so that their weights are 0, and delta."""
    low = tl.load(lse + at, mask=inside, other=float("inf"))
    return tl.where(low > float("-inf"), low, float("inf")), tl.load(delta + at, mask=inside, other=0.0)


@triton.jit
def _span_q(
    a, g, low, mean, slot, begin, dq, behind, ahead, first, last, k, v, bias, segments, order, entries, tiles, masks,
    k_time, v_time, time, near, scale,
    MASKED: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    TABLE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries; `behind` and `ahead`: score gradients of blocks that are `near` blocks away or more,
    whose keys are behind or ahead of the queries."""
    each: tl.constexpr = TABLE // N
    for step in range(first * each, last * each):
        entry = step // each
        start = tl.load(entries + entry) * TABLE + step % each * N
        k_slot, at, inside = _slots(order, start, time, SORTED, N)
        tile = masks
        if MASKED and TILES:
            tile += tl.load(tiles + entry).to(tl.int64) * (TABLE * TABLE)
        b = _load_rows(k, at, inside, k_time, WIDTH, FEATURES)
        c = _load_rows(v, at, inside, v_time, VALUES, WIDE)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
        scores = _adjust(
            scores, slot[:, None], k_slot[None, :], begin, start, bias, segments, tile, time,
            MASKED, TILES, CAUSAL, SEGMENTS, BIAS, TABLE,
        )  # fmt: skip
        grad = tl.exp2(scores - low[:, None]) * (tl.dot(g, tl.trans(c), input_precision=PRECISION) - mean[:, None])
        if BIAS > 0:  # noqa: SIM102  # near full blocks have none
            if MASKED or BIAS == 2:
                sums = tl.sum(grad, 1)
                away = begin // TABLE - start // TABLE
                behind += tl.where(away >= near, sums, 0.0)
                ahead += tl.where(-away >= near, sums, 0.0)
        dq = tl.dot(grad.to(b.dtype), b, dq, input_precision=PRECISION)
    return dq, behind, ahead


@triton.jit
def grad_q(
    q, k, v, bias, segments, order, counts, entries, masks, do, lse, delta, dq, rests,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, g_row, g_head, g_time,
    dq_row, dq_head, dq_time, lines, heads, time, blocks, many, apart, near, scale, factor,
    ROWS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, TABLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    starts = blocks * (TABLE // M)
    line, start = (tl.program_id(0) // starts).to(tl.int64), (starts - 1 - tl.program_id(0) % starts) * M
    row, head = line // heads, line % heads
    ends, entries = _ends(counts, entries, start // TABLE, row, blocks, many, ROWS, BIAS)
    tiles = entries + apart
    segments += row * time
    bias += head * (2 * time - 1 + 2 * MARGIN)
    k += row * k_row + head // GROUP * k_head
    v += row * v_row + head // GROUP * v_head
    slot, at, inside = _slots(order, start, time, SORTED, M)
    a = _load_rows(q + row * q_row + head * q_head, at, inside, q_time, WIDTH, FEATURES)
    g = _load_rows(do + row * g_row + head * g_head, at, inside, g_time, VALUES, WIDE)
    low, mean = _load_sums(lse + line * time, delta + line * time, at, inside)
    found = tl.zeros((M, FEATURES), tl.float32)
    behind, ahead = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    for part in tl.static_range(0 if BIAS else 1, 3):
        found, behind, ahead = _span_q(
            a, g, low, mean, slot, start, found, behind, ahead, ends[part], ends[part + 1], k, v, bias, segments, order,
            entries, tiles, masks, k_time, v_time, time, near, scale, part == 2, TILES, CAUSAL, SEGMENTS,
            BIAS if part else 2, SORTED, WIDTH, FEATURES, VALUES, WIDE, TABLE, N, PRECISION,
        )  # fmt: skip
    _store_rows(dq + row * dq_row + head * dq_head, found * factor, at, inside, dq_time, WIDTH, FEATURES, MORE)
    if BIAS:
        place = line * starts + start // M
        tl.store(rests + place, tl.sum(behind, 0))
        tl.store(rests + lines * starts + place, tl.sum(ahead, 0))


@triton.jit
def _span_kv(
    b, c, slot, begin, dk, dv, first, last, q, do, lse, delta, bias, segments, order, entries, tiles, masks, q_time,
    g_time, time, scale,
    MASKED: tl.constexpr, TILES: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
    TABLE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Transposed: keys are rows."""
    each: tl.constexpr = TABLE // N
    for step in range(first * each, last * each):
        entry = step // each
        start = tl.load(entries + entry) * TABLE + step % each * N
        q_slot, at, inside = _slots(order, start, time, SORTED, N)
        tile = masks
        if MASKED and TILES:
            tile += tl.load(tiles + entry).to(tl.int64) * (TABLE * TABLE)
        a = _load_rows(q, at, inside, q_time, WIDTH, FEATURES)
        g = _load_rows(do, at, inside, g_time, VALUES, WIDE)
        low, mean = _load_sums(lse, delta, at, inside)
        scores = tl.dot(b, tl.trans(a), input_precision=PRECISION) * scale
        scores = _adjust(
            scores, q_slot[None, :], slot[:, None], start, begin, bias, segments, tile, time,
            MASKED, TILES, CAUSAL, SEGMENTS, BIAS, TABLE,
        )  # fmt: skip
        weights = tl.exp2(scores - low[None, :])
        dv = tl.dot(weights.to(g.dtype), g, dv, input_precision=PRECISION)
        grad = weights * (tl.dot(c, tl.trans(g), input_precision=PRECISION) - mean[None, :])
        dk = tl.dot(grad.to(a.dtype), a, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def grad_kv(
    q, k, v, bias, segments, order, counts, entries, masks, do, lse, delta, dk, dv,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, g_row, g_head, g_time,
    dk_row, dk_head, dk_time, dv_row, dv_head, dv_time, heads, time, blocks, many, apart, scale, factor,
    ROWS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, TABLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, MORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`heads`, `blocks`: of the keys; the tables are those of the key blocks."""
    starts = blocks * (TABLE // M)
    line, start = (tl.program_id(0) // starts).to(tl.int64), tl.program_id(0) % starts * M
    row, kv = line // heads, line % heads
    ends, entries = _ends(counts, entries, start // TABLE, row, blocks, many, ROWS, BIAS)
    tiles = entries + apart
    segments += row * time
    slot, at, inside = _slots(order, start, time, SORTED, M)
    b = _load_rows(k + row * k_row + kv * k_head, at, inside, k_time, WIDTH, FEATURES)
    c = _load_rows(v + row * v_row + kv * v_head, at, inside, v_time, VALUES, WIDE)
    for_k, for_v = tl.zeros((M, FEATURES), tl.float32), tl.zeros((M, WIDE), tl.float32)
    for member in range(GROUP):
        head = kv * GROUP + member
        sums = (row * heads * GROUP + head) * time
        mine, theirs = q + row * q_row + head * q_head, do + row * g_row + head * g_head
        table = bias + head * (2 * time - 1 + 2 * MARGIN)
        for part in tl.static_range(0 if BIAS else 1, 3):
            for_k, for_v = _span_kv(
                b, c, slot, start, for_k, for_v, ends[part], ends[part + 1], mine, theirs, lse + sums, delta + sums,
                table, segments, order, entries, tiles, masks, q_time, g_time, time, scale, part == 2, TILES, CAUSAL,
                SEGMENTS, BIAS if part else 2, SORTED, WIDTH, FEATURES, VALUES, WIDE, TABLE, N, PRECISION,
            )  # fmt: skip
    _store_rows(dk + row * dk_row + kv * dk_head, for_k * factor, at, inside, dk_time, WIDTH, FEATURES, MORE)
    _store_rows(dv + row * dv_row + kv * dv_head, for_v, at, inside, dv_time, VALUES, WIDE, MORE)


@triton.jit
def grad_bias(
    q, k, v, bias, segments, do, lse, delta, d_tiles,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, g_row, g_head, g_time,
    rows, heads, time, blocks, diagonals, ahead, near, scale,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, TABLE: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The score gradients (M, M) of all tiles at one distance from the main diagonal, added up: of those in blocks that
    are less than `near` blocks apart. `ahead`: diagonals above the main one."""
    split, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    head, diagonal = (place // diagonals).to(tl.int64), place % diagonals
    behind = diagonal - ahead  # tiles that the keys are behind the queries
    count = blocks - tl.abs(behind)
    mine = (rows - split + SPLITS - 1) // SPLITS
    table = bias + head * (2 * time - 1 + 2 * MARGIN)
    steps = tl.arange(0, M)
    apart = behind * M + steps[:, None] - steps[None, :]
    biases = tl.load(table + (apart + (time - 1 + MARGIN))).to(tl.float32)
    total = tl.zeros((M, M), tl.float32)
    for step in range(count * mine):
        row = (split + step // count * SPLITS).to(tl.int64)
        i = tl.maximum(behind, 0) + step % count
        q_slot, k_slot = i * M + steps, (i - behind) * M + steps
        q_in, k_in = q_slot < time, k_slot < time
        a = _load_rows(q + row * q_row + head * q_head, q_slot, q_in, q_time, WIDTH, FEATURES)
        b = _load_rows(k + row * k_row + head // GROUP * k_head, k_slot, k_in, k_time, WIDTH, FEATURES)
        c = _load_rows(v + row * v_row + head // GROUP * v_head, k_slot, k_in, v_time, VALUES, WIDE)
        g = _load_rows(do + row * g_row + head * g_head, q_slot, q_in, g_time, VALUES, WIDE)
        sums = (row * heads + head) * time
        low, mean = _load_sums(lse + sums, delta + sums, q_slot, q_in)
        scores = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale + biases
        scores = _adjust(
            scores, q_slot[:, None], k_slot[None, :], 0, 0, table, segments + row * time, segments, time,
            True, False, CAUSAL, SEGMENTS, 0, M,
        )  # fmt: skip
        grad = tl.exp2(scores - low[:, None]) * (tl.dot(g, tl.trans(c), input_precision=PRECISION) - mean[:, None])
        total += tl.where(tl.abs(i * M // TABLE - (i - behind) * M // TABLE) < near, grad, 0.0)
    there = d_tiles + (split * heads + head).to(tl.int64) * diagonals * (M * M) + diagonal.to(tl.int64) * (M * M)
    tl.store(there + steps[:, None] * M + steps[None, :], total)
