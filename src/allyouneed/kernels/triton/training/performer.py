"""Causal Performer attention on GPUs, forward and backward; the definition is in `nn/mixers/performer.py`.

Features φ are written once, in half precision if products are; so are the sums S of φ(k) vᵀ and z of φ(k) before each
chunk of tokens, by a walk over the chunks. Then all chunks run in parallel:

    r_i = φ(q_i)·z + Σ_{j ≤ i} φ(q_i)·φ(k_j)        y_i = (φ(q_i) S + Σ_{j ≤ i} φ(q_i)·φ(k_j) v_j) / r_i

Features of keys are relative to the largest exponent of their chunk; `fades` holds the factor to that of the row. With
h_i = dy_i / r_i and e_i = −(dy_i·y_i) / r_i, the weight of a pair has the gradient h_i·v_j + e_i; backward walks from
the end with φ(q), h and e in place of φ(k), v and 1.

PACKED rows: `starts` (batch, time) is the index at which the sentence of each token begins; sums begin anew there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import _capability
from allyouneed.kernels.triton.retention import _contiguous_features, _load_tile, _or, _store_tile

SIDE = 64  # tokens of a chunk, features of a tile
FEATURES_AT_ONCE = 256  # exponents that a program holds


@triton.jit
def _exponents(
    x, norm, omega, first, scale,
    M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """log φ of the softmax kernel or ω·x of the relu kernel: (tokens, TILE); -inf beyond the last feature."""
    f, d = first + tl.arange(0, TILE), tl.arange(0, WIDTH)
    inside = (f < M)[:, None] & (d < D)[None, :]
    w = tl.load(omega + f[:, None] * D + d[None, :], mask=inside, other=0.0)
    found = tl.dot(x, tl.trans(w), input_precision=PRECISION) * scale
    if not RELU:
        found -= norm[:, None]
    return tl.where((f < M)[None, :], found, float("-inf"))


@triton.jit
def _finish(exponents, top, known, floor, RELU: tl.constexpr, KEYS: tl.constexpr):
    found = tl.maximum(exponents, 0.0) + floor if RELU else tl.exp(exponents - top[:, None])
    if KEYS:
        found = tl.where(known[:, None], found, 0.0)
    return found


@triton.jit
def _features(
    x, omega, real, out, tops, x_row, x_head, x_time, heads, time, chunks, scale, floor,
    M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    RELU: tl.constexpr, KEYS: tl.constexpr, REAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ of a chunk: relative to the largest exponent of each token or, for keys, of the chunk."""
    place = tl.program_id(0).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    x = _load_tile(x + row * x_row + head * x_head, start, time, x_time, 0, D, CHUNK, WIDTH).to(tl.float32)
    norm = tl.sum(x * x, 1) * (0.5 * scale * scale)
    at = start + tl.arange(0, CHUNK)
    known = at < time
    if REAL:
        known = known & (tl.load(real + row * time + at, mask=known, other=0) != 0)
    out += line * time * M
    begun = _exponents(x, norm, omega, 0, scale, M, D, WIDTH, TILE, RELU, PRECISION)
    top = tl.zeros((CHUNK,), tl.float32)
    if not RELU:
        top = tl.max(begun, 1)
        for first in range(TILE, M, TILE):
            more = _exponents(x, norm, omega, first, scale, M, D, WIDTH, TILE, RELU, PRECISION)
            top = tl.maximum(top, tl.max(more, 1))
        if KEYS:
            highest = tl.max(tl.where(known, top, float("-inf")), 0)
            tl.store(tops + place, highest)
            top = tl.zeros((CHUNK,), tl.float32) + tl.where(highest > float("-inf"), highest, 0.0)
    _store_tile(out, _finish(begun, top, known, floor, RELU, KEYS), start, time, M, 0, M, CHUNK, TILE)
    for first in range(TILE, M, TILE):
        more = _exponents(x, norm, omega, first, scale, M, D, WIDTH, TILE, RELU, PRECISION)
        _store_tile(out, _finish(more, top, known, floor, RELU, KEYS), start, time, M, first, M, CHUNK, TILE)


@triton.jit
def _sentences(starts, start, time, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Where the sentence of each token, and of the last one, begins in the chunk; negative: before it. Zeros if rows
    are not PACKED."""
    begin, last = tl.zeros((CHUNK,), tl.int32), 0
    if PACKED:
        at = start + tl.arange(0, CHUNK)
        begin = tl.load(starts + at, mask=at < time, other=0) - start
        last = tl.load(starts + tl.minimum(start + CHUNK, time) - 1) - start
    return begin, last


@triton.jit
def _only(x, kept, PACKED: tl.constexpr):
    """Rows of x (CHUNK, …) that are kept; all if rows are not PACKED."""
    if PACKED:
        x = tl.where(kept[:, None], x, 0.0).to(x.dtype)
    return x


@triton.jit
def _walk(
    x, y, extra, fades, starts, near, rows, y_row, y_head, y_time, heads, time, chunks,
    M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    BACK: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S and z before each chunk, or their gradients after it (BACK)."""
    tiles: tl.constexpr = (M + TILE - 1) // TILE
    line, i = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE
    row, head = line // heads, line % heads
    x += line * time * M
    y += row * y_row + head * y_head
    starts += row * time
    f, value = i + tl.arange(0, TILE), tl.arange(0, VALUES)
    inside = (f < M)[:, None] & (value < V)[None, :]
    s, z = tl.zeros((TILE, VALUES), tl.float32), tl.zeros((TILE,), tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step if BACK else step
        here = line * chunks + chunk
        start = chunk * CHUNK
        tl.store(near + here * (M * V) + f[:, None] * V + value[None, :], s.to(near.dtype.element_ty), mask=inside)
        tl.store(rows + here * M + f, z, mask=f < M)
        a = _load_tile(x, start, time, M, i, M, CHUNK, TILE)
        b = _load_tile(y, start, time, y_time, 0, V, CHUNK, VALUES)
        if PACKED:
            begin, last = _sentences(starts, start, time, PACKED, CHUNK)
            a = _only(a, begin < 0 if BACK else tl.arange(0, CHUNK) >= last, PACKED)
            s, z = tl.where(last < 0, s, 0.0), tl.where(last < 0, z, 0.0)
        if BACK:
            at = start + tl.arange(0, CHUNK)
            e = tl.load(extra + line * time + at, mask=at < time, other=0.0)
            s = tl.dot(tl.trans(a), b, s, input_precision=PRECISION)
            z += tl.sum(a.to(tl.float32) * e[:, None], 0)
        else:
            fade = tl.load(fades + here)
            s += tl.dot(tl.trans(a), b, input_precision=PRECISION) * fade
            z += tl.sum(a.to(tl.float32), 0) * fade


@triton.jit
def _state(near, i, M: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr):
    f, value = i + tl.arange(0, TILE), tl.arange(0, VALUES)
    inside = (f < M)[:, None] & (value < V)[None, :]
    return tl.load(near + f[:, None] * V + value[None, :], mask=inside, other=0.0)


@triton.jit
def _row(rows, i, M: tl.constexpr, TILE: tl.constexpr):
    f = i + tl.arange(0, TILE)
    return tl.load(rows + f, mask=f < M, other=0.0)


@triton.jit
def _outputs(
    q, k, v, fades, starts, near, rows, y, r, v_row, v_head, v_time, y_row, y_head, y_time, heads, time, chunks, least,
    M: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    q += line * time * M
    k += line * time * M
    scores, out = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, VALUES), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    for i in range(0, M, TILE):
        a, b = _load_tile(q, start, time, M, i, M, CHUNK, TILE), _load_tile(k, start, time, M, i, M, CHUNK, TILE)
        s, z = _state(near + place * (M * V), i, M, V, TILE, VALUES), _row(rows + place * M, i, M, TILE)
        scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
        out = tl.dot(a, s, out, input_precision=PRECISION)
        total += tl.sum(a.to(tl.float32) * z[None, :], 1)
    step = tl.arange(0, CHUNK)
    past = step[:, None] >= step[None, :]
    if PACKED:
        begin, _ = _sentences(starts + row * time, start, time, PACKED, CHUNK)
        past = past & (step[None, :] >= begin[:, None])
        out, total = _only(out, begin < 0, PACKED), tl.where(begin < 0, total, 0.0)
    scores = tl.where(past, scores * tl.load(fades + place), 0.0)
    total += tl.sum(scores, 1)
    c = _load_tile(v + row * v_row + head * v_head, start, time, v_time, 0, V, CHUNK, VALUES)
    out = tl.dot(scores.to(c.dtype), c, out, input_precision=PRECISION)
    out = out / tl.maximum(total, least)[:, None]
    _store_tile(y + row * y_row + head * y_head, out, start, time, y_time, 0, V, CHUNK, VALUES)
    tl.store(r + line * time + start + step, total, mask=start + step < time)


@triton.jit
def _divide(
    dy, y, r, h, e, g_row, g_head, g_time, y_row, y_head, y_time, heads, time, chunks, least,
    V: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """h = dy / r and e = −dy·y / r; h has the layout of y. A clamped r has no gradient."""
    place = tl.program_id(0).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    at = start + tl.arange(0, CHUNK)
    a = _load_tile(dy + row * g_row + head * g_head, start, time, g_time, 0, V, CHUNK, VALUES).to(tl.float32)
    b = _load_tile(y + row * y_row + head * y_head, start, time, y_time, 0, V, CHUNK, VALUES).to(tl.float32)
    total = tl.load(r + line * time + at, mask=at < time, other=1.0)
    whole = tl.maximum(total, least)
    _store_tile(h + row * y_row + head * y_head, a / whole[:, None], start, time, y_time, 0, V, CHUNK, VALUES)
    tl.store(e + line * time + at, tl.where(total < least, 0.0, -tl.sum(a * b, 1) / whole), mask=at < time)


@triton.jit
def _omega_tile(omega, i, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    f, d = i + tl.arange(0, TILE), tl.arange(0, WIDTH)
    return tl.load(omega + f[:, None] * D + d[None, :], mask=(f < M)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _grad_q(
    x, q, k, v, omega, fades, starts, near, rows, h, e, dx,
    x_row, x_head, x_time, v_row, v_head, v_time, h_row, h_head, h_time, d_row, d_head, d_time,
    heads, time, chunks, scale, floor,
    M: tl.constexpr, V: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    WIDTH: tl.constexpr, RELU: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries x, whose features are q."""
    place = tl.program_id(0).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    q += line * time * M
    k += line * time * M
    step = tl.arange(0, CHUNK)
    g = _load_tile(h + row * h_row + head * h_head, start, time, h_time, 0, V, CHUNK, VALUES)
    c = _load_tile(v + row * v_row + head * v_head, start, time, v_time, 0, V, CHUNK, VALUES)
    extra = tl.load(e + line * time + start + step, mask=start + step < time, other=0.0)
    weights = tl.dot(g, tl.trans(c), input_precision=PRECISION) + extra[:, None]
    past = step[:, None] >= step[None, :]
    begin, _ = _sentences(starts + row * time, start, time, PACKED, CHUNK)
    if PACKED:
        past = past & (step[None, :] >= begin[:, None])
    weights = tl.where(past, weights * tl.load(fades + place), 0.0).to(g.dtype)
    found, total = tl.zeros((CHUNK, WIDTH), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for i in range(0, M, TILE):
        a, b = _load_tile(q, start, time, M, i, M, CHUNK, TILE), _load_tile(k, start, time, M, i, M, CHUNK, TILE)
        s, z = _state(near + place * (M * V), i, M, V, TILE, VALUES), _row(rows + place * M, i, M, TILE)
        grad = tl.dot(g, tl.trans(s), input_precision=PRECISION) + extra[:, None] * z[None, :]
        grad = _only(grad, begin < 0, PACKED)
        grad = tl.dot(weights, b, grad, input_precision=PRECISION)
        if RELU:
            grad = tl.where(a.to(tl.float32) > floor, grad, 0.0)
        else:
            grad *= a.to(tl.float32)
            total += tl.sum(grad, 1)
        w = _omega_tile(omega, i, M, D, TILE, WIDTH).to(a.dtype)
        found = tl.dot(grad.to(a.dtype), w, found, input_precision=PRECISION)
    found *= scale
    if not RELU:
        own = _load_tile(x + row * x_row + head * x_head, start, time, x_time, 0, D, CHUNK, WIDTH).to(tl.float32)
        found -= own * total[:, None] * (scale * scale)
    _store_tile(dx + row * d_row + head * d_head, found, start, time, d_time, 0, D, CHUNK, WIDTH)


@triton.jit
def _grad_kv(
    x, q, k, v, omega, fades, starts, d_near, d_rows, h, e, dx, dv,
    x_row, x_head, x_time, v_row, v_head, v_time, h_row, h_head, h_time, d_row, d_head, d_time,
    dv_row, dv_head, dv_time, heads, time, chunks, scale, floor,
    M: tl.constexpr, V: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, VALUES: tl.constexpr,
    WIDTH: tl.constexpr, RELU: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys x, whose features are k, and of the values. Transposed: keys are rows."""
    place = tl.program_id(0).to(tl.int64)
    line, chunk = place // chunks, (place % chunks).to(tl.int32)
    row, head, start = line // heads, line % heads, chunk * CHUNK
    q += line * time * M
    k += line * time * M
    step = tl.arange(0, CHUNK)
    later = step[:, None] <= step[None, :]
    begin, last = _sentences(starts + row * time, start, time, PACKED, CHUNK)
    if PACKED:
        later = later & (step[:, None] >= begin[None, :])
    fade = tl.load(fades + place)
    g = _load_tile(h + row * h_row + head * h_head, start, time, h_time, 0, V, CHUNK, VALUES)
    c = _load_tile(v + row * v_row + head * v_head, start, time, v_time, 0, V, CHUNK, VALUES)
    extra = tl.load(e + line * time + start + step, mask=start + step < time, other=0.0)
    weights = tl.dot(c, tl.trans(g), input_precision=PRECISION) + extra[None, :]
    weights = tl.where(later, weights, 0.0).to(g.dtype)
    found, total = tl.zeros((CHUNK, WIDTH), tl.float32), tl.zeros((CHUNK,), tl.float32)
    scores, for_v = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, VALUES), tl.float32)
    for i in range(0, M, TILE):
        a, b = _load_tile(q, start, time, M, i, M, CHUNK, TILE), _load_tile(k, start, time, M, i, M, CHUNK, TILE)
        s, z = _state(d_near + place * (M * V), i, M, V, TILE, VALUES), _row(d_rows + place * M, i, M, TILE)
        scores = tl.dot(b, tl.trans(a), scores, input_precision=PRECISION)
        for_v = tl.dot(b, s, for_v, input_precision=PRECISION)
        grad = tl.dot(c, tl.trans(s), input_precision=PRECISION) + z[None, :]
        grad = _only(grad, step >= last, PACKED)
        grad = tl.dot(weights, a, grad, input_precision=PRECISION) * fade
        if RELU:
            grad = tl.where(b.to(tl.float32) > floor, grad, 0.0)
        else:
            grad *= b.to(tl.float32)
            total += tl.sum(grad, 1)
        w = _omega_tile(omega, i, M, D, TILE, WIDTH).to(a.dtype)
        found = tl.dot(grad.to(a.dtype), w, found, input_precision=PRECISION)
    found *= scale
    if not RELU:
        own = _load_tile(x + row * x_row + head * x_head, start, time, x_time, 0, D, CHUNK, WIDTH).to(tl.float32)
        found -= own * total[:, None] * (scale * scale)
    _store_tile(dx + row * d_row + head * d_head, found, start, time, d_time, 0, D, CHUNK, WIDTH)
    scores = tl.where(later, scores, 0.0).to(g.dtype)
    for_v = _only(for_v, step >= last, PACKED)
    for_v = tl.dot(scores, g, for_v, input_precision=PRECISION) * fade
    _store_tile(dv + row * dv_row + head * dv_head, for_v, start, time, dv_time, 0, V, CHUNK, VALUES)


class _Tiling(NamedTuple):
    chunks: int
    chunk: int
    tile: int  # features
    at_once: int  # features, of exponents
    values: int
    width: int
    precision: str

    @classmethod
    def of(cls, q: Tensor, v: Tensor, features: int) -> _Tiling:
        values, width = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (v, q))
        side = SIDE * 2 // q.itemsize  # fp32 tiles are half as wide, to fit in shared memory
        if max(values, width) > SIDE and _capability(q.device) < (9, 0):  # less shared memory
            side //= 2
        chunk, tile = (min(side, max(16, triton.next_power_of_2(x))) for x in (q.shape[2], features))
        at_once = FEATURES_AT_ONCE * 2 // q.itemsize * SIDE // max(SIDE, width)
        at_once = min(at_once, max(16, triton.next_power_of_2(features)))
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        return cls(triton.cdiv(q.shape[2], chunk), chunk, tile, at_once, values, width, precision)


def _empty(q: Tensor, v: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, r, φ(q), φ(k) and fades."""
    (batch, heads, time, _), chunks = q.shape, _Tiling.of(q, v, features).chunks
    y = v.new_empty(batch, time, heads, v.shape[-1]).transpose(1, 2)
    r, fades = (q.new_empty(batch, heads, size, dtype=torch.float32) for size in (time, chunks))
    phi_q, phi_k = (q.new_empty(batch, heads, time, features) for _ in range(2))
    return y, r, phi_q, phi_k, fades


@torch.library.custom_op("allyouneed::performer", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, real: Tensor, starts: Tensor | None, scale: float, relu: bool,
    floor: float, least: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, and for backward r, φ(q), φ(k) and fades. `real` (batch, time) int8 or empty."""
    (batch, heads, time, width), features, values = q.shape, len(omega), v.shape[-1]
    plan, lines = _Tiling.of(q, v, features), batch * heads
    y, r, phi_q, phi_k, fades = _empty(q, v, features)
    tops = torch.zeros_like(fades)
    for x, out, keys in ((q, phi_q, False), (k, phi_k, True)):
        _features[(lines * plan.chunks,)](
            x, omega, real, out, tops, *x.stride()[:3], heads, time, plan.chunks, scale, floor,
            M=features, D=width, WIDTH=plan.width, CHUNK=plan.chunk, TILE=plan.at_once, RELU=relu, KEYS=keys,
            REAL=real.numel() > 0, PRECISION=plan.precision, num_warps=8, num_stages=1,
        )  # fmt: skip
    highest = tops.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    fades.copy_((tops - highest).exp())
    near, rows = _walked(phi_k, v, r, fades, starts, plan, False)
    _outputs[(lines * plan.chunks,)](
        phi_q, phi_k, v, fades, _or(starts, r), near, rows, y, r, *v.stride()[:3], *y.stride()[:3],
        heads, time, plan.chunks, least,
        M=features, V=values, CHUNK=plan.chunk, TILE=plan.tile, VALUES=plan.values, PACKED=starts is not None,
        PRECISION=plan.precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, r, phi_q, phi_k, fades


def _walked(
    x: Tensor, y: Tensor, extra: Tensor, fades: Tensor, starts: Tensor | None, plan: _Tiling, back: bool
) -> tuple[Tensor, Tensor]:
    (batch, heads, time, features), values = x.shape, y.shape[-1]
    near = x.new_empty(batch * heads, plan.chunks, features, values)
    rows = x.new_empty(batch * heads, plan.chunks, features, dtype=torch.float32)
    _walk[(batch * heads * triton.cdiv(features, plan.tile),)](
        x, y, extra, fades, _or(starts, extra), near, rows, *y.stride()[:3], heads, time, plan.chunks,
        M=features, V=values, CHUNK=plan.chunk, TILE=plan.tile, VALUES=plan.values, BACK=back,
        PACKED=starts is not None, PRECISION=plan.precision, num_warps=4, num_stages=3,
    )  # fmt: skip
    return near, rows


_forward.register_fake(lambda q, k, v, omega, *rest: _empty(q, v, len(omega)))


@torch.library.custom_op("allyouneed::performer_backward", mutates_args=())
def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, omega: Tensor, starts: Tensor | None, y: Tensor, r: Tensor,
    phi_q: Tensor, phi_k: Tensor, fades: Tensor, scale: float, relu: bool, floor: float, least: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, heads, time, width), features, values = q.shape, len(omega), v.shape[-1]
    plan, lines, dy = _Tiling.of(q, v, features), batch * heads, _contiguous_features(dy)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))  # with the strides of the inputs
    h, e = torch.empty_like(y), torch.empty_like(r)
    _divide[(lines * plan.chunks,)](
        dy, y, r, h, e, *dy.stride()[:3], *y.stride()[:3], heads, time, plan.chunks, least,
        V=values, CHUNK=plan.chunk, VALUES=plan.values, num_warps=4,
    )  # fmt: skip
    sizes: dict[str, Any] = {
        "M": features, "V": values, "D": width, "CHUNK": plan.chunk, "TILE": plan.tile, "VALUES": plan.values,
        "WIDTH": plan.width, "RELU": relu, "PACKED": starts is not None, "PRECISION": plan.precision, "num_warps": 4,
        "num_stages": 2,
    }  # fmt: skip
    near, rows = _walked(phi_k, v, r, fades, starts, plan, False)
    _grad_q[(lines * plan.chunks,)](
        q, phi_q, phi_k, v, omega, fades, _or(starts, r), near, rows, h, e, dq,
        *q.stride()[:3], *v.stride()[:3], *h.stride()[:3], *dq.stride()[:3], heads, time, plan.chunks, scale, floor,
        **sizes,
    )  # fmt: skip
    near, rows = _walked(phi_q, h, e, fades, starts, plan, True)
    _grad_kv[(lines * plan.chunks,)](
        k, phi_q, phi_k, v, omega, fades, _or(starts, r), near, rows, h, e, dk, dv,
        *k.stride()[:3], *v.stride()[:3], *h.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        heads, time, plan.chunks, scale, floor, **sizes,
    )  # fmt: skip
    return dq, dk, dv


_backward.register_fake(lambda dy, *qkv_and_rest: tuple(torch.empty_like(x) for x in qkv_and_rest[:3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, omega, _, starts, *rest = inputs
    ctx.save_for_backward(q, k, v, omega, starts, *output)
    ctx.rest = rest


def _gradients(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dy, *ctx.saved_tensors, *ctx.rest), *(None for _ in range(7))


_forward.register_autograd(_gradients, setup_context=_save)


def performer(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, real: Tensor | None, scale: float, relu: bool, floor: float,
    least: float, dtype: torch.dtype, starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention by the features ω (m, width) of q and k (batch, heads, time, width), times `scale`; like v.

    `real` (batch, time): keys that count. `floor` is added to relu features; `least`: smallest divisor. `dtype`: of
    the products of features; exponents are fp32. `starts`: of packed rows.
    """
    q, k, v = (_contiguous_features(x.to(dtype)) for x in (q, k, v))
    shown = q.new_empty(0, dtype=torch.int8) if real is None else real.to(torch.int8).contiguous()
    starts = None if starts is None else starts.contiguous()
    return _forward(q, k, v, omega.float().contiguous(), shown, starts, scale, relu, floor, least)[0]
