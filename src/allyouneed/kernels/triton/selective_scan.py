"""The selective state space of Mamba on GPUs, forward and backward; the definition is in `nn/ops/selective_scan.py`.

A program of one warp holds states of a few features in registers and walks over the tokens of a row, TOKENS at a time,
so that their loads overlap. Where rows and features are too few to occupy the GPU, rows are cut into segments: a first
walk gives what each adds to the state, `_join` scans over segments, then all run in parallel. Decays multiply to
exp(A Σ Δ), so the decay of a segment needs only the sum of its time steps.

Saved for backward: the inputs and the state before each segment. `_revisit` recomputes the states, keeps one per TOKENS
tokens and gives what each segment adds to the gradient of the state before it; `_grad_kernel` walks from the end. Those
that are sums over features or tokens are summed per program, then by torch: always in the same order.

PACKED rows: `begins` (batch, time) is the index at which the sentence of each token begins. The decay at its first
token is 0, so no state passes, and no gradient.

All arithmetic is fp32. A tile of states is (N, GROUPS, LANES): feature = group · LANES + lane, so that sums over
features add up within a thread before threads exchange anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels.triton import TEXT_SIZES

TOKENS = 4  # loaded at once; the backward pass keeps one state per this many
STATES = 16  # per program at most
GROUPS, LANES = 2, 16  # features of a program
PROGRAMS = 4096  # several per place on the GPU, so that the last ones do not run alone
SHORTEST = 64  # tokens per segment at least
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate(lengths, time, share, segments, blocks, LENGTHS: tl.constexpr, PARTS: tl.constexpr):
    """Row, segment, part of the states, block of features; the first token and the one after the last."""
    number = tl.program_id(0)
    block, number = number % blocks, number // blocks
    part, number = number % PARTS, number // PARTS
    segment, row = number % segments, (number // segments).to(tl.int64)
    stop = tl.load(lengths + row).to(tl.int32) if LENGTHS else time
    start = segment * share
    return row, segment, part, block, start, tl.minimum(stop, start + share)


@triton.jit
def _places(part, block, features, N: tl.constexpr, STATES: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Numbers of the features (GROUPS, LANES) and of the states (STATES,); offsets of the tile, and which exist."""
    group, lane = tl.arange(0, GROUPS), tl.arange(0, LANES)
    feature = (block * GROUPS + group)[:, None] * LANES + lane[None, :]
    state = part * STATES + tl.arange(0, STATES)
    inside = (feature < features)[None, :, :] & (state < N)[:, None, None]
    return feature, state, state[:, None, None] * features + feature[None, :, :], inside


@triton.jit
def _softplus(x):
    """log(1 + e^x), exact also where e^x is small."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small
    near = tl.where(whole == 1.0, small, tl.log(whole) * (small / (whole - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def _load_rows(x, at, stop, stride, column, inside, TOKENS: tl.constexpr):
    """Rows at, at + 1, …; from `stop` on the last one again."""
    rows = ()
    for i in tl.static_range(TOKENS):
        here = x + tl.minimum(at + i, stop - 1).to(tl.int64) * stride + column
        rows += (tl.load(here, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _store_row(x, row, at, stop, stride, column, inside):
    tl.store(x + at.to(tl.int64) * stride + column, row.to(x.dtype.element_ty), mask=inside & (at < stop))


@triton.jit
def _sum_features(x):
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def _time_steps(rows, bias, at, stop, TOKENS: tl.constexpr):
    """Δ = softplus(rows + bias); 0 from `stop` on, which leaves the state unchanged."""
    found = ()
    for i in tl.static_range(TOKENS):
        found += (tl.where(at + i < stop, _softplus(rows[i] + bias), 0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def _load_begins(begins, at, stop, PACKED: tl.constexpr, TOKENS: tl.constexpr):
    """Where the sentences of tokens at, at + 1, … begin; from `stop` on that of the last one."""
    found = ()
    for i in tl.static_range(TOKENS):
        if PACKED:
            found += (tl.load(begins + tl.minimum(at + i, stop - 1)),)  # type: ignore[assignment]
        else:
            found += (at + i,)  # type: ignore[assignment]
    return found


@triton.jit
def _fade(dt, rate, begin, at, PACKED: tl.constexpr):
    """The decay of the state at a token: exp(Δ A), 0 for the first of a sentence."""
    decay = tl.exp2(dt[None, :, :] * rate)
    if PACKED:
        decay = tl.where(begin == at, 0.0, decay)
    return decay


@triton.jit
def _advance(h, x, dt, key, fade):
    """The state after a token."""
    return fade * h + key[:, None, None] * (dt * x)[None, :, :]


@triton.jit(do_not_specialize=TEXT_SIZES)
def _walk(
    x, steps, b, bias, a, ends, spans, lengths, begins, time, share, segments, features, blocks,
    N: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    STATES: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What each segment adds to the state, and the sum of its time steps."""
    row, segment, part, block, start, stop = _locate(lengths, time, share, segments, blocks, LENGTHS, PARTS)
    feature, state, at, inside = _places(part, block, features, N, STATES, GROUPS, LANES)
    exists, whole = feature < features, row * time
    begins += whole
    rate = tl.load(a + at, mask=inside, other=0.0) * LOG2_E
    shift = tl.load(bias + feature, mask=exists, other=0.0)
    h, span = tl.zeros((STATES, GROUPS, LANES), tl.float32), tl.zeros((GROUPS, LANES), tl.float32)
    for number in range(tl.cdiv(tl.maximum(stop - start, 0), TOKENS)):
        first = start + number * TOKENS
        values = _load_rows(x + whole * features, first, stop, features, feature, exists, TOKENS)
        raw = _load_rows(steps + whole * features, first, stop, features, feature, exists, TOKENS)
        keys = _load_rows(b + whole * N, first, stop, N, state, state < N, TOKENS)
        dt = _time_steps(raw, shift, first, stop, TOKENS)
        begin = _load_begins(begins, first, stop, PACKED, TOKENS)
        for i in tl.static_range(TOKENS):
            h = _advance(h, values[i], dt[i], keys[i], _fade(dt[i], rate, begin[i], first + i, PACKED))
            span += dt[i]
    there = row * segments + segment
    tl.store(ends + there * N * features + at, h, mask=inside)
    tl.store(spans + there * features + feature, span, mask=exists & (part == 0))


@triton.jit(do_not_specialize=TEXT_SIZES)
def _join(
    ends, spans, a, starts, begins, time, share, segments, features,
    N: tl.constexpr, PACKED: tl.constexpr, BACK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """In place, from what each segment adds to what was before it (BACK: to what is behind it)."""
    parts = tl.cdiv(N * features, MANY)
    row = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * MANY + tl.arange(0, MANY)
    inside = at < N * features
    rate = tl.load(a + at, mask=inside, other=0.0) * LOG2_E
    total = tl.load(starts + row * N * features + at, mask=inside, other=0.0)
    for step in range(segments):
        number = segments - 1 - step if BACK else step
        segment = row * segments + number
        more = tl.load(ends + segment * N * features + at, mask=inside, other=0.0)
        span = tl.load(spans + segment * features + at % features, mask=inside, other=0.0)
        tl.store(ends + segment * N * features + at, total, mask=inside)
        fade = tl.exp2(span * rate)
        if PACKED:  # nothing passes through a segment in which a sentence begins
            last = tl.load(begins + row * time + tl.minimum(number * share + share, time) - 1)
            fade = tl.where(last >= number * share, 0.0, fade)
        total = fade * total + more


@triton.jit(do_not_specialize=TEXT_SIZES)
def _outputs(
    x, steps, b, c, bias, a, skip, starts, y, last, lengths, begins, plane, time, share, segments, features, blocks,
    N: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    STATES: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """y, one plane for each part of the states, and the state after the last token."""
    row, segment, part, block, start, stop = _locate(lengths, time, share, segments, blocks, LENGTHS, PARTS)
    feature, state, at, inside = _places(part, block, features, N, STATES, GROUPS, LANES)
    exists, whole = feature < features, row * time
    begins += whole
    rate = tl.load(a + at, mask=inside, other=0.0) * LOG2_E
    shift = tl.load(bias + feature, mask=exists, other=0.0)
    direct = tl.load(skip + feature, mask=exists & (part == 0), other=0.0)
    h = tl.load(starts + (row * segments + segment) * N * features + at, mask=inside, other=0.0)
    for number in range(tl.cdiv(tl.maximum(stop - start, 0), TOKENS)):
        first = start + number * TOKENS
        values = _load_rows(x + whole * features, first, stop, features, feature, exists, TOKENS)
        raw = _load_rows(steps + whole * features, first, stop, features, feature, exists, TOKENS)
        keys = _load_rows(b + whole * N, first, stop, N, state, state < N, TOKENS)
        queries = _load_rows(c + whole * N, first, stop, N, state, state < N, TOKENS)
        dt, found = _time_steps(raw, shift, first, stop, TOKENS), ()
        begin = _load_begins(begins, first, stop, PACKED, TOKENS)
        for i in tl.static_range(TOKENS):
            h = _advance(h, values[i], dt[i], keys[i], _fade(dt[i], rate, begin[i], first + i, PACKED))
            found += (tl.sum(h * queries[i][:, None, None], 0) + direct * values[i],)  # type: ignore[assignment]
        for i in tl.static_range(TOKENS):
            _store_row(y + part * plane + whole * features, found[i], first + i, stop, features, feature, exists)
    tl.store(last + row * N * features + at, h, mask=inside & (segment == segments - 1))


@triton.jit(do_not_specialize=TEXT_SIZES)
def _revisit(
    x, steps, b, c, bias, a, starts, dy, marks, grads, spans, lengths, begins, tiles, time, share, segments, features,
    blocks,
    N: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    STATES: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The state before every TOKENS-th token; what each segment adds to the gradient of the state before it, and the
    sum of its time steps."""
    row, segment, part, block, start, stop = _locate(lengths, time, share, segments, blocks, LENGTHS, PARTS)
    feature, state, at, inside = _places(part, block, features, N, STATES, GROUPS, LANES)
    exists, whole = feature < features, row * time
    begins += whole
    rate = tl.load(a + at, mask=inside, other=0.0) * LOG2_E
    shift = tl.load(bias + feature, mask=exists, other=0.0)
    h = tl.load(starts + (row * segments + segment) * N * features + at, mask=inside, other=0.0)
    g, span = tl.zeros((STATES, GROUPS, LANES), tl.float32), tl.zeros((GROUPS, LANES), tl.float32)
    for number in range(tl.cdiv(tl.maximum(stop - start, 0), TOKENS)):
        first = start + number * TOKENS
        tl.store(marks + (row * tiles + first // TOKENS) * N * features + at, h, mask=inside)
        values = _load_rows(x + whole * features, first, stop, features, feature, exists, TOKENS)
        raw = _load_rows(steps + whole * features, first, stop, features, feature, exists, TOKENS)
        changes = _load_rows(dy + whole * features, first, stop, features, feature, exists, TOKENS)
        keys = _load_rows(b + whole * N, first, stop, N, state, state < N, TOKENS)
        queries = _load_rows(c + whole * N, first, stop, N, state, state < N, TOKENS)
        dt = _time_steps(raw, shift, first, stop, TOKENS)
        begin = _load_begins(begins, first, stop, PACKED, TOKENS)
        for i in tl.static_range(TOKENS):
            h = _advance(h, values[i], dt[i], keys[i], _fade(dt[i], rate, begin[i], first + i, PACKED))
            if segments > 1:
                span += dt[i]
                used = first + i < stop
                if PACKED:  # by a sentence that began before the segment
                    used = used & (begin[i] < start)
                change = tl.where(used, changes[i], 0.0)[None, :, :] * queries[i][:, None, None]
                g += tl.exp2(span[None, :, :] * rate) * change
    there = row * segments + segment
    tl.store(grads + there * N * features + at, g, mask=inside)
    tl.store(spans + there * features + feature, span, mask=exists & (part == 0))


@triton.jit(do_not_specialize=TEXT_SIZES)
def _grad_kernel(
    x, steps, b, c, bias, a, skip, dy, marks, grads, dx, d_steps, d_b, d_c, d_bias, d_a, d_skip, d_start, lengths,
    begins, plane, narrow_plane, bias_plane, tiles, time, share, segments, features, blocks,
    N: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    STATES: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """All gradients, from those of the state after each segment. dx, d_steps, d_bias: a plane for each part of the
    states; d_b, d_c: for each block of features; d_bias, d_a, d_skip: for each row and segment."""
    row, segment, part, block, start, stop = _locate(lengths, time, share, segments, blocks, LENGTHS, PARTS)
    feature, state, at, inside = _places(part, block, features, N, STATES, GROUPS, LANES)
    exists, whole, there = feature < features, row * time, row * segments + segment
    begins += whole
    rate = tl.load(a + at, mask=inside, other=0.0) * LOG2_E
    shift = tl.load(bias + feature, mask=exists, other=0.0)
    direct = tl.load(skip + feature, mask=exists & (part == 0), other=0.0)
    g = tl.load(grads + there * N * features + at, mask=inside, other=0.0)
    on_a = tl.zeros((STATES, GROUPS, LANES), tl.float32)
    on_bias, on_skip = tl.zeros((GROUPS, LANES), tl.float32), tl.zeros((GROUPS, LANES), tl.float32)
    count = tl.cdiv(tl.maximum(stop - start, 0), TOKENS)
    for number in range(count):
        first = start + (count - 1 - number) * TOKENS
        h = tl.load(marks + (row * tiles + first // TOKENS) * N * features + at, mask=inside, other=0.0)
        values = _load_rows(x + whole * features, first, stop, features, feature, exists, TOKENS)
        raw = _load_rows(steps + whole * features, first, stop, features, feature, exists, TOKENS)
        changes = _load_rows(dy + whole * features, first, stop, features, feature, exists, TOKENS)
        keys = _load_rows(b + whole * N, first, stop, N, state, state < N, TOKENS)
        queries = _load_rows(c + whole * N, first, stop, N, state, state < N, TOKENS)
        dt = _time_steps(raw, shift, first, stop, TOKENS)
        narrow = block.to(tl.int64) * narrow_plane + whole * N
        begin = _load_begins(begins, first, stop, PACKED, TOKENS)
        before = (h,)
        for i in tl.static_range(TOKENS):
            fade = _fade(dt[i], rate, begin[i], first + i, PACKED)
            before += (_advance(before[i], values[i], dt[i], keys[i], fade),)  # type: ignore[assignment]
        for i in tl.static_range(TOKENS - 1, -1, -1):
            change = tl.where(first + i < stop, changes[i], 0.0)
            g += change[None, :, :] * queries[i][:, None, None]
            _store_row(
                d_c + narrow, _sum_features(before[i + 1] * change[None, :, :]), first + i, stop, N, state, state < N
            )
            _store_row(
                d_b + narrow, _sum_features(g * (dt[i] * values[i])[None, :, :]), first + i, stop, N, state, state < N
            )
            on_input = tl.sum(g * keys[i][:, None, None], 0)
            g *= _fade(dt[i], rate, begin[i], first + i, PACKED)
            on_rate = g * before[i]
            on_a += on_rate * dt[i][None, :, :]
            on_dt = on_input * values[i] + tl.sum(on_rate * rate, 0) * (1.0 / LOG2_E)
            on_raw = tl.where(first + i < stop, on_dt / (1.0 + tl.exp(-raw[i] - shift)), 0.0)
            on_bias += on_raw
            on_skip += change * values[i]
            on_x = on_input * dt[i] + direct * change
            _store_row(dx + part * plane + whole * features, on_x, first + i, stop, features, feature, exists)
            _store_row(d_steps + part * plane + whole * features, on_raw, first + i, stop, features, feature, exists)
    tl.store(d_a + there * N * features + at, on_a, mask=inside)
    tl.store(d_bias + part * bias_plane + there * features + feature, on_bias, mask=exists)
    tl.store(d_skip + there * features + feature, on_skip, mask=exists & (part == 0))
    tl.store(d_start + row * N * features + at, g, mask=inside & (segment == 0))


class _Cut(NamedTuple):
    """How the work is cut into programs: arguments that all kernels share."""

    time: int
    share: int  # tokens per segment
    segments: int
    features: int
    blocks: int  # of features

    @classmethod
    def of(cls, x: Tensor, parts: int) -> _Cut:
        batch, time, features = x.shape
        blocks = triton.cdiv(features, GROUPS * LANES)
        wanted = min(triton.cdiv(PROGRAMS, batch * blocks * parts), triton.cdiv(time, SHORTEST))
        share = triton.cdiv(triton.cdiv(time, wanted), TOKENS) * TOKENS
        return cls(time, share, triton.cdiv(time, share), features, blocks)


@torch.library.custom_op("allyouneed::selective_scan", mutates_args=())
def _forward(
    x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
    lengths: Tensor | None, begins: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and the states before each segment (batch, segments, N, features)."""
    batch, states, features = state.shape
    parts = triton.cdiv(states, STATES)
    cut, limits = _Cut.of(x, parts), _limits(x, lengths, begins)
    flags = _flags(states, parts, lengths, begins)
    grid = (batch * cut.segments * parts * cut.blocks,)
    starts = state[:, None].clone()
    if cut.segments > 1:
        starts = state.new_empty(batch, cut.segments, states, features)
        spans = state.new_empty(batch, cut.segments, features)
        _walk[grid](x, steps, b, bias, a, starts, spans, *limits, *cut, *flags, num_warps=1)
        _join_segments(starts, spans, a, state, begins, cut, back=False)
    make = torch.empty if lengths is None else torch.zeros
    y = make(parts, *x.shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    last = torch.empty_like(state)
    _outputs[grid](x, steps, b, c, bias, a, skip, starts, y, last, *limits, x.numel(), *cut, *flags, num_warps=1)
    return _sum_planes(y, x.dtype), last, starts


@_forward.register_fake
def _(x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
      *rest: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    segments = _Cut.of(x, triton.cdiv(state.shape[1], STATES)).segments
    starts = state.new_empty(state.shape[0], segments, *state.shape[1:])
    return torch.empty_like(x), torch.empty_like(state), starts


@torch.library.custom_op("allyouneed::selective_scan_backward", mutates_args=())
def _backward(
    dy: Tensor, d_last: Tensor, x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor,
    starts: Tensor, lengths: Tensor | None, begins: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, steps, bias, a, b, c, skip and the first state."""
    batch, _, states, features = starts.shape
    parts = triton.cdiv(states, STATES)
    cut, limits = _Cut.of(x, parts), _limits(x, lengths, begins)
    flags, tiles = _flags(states, parts, lengths, begins), triton.cdiv(cut.time, TOKENS)
    grid = (batch * cut.segments * parts * cut.blocks,)
    dy, end = dy.contiguous(), d_last.float().contiguous()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=x.device)

    marks, grads = empty(batch, tiles, states, features), torch.empty_like(starts)
    spans = empty(batch, cut.segments, features)
    _revisit[grid](x, steps, b, c, bias, a, starts, dy, marks, grads, spans, *limits, tiles, *cut, *flags, num_warps=1)
    if cut.segments > 1:
        _join_segments(grads, spans, a, end, begins, cut, back=True)
    else:
        grads = end
    make = torch.empty if lengths is None else torch.zeros
    wide = torch.float32 if parts > 1 else None
    dx = make(parts, *x.shape, dtype=wide or x.dtype, device=x.device)
    d_steps = make(parts, *x.shape, dtype=wide or steps.dtype, device=x.device)
    d_b, d_c = make(2, cut.blocks, *b.shape, dtype=torch.float32, device=x.device)
    d_a, d_start = torch.empty_like(starts), torch.empty_like(end)
    d_bias, d_skip = empty(parts, batch, cut.segments, features), empty(batch, cut.segments, features)
    _grad_kernel[grid](
        x, steps, b, c, bias, a, skip, dy, marks, grads, dx, d_steps, d_b, d_c, d_bias, d_a, d_skip, d_start,
        *limits, x.numel(), b.numel(), d_skip.numel(), tiles, *cut, *flags, num_warps=1,
    )  # fmt: skip
    return (
        _sum_planes(dx, x.dtype), _sum_planes(d_steps, steps.dtype), d_bias.sum((0, 1, 2)), d_a.sum((0, 1)),
        d_b.sum(0), d_c.sum(0), d_skip.sum((0, 1)), d_start,
    )  # fmt: skip


@_backward.register_fake
def _(dy: Tensor, d_last: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *parts, starts, _, _ = given
    return *(torch.empty_like(part) for part in parts), starts.new_empty(starts.shape[0], *starts.shape[2:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *given, _, lengths, begins = inputs
    ctx.save_for_backward(*given, output[2], lengths, begins)


def _gradients(ctx: Any, dy: Tensor, d_last: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dy, d_last, *ctx.saved_tensors), None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _limits(x: Tensor, lengths: Tensor | None, begins: Tensor | None) -> tuple[Tensor, Tensor]:
    """x where there are none: not read."""
    return x if lengths is None else lengths, x if begins is None else begins


def _flags(states: int, parts: int, lengths: Tensor | None, begins: Tensor | None) -> tuple[int | bool, ...]:
    block = min(STATES, max(2, triton.next_power_of_2(states)))
    return states, begins is not None, lengths is not None, parts, TOKENS, block, GROUPS, LANES


def _join_segments(
    ends: Tensor, spans: Tensor, a: Tensor, start: Tensor, begins: Tensor | None, cut: _Cut, back: bool
) -> None:
    batch, segments, states, features = ends.shape
    many = 128
    grid = (batch * triton.cdiv(states * features, many),)
    packed, places = begins is not None, _limits(a, None, begins)[1]
    _join[grid](ends, spans, a, start, places, *cut[:2], segments, features, states, packed, back, many, num_warps=1)


def _sum_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    return planes[0] if len(planes) == 1 else planes.sum(0).to(dtype)


def selective_scan(
    x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
    lengths: Tensor | None = None, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`selective_ssm` of the first lengths[i] tokens of row i (0 for others), and the state after them. `starts`: of
    packed rows, not with `lengths`."""
    x, steps = x.contiguous(), steps.contiguous()
    rest = [part.float().contiguous() for part in (bias, a, b, c, skip, state)]
    y, last, _ = _forward(x, steps, *rest, lengths, None if starts is None else starts.contiguous())
    return y, last
