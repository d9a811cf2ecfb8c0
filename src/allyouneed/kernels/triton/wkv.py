"""The WKV recurrence of RWKV-4 on GPUs, forward and backward; the definition is in `nn/ops/wkv.py`.

Features are independent, tokens sequential. To occupy the GPU, a text is cut into segments: `_walk` runs each
separately, `_join` scans over segments, `_outputs` runs again from the state before each segment.

Backward, with D_t the denominator of wkv_t = y_t and g_t its gradient, the gradients of the state follow the same
recurrence from the end (as (n, a, b), for e^n a and e^n b):

    dA_{t−1} = e^{−δ} dA_t + g_t / D_t        dB_{t−1} = e^{−δ} dB_t − g_t y_t / D_t

No exponent exceeds 0 (or u, in the gradient of δ), since D_t bounds the sums.

PACKED rows: `starts` (batch, time) is the index at which the sentence of each token begins. The state is dropped before
the first token of a sentence, and so is its gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton import TEXT_SIZES

WKVState = tuple[Tensor, Tensor, Tensor]
FEATURES = 64  # per program (one warp)
AHEAD = tl.constexpr(5)  # tokens to prefetch, to hide memory latency
PROGRAMS = 4096  # segments are added until this many programs run


@triton.jit
def _combine(m, a, b, decay, n, c, d):
    """Decay the state and add that of the following tokens."""
    top = tl.maximum(m - decay, n)
    old, new = tl.exp(m - decay - top), tl.exp(n - top)
    return top, old * a + new * c, old * b + new * d


@triton.jit
def _drop(m, a, b, gone, LEAST: tl.constexpr):
    """An empty state where it is gone."""
    return tl.where(gone, LEAST, m), tl.where(gone, 0.0, a), tl.where(gone, 0.0, b)


@triton.jit
def _is_first(starts, at):
    return tl.load(starts + at) == at


@triton.jit
def _locate(lengths, time, share, segments, features, LENGTHS: tl.constexpr, FEATURES: tl.constexpr):
    """Row, segment, features, first token of the segment, and end of its real tokens."""
    blocks = tl.cdiv(features, FEATURES)
    feature = tl.program_id(0) % blocks * FEATURES + tl.arange(0, FEATURES)
    row = (tl.program_id(0) // blocks // segments).to(tl.int64)
    segment = tl.program_id(0) // blocks % segments
    length = tl.load(lengths + row).to(tl.int32) if LENGTHS else time
    return row, segment, feature, segment * share, tl.minimum(segment * share + share, length)


@triton.jit
def _read(x, at, features, feature):
    here = x + tl.cast(at, tl.int64) * features + feature
    return tl.load(here, mask=feature < features, other=0.0).to(tl.float32)


@triton.jit
def _write(x, value, at, features, feature):
    here = x + tl.cast(at, tl.int64) * features + feature
    tl.store(here, value.to(x.dtype.element_ty), mask=feature < features)


@triton.jit
def _load3(sums, plane, at, inside):
    m = tl.load(sums + at, mask=inside, other=0.0)
    return m, tl.load(sums + plane + at, mask=inside, other=0.0), tl.load(sums + 2 * plane + at, mask=inside, other=0.0)


@triton.jit
def _store3(sums, plane, at, inside, m, a, b):
    tl.store(sums + at, m, mask=inside)
    tl.store(sums + plane + at, a, mask=inside)
    tl.store(sums + 2 * plane + at, b, mask=inside)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _walk(
    k, v, decay, sums, lengths, starts, plane, time, share, segments, features,
    LEAST: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    row, segment, feature, start, stop = _locate(lengths, time, share, segments, features, LENGTHS, FEATURES)
    inside = feature < features
    k, v, starts = k + row * time * features, v + row * time * features, starts + row * time
    step = tl.load(decay + feature, mask=inside, other=0.0)
    m, a = tl.full((FEATURES,), LEAST, tl.float32), tl.zeros((FEATURES,), tl.float32)
    b = a
    for at in tl.range(start, stop, num_stages=AHEAD):
        key, value = _read(k, at, features, feature), _read(v, at, features, feature)
        if PACKED:
            m, a, b = _drop(m, a, b, _is_first(starts, at), LEAST)
        m, a, b = _combine(m, a, b, step, key, value, 1.0)
    _store3(sums, plane, (row * segments + segment) * features + feature, inside, m, a, b)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _join(
    sums, ends, decay, lengths, starts, plane, end_plane, time, share, segments, features,
    BACK: tl.constexpr, LEAST: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """In place: from the contribution of each segment to the state before it (BACK: after it), starting with `ends`."""
    row, _, feature, _, _ = _locate(lengths, time, share, 1, features, LENGTHS, FEATURES)
    length = tl.load(lengths + row).to(tl.int32) if LENGTHS else time
    inside = feature < features
    step = tl.load(decay + feature, mask=inside, other=0.0)
    m, a, b = _load3(ends, end_plane, row * features + feature, inside)
    for number in range(segments):
        segment = segments - 1 - number if BACK else number
        here = (row * segments + segment) * features + feature
        n, c, d = _load3(sums, plane, here, inside)
        _store3(sums, plane, here, inside, m, a, b)
        if PACKED:  # nothing passes through a segment in which a sentence begins
            last = tl.load(starts + row * time + tl.minimum(segment * share + share, time) - 1)
            m, a, b = _drop(m, a, b, last >= segment * share, LEAST)
        count = tl.minimum(tl.maximum(length - segment * share, 0), share)
        m, a, b = _combine(m, a, b, step * count, n, c, d)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _outputs(
    k, v, decay, bonus, sums, ends, lengths, starts, out, whole, plane, end_plane, time, share, segments, features,
    WHOLE: tl.constexpr, LEAST: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """wkv of every token, the final state and, if WHOLE, the log denominators."""
    row, segment, feature, start, stop = _locate(lengths, time, share, segments, features, LENGTHS, FEATURES)
    inside = feature < features
    offset = row * time * features
    k, v, out, whole, starts = k + offset, v + offset, out + offset, whole + offset, starts + row * time
    step = tl.load(decay + feature, mask=inside, other=0.0)
    more = tl.load(bonus + feature, mask=inside, other=0.0)
    m, a, b = _load3(sums, plane, (row * segments + segment) * features + feature, inside)
    for at in tl.range(start, stop, num_stages=AHEAD):
        key, value = _read(k, at, features, feature), _read(v, at, features, feature)
        if PACKED:
            m, a, b = _drop(m, a, b, _is_first(starts, at), LEAST)
        top, above, below = _combine(m, a, b, 0.0, more + key, value, 1.0)
        _write(out, above / below, at, features, feature)
        if WHOLE:
            _write(whole, top + tl.log(below), at, features, feature)
        m, a, b = _combine(m, a, b, step, key, value, 1.0)
    last = feature < tl.where(segment == segments - 1, features, 0)
    _store3(ends, end_plane, row * features + feature, last, m, a, b)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _walk_back(
    g, y, whole, decay, grads, lengths, starts, plane, time, share, segments, features,
    LEAST: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Gradient of a segment's outputs with respect to the state before it."""
    row, segment, feature, start, stop = _locate(lengths, time, share, segments, features, LENGTHS, FEATURES)
    inside = feature < features
    offset = row * time * features
    g, y, whole, starts = g + offset, y + offset, whole + offset, starts + row * time
    step = tl.load(decay + feature, mask=inside, other=0.0)
    n, a = tl.full((FEATURES,), LEAST, tl.float32), tl.zeros((FEATURES,), tl.float32)
    b = a
    for number in tl.range(stop - start, num_stages=AHEAD):
        at = stop - 1 - number
        grad = _read(g, at, features, feature)
        mean, log = _read(y, at, features, feature), _read(whole, at, features, feature)
        n, a, b = _combine(n, a, b, step, -log, grad, -grad * mean)
        if PACKED:
            n, a, b = _drop(n, a, b, _is_first(starts, at), LEAST)
    _store3(grads, plane, (row * segments + segment) * features + feature, inside, n, a, b)


@triton.jit(do_not_specialize=TEXT_SIZES)
def _grad_kernel(
    k, v, g, y, whole, decay, bonus, past, grads, dk, dv, d_decay, d_bonus, d_past,
    lengths, starts, plane, end_plane, time, share, segments, features,
    LEAST: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """`grads`: gradients with respect to the state after each segment; `past`, `d_past`: initial state and its
    gradient."""
    row, segment, feature, start, stop = _locate(lengths, time, share, segments, features, LENGTHS, FEATURES)
    inside = feature < features
    offset = row * time * features
    k, v, g, y, whole, dk, dv = k + offset, v + offset, g + offset, y + offset, whole + offset, dk + offset, dv + offset
    starts += row * time
    step = tl.load(decay + feature, mask=inside, other=0.0)
    more = tl.load(bonus + feature, mask=inside, other=0.0)
    here = (row * segments + segment) * features + feature
    n, a, b = _load3(grads, plane, here, inside)
    for_decay, for_bonus = tl.zeros((FEATURES,), tl.float32), tl.zeros((FEATURES,), tl.float32)
    for number in tl.range(stop - start, num_stages=AHEAD):
        at = stop - 1 - number
        key, value = _read(k, at, features, feature), _read(v, at, features, feature)
        grad = _read(g, at, features, feature)
        mean, log = _read(y, at, features, feature), _read(whole, at, features, feature)
        own, kept = (
            tl.exp(more + key - log),
            tl.exp(key + n),
        )  # weight of the token in its own output, and in later states
        direct = grad * own * (value - mean)
        _write(dk, direct + kept * (a * value + b), at, features, feature)
        _write(dv, grad * own + kept * a, at, features, feature)
        for_bonus += direct
        # the state before the token is its output minus its own term
        decayed = tl.exp(n - step + log) * (a * (mean - own * value) + b * (1 - own))
        n, a, b = _combine(n, a, b, step, -log, grad, -grad * mean)
        if PACKED:
            first = _is_first(starts, at)
            decayed = tl.where(first, 0.0, decayed)
            n, a, b = _drop(n, a, b, first, LEAST)
        for_decay -= decayed
    tl.store(d_decay + here, for_decay, mask=inside)
    tl.store(d_bonus + here, for_bonus, mask=inside)
    begins = feature < tl.where(segment == 0, features, 0)
    m = tl.load(past + row * features + feature, mask=begins, other=0.0)
    _store3(d_past, end_plane, row * features + feature, begins, m, tl.exp(n + m) * a, tl.exp(n + m) * b)


class _Segmentation:
    """Segmentation of a text, and arguments shared by the kernels."""

    def __init__(self, k: Tensor, lengths: Tensor | None, starts: Tensor | None, least: float) -> None:
        batch, time, features = k.shape
        blocks = batch * triton.cdiv(features, FEATURES)
        # balance the scan over segments with the loop inside one
        share = max(triton.next_power_of_2(math.isqrt(max(time, 1))), triton.cdiv(time * blocks, PROGRAMS), 1)
        self.segments = max(1, triton.cdiv(time, share))
        self.sizes, self.grid, self.join = (time, share, self.segments, features), (blocks * self.segments,), (blocks,)
        self.plane, self.end_plane = batch * self.segments * features, batch * features
        self.limits = (k if lengths is None else lengths, k if starts is None else starts)  # k: not read
        self.flags = (least, starts is not None, lengths is not None, FEATURES)

    def empty(self, k: Tensor) -> Tensor:
        return torch.empty(3, k.shape[0], self.segments, k.shape[2], device=k.device)


def _before(cut: _Segmentation, past: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """State before each segment: (3, batch, segments, features)."""
    if cut.segments == 1:
        return past
    sums = cut.empty(k)
    _walk[cut.grid](k, v, decay, sums, *cut.limits, cut.plane, *cut.sizes, *cut.flags, num_warps=1)
    planes = (cut.plane, cut.end_plane)
    _join[cut.join](sums, past, decay, *cut.limits, *planes, *cut.sizes, False, *cut.flags, num_warps=1)
    return sums


@torch.library.custom_op("allyouneed::wkv", mutates_args=())
def _forward(
    past: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, lengths: Tensor | None, starts: Tensor | None,
    least: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """wkv (batch, time, features) and the last state. States (3, batch, features) are m, a, b."""
    cut = _Segmentation(k, lengths, starts, least)
    sums, ends = _before(cut, past, k, v, decay), torch.empty_like(past)
    out = torch.empty_like(v) if lengths is None else torch.zeros_like(v)
    planes = (cut.plane, cut.end_plane)
    _outputs[cut.grid](
        k, v, decay, bonus, sums, ends, *cut.limits, out, out, *planes, *cut.sizes, False, *cut.flags, num_warps=1
    )
    return out, ends


_forward.register_fake(lambda past, k, v, *rest: (torch.empty_like(v), torch.empty_like(past)))


@torch.library.custom_op("allyouneed::wkv_backward", mutates_args=())
def _backward(
    g: Tensor, d_ends: Tensor, past: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor,
    lengths: Tensor | None, starts: Tensor | None, least: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the first state, of k, v, and of decay and bonus (2, batch, segments, features) in parts."""
    cut = _Segmentation(k, lengths, starts, least)
    shared, planes = (*cut.sizes, *cut.flags), (cut.plane, cut.end_plane)
    g = g.contiguous()
    sums, ends = _before(cut, past, k, v, decay), torch.empty_like(past)
    y, whole = torch.empty(2, *v.shape, device=v.device)
    _outputs[cut.grid](
        k, v, decay, bonus, sums, ends, *cut.limits, y, whole, *planes, *cut.sizes, True, *cut.flags, num_warps=1
    )
    # where nothing comes back through the last state, its exponent must not count either
    silent = (d_ends[1:] == 0).all(0)
    wanted = torch.stack((torch.where(silent, least, -ends[0]), d_ends[1], d_ends[2]))
    grads = wanted
    if cut.segments > 1:
        grads = cut.empty(k)
        _walk_back[cut.grid](
            g, y, whole, decay, grads, *cut.limits, cut.plane, *cut.sizes, *cut.flags, num_warps=1
        )  # fmt: skip
        _join[cut.join](grads, wanted, decay, *cut.limits, *planes, *cut.sizes, True, *cut.flags, num_warps=1)
    dk, dv = (torch.empty_like(x) if lengths is None else torch.zeros_like(x) for x in (k, v))
    partial, d_past = _empty_sums(k), torch.empty_like(past)
    _grad_kernel[cut.grid](
        k, v, g, y, whole, decay, bonus, past, grads, dk, dv, *partial, d_past, *cut.limits,
        *planes, *shared, num_warps=1,
    )  # fmt: skip
    return d_past, dk, dv, partial


_backward.register_fake(
    lambda g, d_ends, past, k, v, *rest: (*(torch.empty_like(x) for x in (past, k, v)), _empty_sums(k))
)


def _empty_sums(k: Tensor) -> Tensor:
    return k.new_empty(2, k.shape[0], _Segmentation(k, None, None, 0.0).segments, k.shape[2], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.least = inputs[7]


def _gradients(ctx: Any, g: Tensor, d_ends: Tensor) -> tuple[Tensor | None, ...]:
    d_past, dk, dv, partial = _backward(g, d_ends, *ctx.saved_tensors, ctx.least)
    d_decay, d_bonus = partial.sum((1, 2)).unbind()
    return d_past, dk, dv, d_decay, d_bonus, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def wkv(
    past: WKVState, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, lengths: Tensor | None, least: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, WKVState]:  # fmt: skip
    """wkv of the first lengths[i] tokens of row i (0 for others), and the final state.

    `least`: exponent of an empty sum. `starts`: of packed rows, not with `lengths`.
    """
    states = torch.stack([past[0].detach().float(), *(value.float() for value in past[1:])])
    starts = None if starts is None else starts.contiguous()
    out, ends = _forward(states, k.contiguous(), v.contiguous(), decay.float(), bonus.float(), lengths, starts, least)
    m, a, b = ends.unbind()
    return out, (m.detach(), a, b)
