"""One token per row through a recurrence, its state updated in place: retention with its norm and gate, RWKV's wkv, and
the gates of LSTM and GRU.

Retention (Sun et al. 2023, eq. 6, 8; Sun et al. 2024, eq. 4): S ← γ S + kᵀ v, z ← γ z + k, o = q S; then the norm of
each head and swish(gate). Definitions: nn/mixers/retention.py, nn/mixers/rwkv.py. Values that only one program reads
are summed in fp32; S, z and the state of wkv are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs


@triton.jit
def _retention_step(
    q, k, v, gate, decay, floor, turns, s, z, weight, out,
    q_row, k_row, v_row, gate_row, decay_row, temperature, eps, offset, scale,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
    GATED: tl.constexpr, WEIGHT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head. `PAIRS`: pairs of rows of S at a time, which rotary positions rotate together."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.arange(0, WIDE)
    known = f < VALUES
    scales = f * 0.0 + 1.0
    if WEIGHT:
        scales = tl.load(weight + f, mask=known, other=0.0).to(tl.float32) + offset
    await_inputs(OVERLAP)
    if GATED:
        raw = tl.load(decay + row * decay_row + head).to(tl.float32)
        log = (tl.minimum(raw, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(raw)))) / temperature
    else:
        log = tl.load(decay + head)
    fade = tl.exp(log)
    own = tl.load(v + row * v_row + head * VALUES + f, mask=known, other=0.0).to(tl.float32)
    found = tl.zeros((WIDE,), dtype=tl.float32)
    total = 0.0
    half: tl.constexpr = KEYS // 2
    for start in range(0, half, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        real = pair < half
        cos = tl.load(turns + row * KEYS + pair, mask=real, other=0.0)
        sin = tl.load(turns + row * KEYS + half + pair, mask=real, other=0.0)
        at = q + row * q_row + head * KEYS + 2 * pair
        a, b = tl.load(at, mask=real, other=0.0).to(tl.float32), tl.load(at + 1, mask=real, other=0.0).to(tl.float32)
        qa, qb = a * cos - b * sin, b * cos + a * sin
        at = k + row * k_row + head * KEYS + 2 * pair
        a, b = tl.load(at, mask=real, other=0.0).to(tl.float32), tl.load(at + 1, mask=real, other=0.0).to(tl.float32)
        ka, kb = (a * cos - b * sin) * scale, (b * cos + a * sin) * scale
        line = (row * HEADS + head) * KEYS + 2 * pair
        za = tl.load(z + line, mask=real, other=0.0) * fade + ka
        zb = tl.load(z + line + 1, mask=real, other=0.0) * fade + kb
        tl.store(z + line, za, mask=real)
        tl.store(z + line + 1, zb, mask=real)
        total += tl.sum(qa * za + qb * zb, 0)
        spot, both = s + line[:, None] * VALUES + f[None, :], real[:, None] & known[None, :]
        sa = tl.load(spot, mask=both, other=0.0) * fade + ka[:, None] * own[None, :]
        sb = tl.load(spot + VALUES, mask=both, other=0.0) * fade + kb[:, None] * own[None, :]
        tl.store(spot, sa, mask=both)
        tl.store(spot + VALUES, sb, mask=both)
        found += tl.sum(qa[:, None] * sa + qb[:, None] * sb, 0)
    if not GATED:
        found = found / tl.maximum(tl.abs(total), tl.load(floor + row * HEADS + head))
    kind = out.dtype.element_ty
    found = found.to(kind).to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found, 0) / VALUES + eps) * scales
    opened = tl.load(gate + row * gate_row + head * VALUES + f, mask=known, other=0.0).to(tl.float32)
    found = found.to(kind).to(tl.float32) * (opened * tl.sigmoid(opened)).to(kind).to(tl.float32)
    tl.store(out + (row * HEADS + head) * VALUES + f, found.to(kind), mask=known)


class HeadNorm(NamedTuple):
    """RMS norm of each head: weight (values,) or None, to which `offset` is added."""

    weight: Tensor | None
    eps: float
    offset: float = 0.0


def retention_step(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, decay: Tensor, temperature: float | None, floor: Tensor | None,
    rotation: Tensor, s: Tensor, z: Tensor, norm: HeadNorm, scale: float,
) -> Tensor:  # fmt: skip
    """q, k (rows, heads · keys), v, gate (rows, heads · values), not yet rotated; S (rows, heads, keys, values) and z
    (rows, heads, keys) are updated. `decay`: log γ (heads,), or with a `temperature` τ the logits (rows, heads) of γ^τ.
    `floor` (rows, heads), without a temperature: the least number to divide by, √Σ γ^{n−m}. `rotation` (rows, keys):
    cosines beside sines of interleaved pairs. `scale` multiplies the keys. The result (rows, heads · values) is
    normalised and gated."""
    rows, heads, keys, values = s.shape
    assert keys % 2 == 0 and s.is_contiguous() and z.is_contiguous() and rotation.is_contiguous()
    out = torch.empty(rows, heads * values, dtype=v.dtype, device=v.device)
    wide = triton.next_power_of_2(values)
    pairs = max(1, min(triton.next_power_of_2(keys // 2), 4096 // wide))
    gated = temperature is not None
    _retention_step[(rows, heads)](
        q, k, v, gate, decay, rotation if floor is None else floor, rotation, s, z,
        v if norm.weight is None else norm.weight, out,
        q.stride(0), k.stride(0), v.stride(0), gate.stride(0), decay.stride(0), temperature or 1.0, norm.eps,
        norm.offset, scale, HEADS=heads, KEYS=keys, VALUES=values, PAIRS=pairs, WIDE=wide, GATED=gated,
        WEIGHT=norm.weight is not None, OVERLAP=has_pdl(v.device), launch_pdl=has_pdl(v.device), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _wkv_step(
    x, before, r, k, v, decay, bonus, m, a, b, out, x_row, r_row, k_row, v_row, width, hidden,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < hidden
    rate = tl.exp(tl.load(decay + f, mask=inside, other=0.0).to(tl.float32))
    extra = tl.load(bonus + f, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    given = tl.load(x + row * x_row + f, mask=f < width, other=0.0)
    tl.store(before + row * width + f, given, mask=f < width)
    key = tl.load(k + row * k_row + f, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_row + f, mask=inside, other=0.0).to(tl.float32)
    at = row * hidden + f
    high, above, below = (
        tl.load(m + at, mask=inside, other=0.0),
        tl.load(a + at, mask=inside, other=0.0),
        tl.load(b + at, mask=inside, other=0.0),
    )
    own = extra + key
    top = tl.maximum(high, own)
    past, now = tl.exp(high - top), tl.exp(own - top)
    found = (past * above + now * value) / (past * below + now)
    top = tl.maximum(high - rate, key)
    past, now = tl.exp(high - rate - top), tl.exp(key - top)
    tl.store(m + at, top, mask=inside)
    tl.store(a + at, past * above + now * value, mask=inside)
    tl.store(b + at, past * below + now, mask=inside)
    kind = out.dtype.element_ty
    opened = tl.load(r + row * r_row + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (opened * found.to(kind).to(tl.float32)).to(kind), mask=inside)


def wkv_step(
    x: Tensor, before: Tensor, r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor,
    m: Tensor, a: Tensor, b: Tensor,
) -> Tensor:  # fmt: skip
    """r (already a sigmoid), k, v (rows, hidden); the state m, a, b (rows, hidden) is updated, and `before` (rows,
    width) becomes x. `decay` and `bonus` (hidden,) are parameters. The result: r ⊙ wkv (rows, hidden)."""
    (rows, hidden), width = k.shape, x.shape[1]
    assert before.is_contiguous() and all(part.is_contiguous() for part in (m, a, b))
    out = torch.empty(rows, hidden, dtype=k.dtype, device=k.device)
    block = 256
    _wkv_step[(rows, triton.cdiv(max(width, hidden), block))](
        x, before, r, k, v, decay, bonus, m, a, b, out, x.stride(0), r.stride(0), k.stride(0), v.stride(0), width,
        hidden, BLOCK=block, OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _gate_shift(
    x, before, gate, y, out, x_row, gate_row, y_row, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    await_inputs(OVERLAP)
    tl.store(before + row * width + f, tl.load(x + row * x_row + f, mask=inside, other=0.0), mask=inside)
    opened = tl.load(gate + row * gate_row + f, mask=inside, other=0.0).to(tl.float32)
    found = tl.load(y + row * y_row + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + f, (opened * found).to(out.dtype.element_ty), mask=inside)


def gate_shift(x: Tensor, before: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """gate ⊙ y (rows, width), and `before` (rows, width) becomes x: the end of RWKV's channel-mixing."""
    rows, width = y.shape
    out, block = torch.empty_like(y), 256
    _gate_shift[(rows, triton.cdiv(width, block))](
        x, before, gate, y, out, x.stride(0), gate.stride(0), y.stride(0), width, BLOCK=block,
        OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _rnn_gates(seen, kept, h, c, out, hidden, LSTM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < hidden
    await_inputs(OVERLAP)
    at = row * hidden + f
    if LSTM:
        a, b = seen + row * 4 * hidden + f, kept + row * 4 * hidden + f
        i = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        a, b = a + hidden, b + hidden
        forget = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        a, b = a + hidden, b + hidden
        new = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        a, b = a + hidden, b + hidden
        o = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        cell = tl.sigmoid(forget) * tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
        cell += tl.sigmoid(i) * _tanh(new)
        tl.store(c + at, cell.to(out.dtype.element_ty), mask=inside)
        found = tl.sigmoid(o) * _tanh(cell)
    else:
        a, b = seen + row * 3 * hidden + f, kept + row * 3 * hidden + f
        r = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        a, b = a + hidden, b + hidden
        z = tl.load(a, mask=inside, other=0.0).to(tl.float32) + tl.load(b, mask=inside, other=0.0).to(tl.float32)
        a, b = a + hidden, b + hidden
        new = tl.load(a, mask=inside, other=0.0).to(tl.float32)
        new += tl.sigmoid(r) * tl.load(b, mask=inside, other=0.0).to(tl.float32)
        z = tl.sigmoid(z)
        found = (1.0 - z) * _tanh(new) + z * tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + at, found.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


def rnn_gates(seen: Tensor, kept: Tensor, h: Tensor, c: Tensor | None) -> Tensor:
    """The gates of an LSTM (with a cell c) or a GRU, as torch orders them, projected from the input and from the state
    (rows, gates · hidden); h and c (rows, hidden) are updated, and h is the result."""
    rows, hidden = h.shape
    assert all(x.is_contiguous() for x in (seen, kept, h)) and (c is None or c.is_contiguous())
    out, block = torch.empty_like(h), 256
    _rnn_gates[(rows, triton.cdiv(hidden, block))](
        seen, kept, h, h if c is None else c, out, hidden, LSTM=c is not None, BLOCK=block,
        OVERLAP=has_pdl(h.device), launch_pdl=has_pdl(h.device), num_warps=2,
    )  # fmt: skip
    return out
