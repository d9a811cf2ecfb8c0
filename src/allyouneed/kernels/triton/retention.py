"""Retention on GPUs, forward and backward; the definition is in `nn/ops/retention.py`.

A line (one head of one row) is cut into chunks, and consecutive chunks form a segment. `_walk` computes S before every
chunk relative to its segment, `_join` scans over segments; then all chunks run in parallel. Backward runs the same walk
from the end, with queries and output gradients in place of keys and values:

    dS_{c−1} = e^{end_c} dS_c + Σ_t e^{since_t} q_tᵀ do_t

Only inputs are saved for backward; S is recomputed. Accumulation is fp32, matmuls use the input dtype.

PACKED rows: `starts` (batch, time) is the index at which the sentence of each token begins. A token neither sees what
lies before it in the chunk, nor S if the sentence began inside the chunk; S passes only what the last sentence adds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton import TEXT_SIZES

RetentionState = tuple[Tensor, Tensor]
SIDE = 64  # tokens per chunk; keys and values per tile of S
PROGRAMS = 512  # programs per walk, to occupy the GPU
FEWEST = 4  # minimum chunks per segment
WARPS = 4  # per program


@triton.jit
def _decay(log, starts, chunk, time, STEADY: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Log decay from before the chunk to each token, and through the chunk; decay from before it to each token, and
    from each to its end. If PACKED, also where the sentence of each token, and of the last one, begins in the chunk:
    negative before it."""
    at = tl.arange(0, CHUNK)
    left = time - chunk * CHUNK
    if STEADY:
        step = tl.load(log)
        since = step * tl.minimum(at + 1, left).to(tl.float32)
        end = step * tl.minimum(left, CHUNK).to(tl.float32)
    else:
        steps = tl.load(log + chunk * CHUNK + at, mask=at < left, other=0.0)
        since, end = tl.cumsum(steps, 0), tl.sum(steps, 0)
    enter, leave = tl.exp(since), tl.exp(end - since)
    begin, last = at, left
    if PACKED:
        here = starts + chunk * CHUNK
        begin = tl.load(here + at, mask=at < left, other=0) - chunk * CHUNK
        last = tl.load(here + tl.minimum(left, CHUNK) - 1) - chunk * CHUNK
        enter = tl.where(begin < 0, enter, 0.0)
        leave = tl.where(at >= last, leave, 0.0)
        end = tl.where(last < 0, end, float("-inf"))
    return since, end, enter, leave, begin, last


@triton.jit
def _load_tile(x, start, time, stride, first, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """A tile of tokens and features: (CHUNK, TILE)."""
    at, feature = start + tl.arange(0, CHUNK), first + tl.arange(0, TILE)
    inside = (at < time)[:, None] & (feature < WIDTH)[None, :]
    return tl.load(x + at[:, None].to(tl.int64) * stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(x, value, start, time, stride, first, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr):
    at, feature = start + tl.arange(0, CHUNK), first + tl.arange(0, TILE)
    inside = (at < time)[:, None] & (feature < WIDTH)[None, :]
    tl.store(x + at[:, None].to(tl.int64) * stride + feature[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _state(near, far, fade, i, j, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of S before a chunk (or of its gradient after it): from its segment plus the earlier ones."""
    key, value = i + tl.arange(0, ROWS), j + tl.arange(0, COLUMNS)
    inside = (key < K)[:, None] & (value < V)[None, :]
    at = key[:, None] * V + value[None, :]
    own = tl.load(near + at, mask=inside, other=0.0).to(tl.float32)
    return own + fade * tl.load(far + at, mask=inside, other=0.0)


@triton.jit
def _past(begin, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """(CHUNK, CHUNK): pairs of a token and one that it sees."""
    at = tl.arange(0, CHUNK)
    past = at[:, None] >= at[None, :]
    if PACKED:
        past = past & (at[None, :] >= begin[:, None])
    return past


@triton.jit
def _decay_matrix(since, begin, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """(CHUNK, CHUNK) decay between tokens; future pairs are masked before exp overflows."""
    past = _past(begin, PACKED, CHUNK)
    return tl.where(past, tl.exp(tl.where(past, since[:, None] - since[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _walk(
    x, y, log, starts, near, rows, fades, totals, wholes,
    x_row, x_head, x_time, y_row, y_head, y_time, log_row, log_head, heads, time, chunks, share, segments,
    K: tl.constexpr, V: tl.constexpr, EACH: tl.constexpr, STEADY: tl.constexpr, PACKED: tl.constexpr,
    BACK: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """EACH: state elements per line, K V or, with z, K V + K."""
    wide: tl.constexpr = (V + VALUES - 1) // VALUES
    tiles: tl.constexpr = (K + KEYS - 1) // KEYS * wide
    tile, line = tl.program_id(0) % tiles, (tl.program_id(0) // tiles // segments).to(tl.int64)
    segment = tl.program_id(0) // tiles % segments
    i, j = tile // wide * KEYS, tile % wide * VALUES
    row, head = line // heads, line % heads
    x += row * x_row + head * x_head
    y += row * y_row + head * y_head
    log += row * log_row + head * log_head
    starts += row * time
    key, value = i + tl.arange(0, KEYS), j + tl.arange(0, VALUES)
    inside = (key < K)[:, None] & (value < V)[None, :]
    s, z, fade = tl.zeros((KEYS, VALUES), tl.float32), tl.zeros((KEYS,), tl.float32), 0.0
    count = tl.minimum(share, chunks - segment * share)
    for step in range(count):
        chunk = segment * share + (count - 1 - step if BACK else step)
        here = line * chunks + chunk
        tl.store(near + here * (K * V) + key[:, None] * V + value[None, :], s.to(near.dtype.element_ty), mask=inside)
        _, end, enter, leave, _, _ = _decay(log, starts, chunk, time, STEADY, PACKED, CHUNK)
        a = _load_tile(x, chunk * CHUNK, time, x_time, i, K, CHUNK, KEYS)
        b = _load_tile(y, chunk * CHUNK, time, y_time, j, V, CHUNK, VALUES)
        left = enter if BACK else leave
        a = (a * left[:, None]).to(a.dtype)
        if j == 0:
            tl.store(fades + here, tl.exp(fade), mask=i == 0)
            if EACH > K * V:
                tl.store(rows + here * K + key, z, mask=key < K)
                z = z * tl.exp(end) + tl.sum(a.to(tl.float32), 0)
        s = tl.dot(tl.trans(a), b, s * tl.exp(end), input_precision=PRECISION)
        fade += end
    there = line * segments + segment
    tl.store(totals + there * EACH + key[:, None] * V + value[None, :], s, mask=inside)
    if j == 0:
        tl.store(wholes + there, tl.exp(fade), mask=i == 0)
        if EACH > K * V:
            tl.store(totals + there * EACH + K * V + key, z, mask=key < K)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _join(totals, wholes, ends, segments, EACH: tl.constexpr, BACK: tl.constexpr, MANY: tl.constexpr):
    """In place: from the contribution of each segment to the state before it; `ends` holds the initial, then the final
    state."""
    parts: tl.constexpr = (EACH + MANY - 1) // MANY
    line = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * MANY + tl.arange(0, MANY)
    sums = tl.load(ends + line * EACH + at, mask=at < EACH, other=0.0)
    for step in range(segments):
        here = line * segments + (segments - 1 - step if BACK else step)
        more = tl.load(totals + here * EACH + at, mask=at < EACH, other=0.0)
        tl.store(totals + here * EACH + at, sums, mask=at < EACH)
        sums = sums * tl.load(wholes + here) + more
    tl.store(ends + line * EACH + at, sums, mask=at < EACH)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _outputs(
    q, k, v, log, starts, near, rows, fades, far, o, r,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time, log_row, log_head,
    heads, time, chunks, share, segments,
    K: tl.constexpr, V: tl.constexpr, EACH: tl.constexpr, STEADY: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + VALUES - 1) // VALUES
    j, place = tl.program_id(0) % tiles * VALUES, (tl.program_id(0) // tiles).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    o += row * o_row + head * o_head
    near += place * (K * V)
    far += (line * segments + chunk // share) * EACH
    fade = tl.load(fades + place)
    scores, out = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, VALUES), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for i in range(0, K, KEYS):
        a = _load_tile(q, start, time, q_time, i, K, CHUNK, KEYS)
        b = _load_tile(k, start, time, k_time, i, K, CHUNK, KEYS)
        s = _state(near, far, fade, i, j, K, V, KEYS, VALUES)
        scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
        out = tl.dot(a, s.to(a.dtype), out, input_precision=PRECISION)
        if j == 0:
            key = i + tl.arange(0, KEYS)
            z = tl.load(rows + place * K + key, mask=key < K, other=0.0)
            z += fade * tl.load(far + K * V + key, mask=key < K, other=0.0)
            total += tl.sum(a.to(tl.float32) * z[None, :], 1)
    log, starts = log + row * log_row + head * log_head, starts + row * time
    since, _, left, _, begin, _ = _decay(log, starts, chunk, time, STEADY, PACKED, CHUNK)
    scores *= _decay_matrix(since, begin, PACKED, CHUNK)
    c = _load_tile(v, start, time, v_time, j, V, CHUNK, VALUES)
    out = tl.dot(scores.to(c.dtype), c, out * left[:, None], input_precision=PRECISION)
    _store_tile(o, out, start, time, o_time, j, V, CHUNK, VALUES)
    if j == 0:
        at = start + tl.arange(0, CHUNK)
        tl.store(r + line * time + at, tl.sum(scores, 1) + left * total, mask=at < time)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _grad_qk(
    q, k, v, log, starts, near, fades, far, d_near, d_fades, d_far, do, dq, dk, d_log,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time, log_row, log_head,
    dq_row, dq_head, dq_time, dk_row, dk_head, dk_time, lines, heads, time, chunks, share, segments,
    K: tl.constexpr, V: tl.constexpr, STEADY: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and, unless the decay is constant, log: the cumulative log decay at t gets q_t·dq_t − k_t·dk_t,
    the total of the chunk the product of S after it with its gradient."""
    tiles: tl.constexpr = (K + KEYS - 1) // KEYS
    tile, place = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i, line, chunk = tile * KEYS, place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    v += row * v_row + head * v_head
    do += row * o_row + head * o_head
    there = (line * segments + chunk // share) * (K * V)
    fade, d_fade = tl.load(fades + place), tl.load(d_fades + place)
    log, starts = log + row * log_row + head * log_head, starts + row * time
    since, end, enter, leave, begin, last = _decay(log, starts, chunk, time, STEADY, PACKED, CHUNK)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for_q, for_k = tl.zeros((CHUNK, KEYS), tl.float32), tl.zeros((CHUNK, KEYS), tl.float32)
    carried = 0.0
    for j in range(0, V, VALUES):
        g = _load_tile(do, start, time, o_time, j, V, CHUNK, VALUES)
        c = _load_tile(v, start, time, v_time, j, V, CHUNK, VALUES)
        s = _state(near + place * (K * V), far + there, fade, i, j, K, V, KEYS, VALUES)
        d_s = _state(d_near + place * (K * V), d_far + there, d_fade, i, j, K, V, KEYS, VALUES)
        if not STEADY:
            carried += tl.sum(s * d_s)
        scores = tl.dot(g, tl.trans(c), scores, input_precision=PRECISION)
        for_q = tl.dot(g, tl.trans(s.to(g.dtype)), for_q, input_precision=PRECISION)
        for_k = tl.dot(c, tl.trans(d_s.to(c.dtype)), for_k, input_precision=PRECISION)
    a = _load_tile(q + row * q_row + head * q_head, start, time, q_time, i, K, CHUNK, KEYS)
    b = _load_tile(k + row * k_row + head * k_head, start, time, k_time, i, K, CHUNK, KEYS)
    for_q *= enter[:, None]
    for_k *= leave[:, None]
    if not STEADY:
        carried = carried * tl.exp(end) + tl.sum(b.to(tl.float32) * for_k)
    faded = (scores * _decay_matrix(since, begin, PACKED, CHUNK)).to(a.dtype)
    for_q = tl.dot(faded, b, for_q, input_precision=PRECISION)
    for_k = tl.dot(tl.trans(faded), a, for_k, input_precision=PRECISION)
    _store_tile(dq + row * dq_row + head * dq_head, for_q, start, time, dq_time, i, K, CHUNK, KEYS)
    _store_tile(dk + row * dk_row + head * dk_head, for_k, start, time, dk_time, i, K, CHUNK, KEYS)
    if not STEADY:
        each = tl.sum(a.to(tl.float32) * for_q - b.to(tl.float32) * for_k, 1)
        at = tl.arange(0, CHUNK)
        if PACKED:
            later = tl.sum(tl.where(_past(begin, PACKED, CHUNK), each[:, None], 0.0), 0)
            later += tl.where(at >= last, carried, 0.0)
        else:
            later = tl.sum(each, 0) - tl.cumsum(each, 0) + each + carried
        tl.store(d_log + (tile * lines + line) * time + start + at, later, mask=start + at < time)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _grad_v(
    q, k, log, starts, d_near, d_fades, d_far, do, dv,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, o_row, o_head, o_time, log_row, log_head,
    heads, time, chunks, share, segments,
    K: tl.constexpr, V: tl.constexpr, STEADY: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (V + VALUES - 1) // VALUES
    j, place = tl.program_id(0) % tiles * VALUES, (tl.program_id(0) // tiles).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    q += row * q_row + head * q_head
    k += row * k_row + head * k_head
    there = (line * segments + chunk // share) * (K * V)
    d_fade = tl.load(d_fades + place)
    log, starts = log + row * log_row + head * log_head, starts + row * time
    since, _, _, leave, begin, _ = _decay(log, starts, chunk, time, STEADY, PACKED, CHUNK)
    scores, for_v = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, VALUES), tl.float32)
    for i in range(0, K, KEYS):
        a = _load_tile(q, start, time, q_time, i, K, CHUNK, KEYS)
        b = _load_tile(k, start, time, k_time, i, K, CHUNK, KEYS)
        d_s = _state(d_near + place * (K * V), d_far + there, d_fade, i, j, K, V, KEYS, VALUES)
        scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
        for_v = tl.dot(b, d_s.to(b.dtype), for_v, input_precision=PRECISION)
    g = _load_tile(do + row * o_row + head * o_head, start, time, o_time, j, V, CHUNK, VALUES)
    faded = tl.trans((scores * _decay_matrix(since, begin, PACKED, CHUNK)).to(g.dtype))
    for_v = tl.dot(faded, g, for_v * leave[:, None], input_precision=PRECISION)
    _store_tile(dv + row * v_row + head * v_head, for_v, start, time, v_time, j, V, CHUNK, VALUES)


class _Plan(NamedTuple):
    """Tiling of a line, shared by the kernels."""

    chunks: int
    share: int  # chunks per segment
    segments: int
    chunk: int
    keys: int
    values: int
    precision: str

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> _Plan:
        batch, heads, time, width = q.shape
        most = SIDE * 2 // v.itemsize  # fp32 tiles are half as wide, to fit in shared memory
        chunk = most  # also of shorter texts: no kernel is compiled for a length
        keys, values = (min(most, max(16, triton.next_power_of_2(x))) for x in (width, v.shape[-1]))
        chunks = triton.cdiv(time, chunk)
        walks = max(1, batch * heads) * triton.cdiv(width, keys) * triton.cdiv(v.shape[-1], values)
        share = triton.cdiv(chunks, min(triton.cdiv(PROGRAMS, walks), triton.cdiv(chunks, FEWEST)))
        # follow torch's matmul precision setting
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        return cls(chunks, share, triton.cdiv(chunks, share), chunk, keys, values, precision)

    @property
    def tiles(self) -> tuple[int, int, int, str]:
        return self.chunk, self.keys, self.values, self.precision


def _states(
    x: Tensor, y: Tensor, log: Tensor, starts: Tensor | None, ends: Tensor, plan: _Plan, steady: bool, back: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S (or its gradient) at each chunk in two terms, and z: near, z, fades, far. `ends` goes from initial to final."""
    (batch, heads, time, width), values, each = x.shape, y.shape[-1], ends.shape[-1]
    lines, many = batch * heads, 128

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(lines, *shape, dtype=dtype, device=x.device)

    near, rows = empty(plan.chunks, width, values, dtype=x.dtype), empty(plan.chunks, width)
    fades, far, wholes = empty(plan.chunks), empty(plan.segments, each), empty(plan.segments)
    grid = (lines * plan.segments * triton.cdiv(width, plan.keys) * triton.cdiv(values, plan.values),)
    _walk[grid](
        x, y, log, _or(starts, log), near, rows, fades, far, wholes, *x.stride()[:3], *y.stride()[:3],
        *log.stride()[:2], heads, time, *plan[:3], width, values, each, steady, starts is not None, back, *plan.tiles,
        num_warps=WARPS, num_stages=3,
    )  # fmt: skip
    grid = (lines * triton.cdiv(each, many),)
    _join[grid](far, wholes, ends, plan.segments, each, back, many, num_warps=1)
    return near, rows, fades, far


@torch.library.custom_op("allyouneed::retention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, before: Tensor, starts: Tensor | None, steady: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o, r, and the states after the last token. States (batch, heads, K · V + K) are S and z, flat."""
    (batch, heads, time, width), values, plan = q.shape, v.shape[-1], _Plan.of(q, v)
    ends = before.clone()
    near, rows, fades, far = _states(k, v, log, starts, ends, plan, steady, False)
    o, r = _empty_outputs(q, v)
    _outputs[(batch * heads * plan.chunks * triton.cdiv(values, plan.values),)](
        q, k, v, log, _or(starts, log), near, rows, fades, far, o, r,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *log.stride()[:2],
        heads, time, *plan[:3], width, values, ends.shape[-1], steady, starts is not None, *plan.tiles,
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return o, r, ends


_forward.register_fake(lambda q, k, v, log, before, *rest: (*_empty_outputs(q, v), torch.empty_like(before)))


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, time, _ = q.shape
    return v.new_empty(batch, time, heads, v.shape[-1]).transpose(1, 2), v.new_empty(
        batch, heads, time, dtype=torch.float32
    )


@torch.library.custom_op("allyouneed::retention_backward", mutates_args=())
def _backward(
    do: Tensor, d_after: Tensor, q: Tensor, k: Tensor, v: Tensor, log: Tensor, before: Tensor, starts: Tensor | None,
    steady: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log (in parts that are to be added up; none if steady) and of S before, flat."""
    (batch, heads, time, width), values, plan = q.shape, v.shape[-1], _Plan.of(q, v)
    do, size = _contiguous_features(do), width * values
    ends, d_ends = before[..., :size].contiguous(), d_after[..., :size].clone(memory_format=torch.contiguous_format)
    near, _, fades, far = _states(k, v, log, starts, ends, plan, steady, False)
    d_near, _, d_fades, d_far = _states(q, do, log, starts, d_ends, plan, steady, True)
    begins, packed = _or(starts, log), starts is not None
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))  # with the strides of the inputs
    lines, tiles = batch * heads, triton.cdiv(width, plan.keys)
    d_log = torch.empty(0 if steady else tiles, batch, heads, time, device=q.device)
    _grad_qk[(lines * plan.chunks * tiles,)](
        q, k, v, log, begins, near, fades, far, d_near, d_fades, d_far, do, dq, dk, d_log,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *log.stride()[:2],
        *dq.stride()[:3], *dk.stride()[:3], lines, heads, time, *plan[:3], width, values, steady, packed, *plan.tiles,
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    _grad_v[(lines * plan.chunks * triton.cdiv(values, plan.values),)](
        q, k, log, begins, d_near, d_fades, d_far, do, dv,
        *q.stride()[:3], *k.stride()[:3], *dv.stride()[:3], *do.stride()[:3], *log.stride()[:2],
        heads, time, *plan[:3], width, values, steady, packed, *plan.tiles, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv, d_log, d_ends


@_backward.register_fake
def _(
    do: Tensor, d_after: Tensor, q: Tensor, k: Tensor, v: Tensor, log: Tensor, before: Tensor, starts: Any, steady: bool
) -> tuple[Tensor, ...]:
    tiles, (batch, heads, time, width) = 0 if steady else triton.cdiv(q.shape[-1], _Plan.of(q, v).keys), q.shape
    d_log = q.new_empty(tiles, batch, heads, time, dtype=torch.float32)
    d_ends = before.new_empty(batch, heads, width * v.shape[-1])
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_log, d_ends


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.steady = inputs[6]


def _gradients(ctx: Any, do: Tensor, _: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
    *given, before, starts = ctx.saved_tensors
    dq, dk, dv, d_log, d_s = _backward(do, d_after, *given, before, starts, ctx.steady)
    d_before = torch.cat((d_s, torch.zeros_like(before[..., d_s.shape[-1] :])), -1)
    return dq, dk, dv, None if ctx.steady else d_log.sum(0), d_before, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _or(starts: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel needs some pointer also where rows are not packed."""
    return unused if starts is None else starts


def _contiguous_features(x: Tensor) -> Tensor:
    """Contiguous features, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def retention(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, sums: RetentionState | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor, RetentionState]:
    """o and r as in `chunkwise`, and the final state. r and z carry no gradient."""
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else v.dtype
    q, k, v = (_contiguous_features(x.to(cast)) for x in (q, k, v))
    batch, heads, time, _ = q.shape
    steady = log.shape[-1] == 1 and not log.requires_grad
    log = (
        log.float().expand(batch, heads, 1) if steady else _contiguous_features(log.float().expand(batch, heads, time))
    )
    width, values = q.shape[-1], v.shape[-1]
    if sums is None:
        before = q.new_zeros(batch, heads, width * values + width, dtype=torch.float32)
    else:
        before = torch.cat((sums[0].float().flatten(2), sums[1].detach().float()), -1)
    o, r, after = _forward(q, k, v, log, before, None if starts is None else starts.contiguous(), steady)
    s, z = after.split([width * values, width], -1)
    return o, r.detach(), (s.unflatten(-1, (width, values)), z.detach())
