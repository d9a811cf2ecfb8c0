"""One token per row through a state space, its state updated in place: the short convolution, the step of Mamba (Gu,
Dao 2023, eq. 2, 4), that of Mamba-2 (Dao, Gu 2024, eq. 1) and that of S4 (Gu, Goel, Ré 2022, eq. 3). Definitions:
nn/mixers/state_space. States are fp32, but for the last inputs of the convolution. Mamba-2 writes its state once in
several tokens (deferred.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.mixer_steps.deferred import fold_recent, load_recent, read_deferred, tiles


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _convolution_step(
    x, before, taps, shift, out, x_row, features, SIZE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    found = f * 0.0
    if SHIFT:
        found = tl.load(shift + f, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    for number in tl.static_range(SIZE - 1):
        at = before + (row * (SIZE - 1) + number) * features + f
        old = tl.load(at, mask=inside, other=0.0)
        found += tl.load(taps + f * SIZE + number, mask=inside, other=0.0).to(tl.float32) * old.to(tl.float32)
        if number > 0:
            tl.store(at - features, old, mask=inside)
    new = tl.load(x + row * x_row + f, mask=inside, other=0.0)
    found += tl.load(taps + f * SIZE + SIZE - 1, mask=inside, other=0.0).to(tl.float32) * new.to(tl.float32)
    if SIZE > 1:
        tl.store(before + (row * (SIZE - 1) + SIZE - 2) * features + f, new, mask=inside)
    kind = out.dtype.element_ty
    found = found.to(kind).to(tl.float32)
    tl.store(out + row * features + f, (found * tl.sigmoid(found)).to(kind), mask=inside)


def convolution_step(x: Tensor, before: Tensor, taps: Tensor, shift: Tensor | None) -> Tensor:
    """silu of the filters (features, size) over the last inputs `before` (rows, size − 1, features), which move on, and
    x (rows, features)."""
    (rows, features), size = x.shape, taps.shape[1]
    assert before.is_contiguous() and taps.is_contiguous() and x.stride(1) == 1
    out, block = torch.empty(rows, features, dtype=x.dtype, device=x.device), 256
    _convolution_step[(rows, triton.cdiv(features, block))](
        x, before, taps, x if shift is None else shift, out, x.stride(0), features, SIZE=size,
        SHIFT=shift is not None, BLOCK=block, OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _mamba_step(
    x, steps, bias, a_log, b, c, skip, z, h, out, b_row, c_row, z_row, hidden,
    STATES: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    f, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MANY)
    inside, real = f < hidden, n < STATES
    both = real[:, None] & inside[None, :]
    rate = -tl.exp(tl.load(a_log + f[None, :] * STATES + n[:, None], mask=both, other=0.0).to(tl.float32))
    own = tl.load(bias + f, mask=inside, other=0.0).to(tl.float32)
    direct = tl.load(skip + f, mask=inside, other=0.0).to(tl.float32)
    spot = h + (row * STATES + n[:, None]) * hidden + f[None, :]
    state = tl.load(spot, mask=both, other=0.0)
    await_inputs(OVERLAP)
    at = row * hidden + f
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    step = _softplus(tl.load(steps + at, mask=inside, other=0.0).to(tl.float32) + own)
    enter = tl.load(b + row * b_row + n, mask=real, other=0.0).to(tl.float32)
    leave = tl.load(c + row * c_row + n, mask=real, other=0.0).to(tl.float32)
    state *= tl.exp(rate * step[None, :])
    state += enter[:, None] * (step * value)[None, :]
    tl.store(spot, state, mask=both)
    found = tl.sum(leave[:, None] * state, 0) + direct * value
    kind = out.dtype.element_ty
    gate = tl.load(z + row * z_row + f, mask=inside, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(out + at, (found.to(kind).to(tl.float32) * gate).to(kind), mask=inside)


def mamba_step(
    x: Tensor, steps: Tensor, bias: Tensor, a_log: Tensor, b: Tensor, c: Tensor, skip: Tensor, z: Tensor, h: Tensor
) -> Tensor:
    """x, z and the projected `steps` (rows, hidden), b and c (rows, N); h (rows, N, hidden) is updated. The result:
    (C h + D x) ⊙ silu(z)."""
    rows, states, hidden = h.shape
    assert x.is_contiguous() and steps.is_contiguous() and h.is_contiguous() and a_log.is_contiguous()
    out, block = torch.empty_like(x), 128
    _mamba_step[(rows, triton.cdiv(hidden, block))](
        x, steps, bias, a_log, b, c, skip, z, h, out, b.stride(0), c.stride(0), z.stride(0), hidden, STATES=states,
        MANY=triton.next_power_of_2(states), BLOCK=block, OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _mamba2_step(
    x, steps, bias, a_log, b, c, skip, z, h, keys, values, logs, positions, out, x_row, steps_row, z_row,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATES: tl.constexpr, WIDTH: tl.constexpr, RECENT: tl.constexpr,
    MANY: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head, some of its features. x, b and c are parts of one row."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    count = (tl.load(positions + row) % RECENT).to(tl.int32)
    f, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, MANY)
    known, real, own = f < WIDTH, n < STATES, row * HEADS + head
    h += own * (WIDTH * STATES)
    x += row * x_row
    state = tl.load(h + f[:, None] * STATES + n[None, :], mask=known[:, None] & real[None, :], other=0.0)
    if OVERLAP:
        gdc_launch_dependents()  # before the recent tokens: no load of the state waits for their number
    group = head // (HEADS // GROUPS)
    keys += (row * GROUPS + group) * (RECENT * STATES)
    values += own * (RECENT * WIDTH)
    logs += own * RECENT
    key, value, decays = load_recent(keys, values, logs, count, f, n, known, real, WIDTH, STATES, RECENT)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    shift, direct = tl.load(bias + head).to(tl.float32), tl.load(skip + head).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    step = _softplus(tl.load(steps + row * steps_row + head).to(tl.float32) + shift)
    new = tl.load(x + head * WIDTH + f, mask=known, other=0.0).to(tl.float32)
    there = row * x_row + group * STATES + n
    enter = tl.load(b + there, mask=real, other=0.0).to(tl.float32)
    leave = tl.load(c + there, mask=real, other=0.0).to(tl.float32)
    log, added = rate * step, step * new
    found = read_deferred(state, key, value, decays, leave, log, RECENT)
    found += tl.sum(leave * enter, 0) * added + direct * new
    kind = out.dtype.element_ty
    gate = tl.load(z + row * z_row + head * WIDTH + f, mask=known, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(out + own * WIDTH + f, (found.to(kind).to(tl.float32) * gate).to(kind), mask=known)
    if count == RECENT - 1:
        x += head * WIDTH
        fold_recent(h, keys, values, logs, x, step, enter, log, n, real, WIDTH, STATES, RECENT, BLOCK, PIECE)
    else:
        tl.store(values + count * WIDTH + f, added, mask=known)
        if tl.program_id(0) == 0:
            tl.store(logs + count, log)
            if head % (HEADS // GROUPS) == 0:
                tl.store(keys + count * STATES + n, enter, mask=real)


def mamba2_step(
    x: Tensor, b: Tensor, c: Tensor, steps: Tensor, bias: Tensor, a_log: Tensor, skip: Tensor, z: Tensor, h: Tensor,
    recent: tuple[Tensor, Tensor, Tensor], positions: Tensor,
) -> Tensor:  # fmt: skip
    """x (rows, heads · width), b and c (rows, groups · N), parts of one tensor; z (rows, heads · width), `steps` (rows,
    heads). h (rows, heads, N, width), stored by columns, and the recent tokens are updated. The result:
    (C h + D x) ⊙ silu(z)."""
    (rows, heads, states, width), kept = h.shape, recent[0].shape[2]
    h, many = h.mT, triton.next_power_of_2(states)
    assert all(part.is_contiguous() for part in (h, *recent)) and x.stride(0) == b.stride(0) == c.stride(0)
    out, sizes = torch.empty(rows, heads * width, dtype=x.dtype, device=x.device), tiles(rows * heads, width, many)
    _mamba2_step[(triton.cdiv(width, sizes["BLOCK"]), heads, rows)](
        x, steps, bias, a_log, b, c, skip, z, h, *recent, positions, out, x.stride(0), steps.stride(0), z.stride(0),
        HEADS=heads, GROUPS=b.shape[1] // states, STATES=states, WIDTH=width, RECENT=kept, MANY=many,
        OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), num_warps=4, **sizes,
    )  # fmt: skip
    return out


@triton.jit
def _s4_step(
    u, weights, skip, x, out, u_row, rows, width,
    STATES: tl.constexpr, PAIRS: tl.constexpr, LOW_RANK: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some features of `EACH` rows, which share the weights. A complex number is a pair: the real parts of all states
    of a feature lie before the imaginary ones."""
    f, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PAIRS)
    half: tl.constexpr = STATES // 2
    lines: tl.constexpr = 5 if LOW_RANK else 3
    inside = f < width
    both = inside[:, None] & (n < half)[None, :]
    at = weights + f[:, None] * (lines * STATES) + n[None, :]
    a_re, a_im = tl.load(at, mask=both, other=0.0), tl.load(at + half, mask=both, other=0.0)
    at += STATES
    b_re, b_im = tl.load(at, mask=both, other=0.0), tl.load(at + half, mask=both, other=0.0)
    at += STATES
    c_re, c_im = tl.load(at, mask=both, other=0.0), tl.load(at + half, mask=both, other=0.0)
    w_re, w_im, g_re, g_im = a_re, a_im, a_re, a_im
    if LOW_RANK:
        at += STATES
        w_re, w_im = tl.load(at, mask=both, other=0.0), tl.load(at + half, mask=both, other=0.0)
        at += STATES
        g_re, g_im = tl.load(at, mask=both, other=0.0), tl.load(at + half, mask=both, other=0.0)
    direct = tl.load(skip + f, mask=inside, other=0.0).to(tl.float32)
    await_inputs(OVERLAP)
    for number in range(EACH):
        row = (tl.program_id(1) * EACH + number).to(tl.int64)
        real = inside & (row < rows)
        pairs = both & (row < rows)
        given = tl.load(u + row * u_row + f, mask=real, other=0.0).to(tl.float32)
        spot = x + (row * width + f[:, None]) * STATES + n[None, :]
        re, im = tl.load(spot, mask=pairs, other=0.0), tl.load(spot + half, mask=pairs, other=0.0)
        new_re = a_re * re - a_im * im + b_re * given[:, None]
        new_im = a_re * im + a_im * re + b_im * given[:, None]
        if LOW_RANK:
            along = tl.sum(g_re * re + g_im * im, 1)[:, None]
            new_re -= w_re * along
            new_im -= w_im * along
        tl.store(spot, new_re, mask=pairs)
        tl.store(spot + half, new_im, mask=pairs)
        y = tl.sum(c_re * new_re + c_im * new_im, 1) + direct * given
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))  # gelu
        tl.store(out + row * width + f, y.to(out.dtype.element_ty), mask=real)


def s4_step(u: Tensor, weights: Tensor, skip: Tensor, x: Tensor) -> Tensor:
    """u (rows, width), `weights` as `S4Module.step_weights` returns them; x (rows, width, N) is updated. The result
    (rows, width): gelu(C x + D u)."""
    rows, width, states = x.shape
    assert x.is_contiguous() and weights.is_contiguous() and u.stride(1) == 1
    out = torch.empty(rows, width, dtype=u.dtype, device=u.device)
    block, each, warps = (4, 1, 1) if rows < 4 else (16, 4, 4)
    _s4_step[(triton.cdiv(width, block), triton.cdiv(rows, each))](
        u, weights, skip, x, out, u.stride(0), rows, width, STATES=states,
        PAIRS=triton.next_power_of_2(states // 2), LOW_RANK=weights.shape[1] == 5, BLOCK=block, EACH=each,
        OVERLAP=has_pdl(u.device), launch_pdl=has_pdl(u.device), num_warps=warps,
    )  # fmt: skip
    return out
