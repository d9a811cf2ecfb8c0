"""Linear maps of few rows, each with the weights of its own experts, limited by reading the weights: an expert without
rows reads nothing. Weights stay where the experts have them: a table holds their addresses. Accumulation is fp32.

`expert_linear` takes rows sorted by expert; the definition is `nn/ops/experts.py`. The others are one decode step of a
mixture of experts (`nn/channels/moe.py`), one launch each: `route` chooses the experts of every token, `expert_up`
computes the hidden layer of every choice, `expert_down` the weighted outputs, whose sum the next norm takes
(add_norm.py). Nothing is sorted. Up to `EACH_ALONE` choices are products of a vector each; above, an expert multiplies
all rows of a tile and stores those that chose it, which costs nothing while reading the weights takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs
from allyouneed.kernels.triton.small_batch_linear import _activate

ROWS = 16  # rows of a tile, the fewest of a matrix product
INPUTS = 128  # inputs of a tile


@triton.jit
def _linear(
    x, like, bias_like, weights, biases, ends, out, outputs, inputs: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight = tl.multiple_of(tl.load(weights + expert).to(like.dtype), 16)
    here = weight + n[:, None].to(tl.int64) * inputs
    shift = tl.zeros((OUTPUTS,), tl.float32)
    if BIAS:
        bias = tl.load(biases + expert).to(bias_like.dtype)
        shift += tl.load(bias + n, mask=(n < outputs) & (start < stop), other=0.0).to(tl.float32)
    for tile in range(tl.cdiv(stop - start, ROWS)):
        row = start + tile * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32) + shift[None, :]
        for first in range(0, inputs, INPUTS):
            at = first + tl.arange(0, INPUTS)
            a = tl.load(x + row[:, None] * inputs + at[None, :], mask=(row < stop)[:, None] & (at < inputs), other=0.0)
            w = tl.load(here + at[None, :], mask=(n < outputs)[:, None] & (at < inputs), other=0.0)
            total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
        inside = (row < stop)[:, None] & (n < outputs)[None, :]
        tl.store(out + row[:, None] * outputs + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@cache  # never dropped: a captured graph may read it; addresses alone decide, so it cannot be stale
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def expert_linear(x: Tensor, maps: Sequence[nn.Linear], ends: Tensor) -> Tensor:
    """x (rows, inputs) sorted by expert, in the dtype of the weights; ends (experts,): the end of each one's rows."""
    (rows, inputs), first = x.shape, maps[0]
    outputs = first.out_features
    weights = _table(tuple(one.weight.data_ptr() for one in maps), x.device)
    bias = first.bias is not None
    biases = _table(tuple(one.bias.data_ptr() for one in maps), x.device) if bias else weights
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block = 32 if outputs >= 2048 else 16
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    _linear[(len(maps), triton.cdiv(outputs, block))](
        x.contiguous(), first.weight, first.bias if bias else first.weight, weights, biases, ends, out, outputs, inputs,
        bias, ROWS, block, min(INPUTS, max(16, triton.next_power_of_2(inputs))), precision, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


# --- a decode step ----------------------------------------------------------------------------------------------------

EACH_ALONE = 8  # choices up to which each is a product of its own


@triton.jit
def _route(
    x, weight, bias, correction, chosen, scores_out, x_row, part, scale, inputs: tl.constexpr,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr,
    TOP_WIDE: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIAS: tl.constexpr,
    CORRECTION: tl.constexpr, GROUPS: tl.constexpr, GROUPS_WIDE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """PARTS > 0: x holds the logits already, in parts to add up."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDE)
    known = e < EXPERTS
    await_inputs(OVERLAP)
    if PARTS > 0:
        logits = tl.zeros((WIDE,), tl.float32)
        for number in tl.static_range(PARTS):
            logits += tl.load(x + number * part + row * x_row + e, mask=known, other=0.0).to(tl.float32)
    else:
        sums = tl.zeros((WIDE, INPUTS), tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            given = tl.load(x + row * x_row + at, mask=at < inputs, other=0.0).to(tl.float32)
            real = known[:, None] & (at < inputs)[None, :]
            tile = tl.load(weight + e[:, None] * inputs + at[None, :], mask=real, other=0.0)
            sums += tile.to(tl.float32) * given[None, :]
        logits = tl.sum(sums, 1)
    if BIAS:
        logits += tl.load(bias + e, mask=known, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = tl.where(known, tl.sigmoid(logits), 0.0)
    else:
        logits = tl.where(known, logits, float("-inf"))
        mass = tl.exp(logits - tl.max(logits, 0))
        scores = mass / tl.sum(mass, 0)
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction + e, mask=known, other=0.0).to(tl.float32)
    ranked = tl.where(known, ranked, float("-inf"))
    if GROUPS > 0:
        size: tl.constexpr = EXPERTS // GROUPS
        g = tl.arange(0, GROUPS_WIDE)
        inside = (e // size)[None, :] == g[:, None]
        grouped = tl.where(inside & known[None, :], ranked[None, :], float("-inf"))  # (groups, experts)
        best = tl.max(grouped, 1)
        if TWO_BEST:
            first = tl.argmax(grouped, 1)
            best += tl.max(tl.where(e[None, :] == first[:, None], float("-inf"), grouped), 1)
        best = tl.where(g < GROUPS, best, float("-inf"))
        allowed = tl.zeros((WIDE,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            group = tl.argmax(best, 0)
            allowed = tl.where(e // size == group, 1, allowed)
            best = tl.where(g == group, float("-inf"), best)
        ranked = tl.where(allowed > 0, ranked, float("-inf"))
    k = tl.arange(0, TOP_WIDE)
    found = tl.zeros((TOP_WIDE,), tl.float32)
    experts = tl.zeros((TOP_WIDE,), tl.int32)
    for number in tl.static_range(TOP):
        one = tl.minimum(tl.argmax(ranked, 0), EXPERTS - 1)  # an expert even if scores are not a number
        found = tl.where(k == number, tl.sum(tl.where(e == one, scores, 0.0), 0), found)
        experts = tl.where(k == number, one, experts)
        ranked = tl.where(e == one, float("-inf"), ranked)
    if NORMALISE:
        found = found / (tl.sum(found, 0) + 1e-20)
    tl.store(chosen + row * TOP + k, experts, mask=k < TOP)
    tl.store(scores_out + row * TOP + k, found * scale, mask=k < TOP)


@triton.jit
def _one_choice(
    x, like, bias_like, weights, biases, chosen, scores, shared, out, outputs, inputs: tl.constexpr, x_row, rows,
    TOP: tl.constexpr, DOWN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The product of one vector, without tensor cores."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    choice = tl.program_id(1)
    row, k = choice // TOP, choice % TOP
    inside = n < outputs
    await_inputs(OVERLAP)
    expert = tl.load(chosen + choice)
    here = tl.multiple_of(tl.load(weights + expert).to(like.dtype), 16) + n[:, None].to(tl.int64) * inputs
    there = here + tl.cast(outputs, tl.int64) * inputs
    given_at = x + (choice if DOWN else row).to(tl.int64) * x_row
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    other = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in tl.static_range(0, inputs, INPUTS):  # unrolled: loads need not wait for sums
        at = start + tl.arange(0, INPUTS)
        real = inside[:, None] & (at < inputs)[None, :]
        tile = tl.load(here + at[None, :], mask=real, other=0.0)
        given = tl.load(given_at + at, mask=at < inputs, other=0.0).to(tl.float32)[None, :]
        if GATED:
            other += tl.load(there + at[None, :], mask=real, other=0.0).to(tl.float32) * given
        sums += tile.to(tl.float32) * given
    found = tl.sum(sums, 1)
    gate = tl.sum(other, 1)
    if BIAS:
        bias = tl.load(biases + expert).to(bias_like.dtype)
        found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate += tl.load(bias + outputs + n, mask=inside, other=0.0).to(tl.float32)
    found = _activate(found, ACTIVATION)
    if GATED:
        found *= gate
    target = choice
    if DOWN:
        found *= tl.load(scores + choice)
        if SHARED:
            found += tl.load(shared + row * outputs + n, mask=inside & (k == 0), other=0.0).to(tl.float32)
        target = k * rows + row
    tl.store(out + target.to(tl.int64) * outputs + n, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _all_choices(
    x, like, bias_like, weights, biases, chosen, scores, shared, out, outputs, inputs: tl.constexpr, x_row, rows,
    TOP: tl.constexpr, DOWN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All rows of a tile by one expert; those that chose it are stored."""
    expert, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = n < outputs
    each: tl.constexpr = (inputs + PARTS * INPUTS - 1) // (PARTS * INPUTS) * INPUTS
    here = tl.multiple_of(tl.load(weights + expert).to(like.dtype), 16) + n[:, None].to(tl.int64) * inputs
    there = here + tl.cast(outputs, tl.int64) * inputs
    await_inputs(OVERLAP)
    k = tl.full((ROWS,), -1, tl.int32)  # as which of its choices a row has this expert
    for number in tl.static_range(TOP):
        k = tl.where(tl.load(chosen + r * TOP + number, mask=r < rows, other=-1) == expert, number, k)
    if tl.max(k, 0) >= 0:
        mine = k >= 0
        choice = r * TOP + k
        given_at = x + ((choice if DOWN else r).to(tl.int64) * x_row)[None, :]
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        other = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for start in range(0, each, INPUTS):
            at = part * each + start + tl.arange(0, INPUTS)
            real = inside[:, None] & (at < inputs)[None, :]
            given = tl.load(given_at + at[:, None], mask=mine[None, :] & (at < inputs)[:, None], other=0.0)
            sums = tl.dot(tl.load(here + at[None, :], mask=real, other=0.0), given, sums, input_precision=PRECISION)
            if GATED:
                gate = tl.load(there + at[None, :], mask=real, other=0.0)
                other = tl.dot(gate, given, other, input_precision=PRECISION)
        if BIAS:
            bias = tl.load(biases + expert).to(bias_like.dtype)
            sums += tl.load(bias + n, mask=inside & (part == 0), other=0.0).to(tl.float32)[:, None]
            if GATED:
                other += tl.load(bias + outputs + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        found = _activate(sums, ACTIVATION)
        if GATED:
            found *= other
        target = choice
        real = inside[:, None] & mine[None, :]
        if DOWN:
            found *= tl.load(scores + choice, mask=mine, other=0.0)[None, :]
            if SHARED:
                first = real & (k == 0)[None, :] & (part == 0)
                found += tl.load(shared + r[None, :] * outputs + n[:, None], mask=first, other=0.0).to(tl.float32)
            target = (k * PARTS + part) * rows + r
        tl.store(out + target.to(tl.int64)[None, :] * outputs + n[:, None], found.to(out.dtype.element_ty), mask=real)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top: int, sigmoid: bool = False, normalise: bool = False,
    scale: float = 1.0, correction: Tensor | None = None, groups: tuple[int, int, bool] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (rows, inputs), or parts of its logits (parts, rows, experts); weight (experts, inputs). Experts and their
    weights, best first: (rows, top) each. `groups`: their number, how many of them are used, and whether their two best
    experts count."""
    experts, inputs = weight.shape
    rows, device = x.shape[-2], x.device
    assert x.stride(-1) == 1 and weight.is_contiguous()
    chosen = torch.empty(rows, top, dtype=torch.int32, device=device)
    scores = torch.empty(rows, top, dtype=torch.float32, device=device)
    wide = max(2, triton.next_power_of_2(experts))
    count, used, two = groups or (0, 0, False)
    _route[(rows,)](
        x, weight, x if bias is None else bias, x if correction is None else correction, chosen, scores, x.stride(-2),
        x.stride(0), scale, inputs, EXPERTS=experts, WIDE=wide, PARTS=x.shape[0] if x.dim() == 3 else 0,
        INPUTS=min(max(8192 // wide, 16), triton.next_power_of_2(inputs)), TOP=top,
        TOP_WIDE=max(2, triton.next_power_of_2(top)), SIGMOID=sigmoid, NORMALISE=normalise, BIAS=bias is not None,
        CORRECTION=correction is not None, GROUPS=count, GROUPS_WIDE=max(2, triton.next_power_of_2(count or 1)),
        TOP_GROUPS=used, TWO_BEST=two, OVERLAP=has_pdl(device), launch_pdl=has_pdl(device), num_warps=8,
    )  # fmt: skip
    return chosen, scores


def expert_up(
    x: Tensor, maps: Sequence[nn.Linear], chosen: Tensor, activation: str = "", gated: bool = False
) -> Tensor:
    """x (rows, inputs), chosen (rows, top): the hidden layer of every choice (rows · top, outputs). `gated`: the
    activated first half of the outputs times the second."""
    outputs = maps[0].out_features // (2 if gated else 1)
    out = torch.empty(chosen.numel(), outputs, dtype=x.dtype, device=x.device)
    _launch(x, maps, chosen, None, None, out, 1, GATED=gated, ACTIVATION=activation)
    return out


def expert_down(
    hidden: Tensor, maps: Sequence[nn.Linear], chosen: Tensor, scores: Tensor, shared: Tensor | None = None
) -> Tensor:
    """hidden (rows · top, inputs), scores (rows, top): outputs times their scores in fp32 parts (parts, rows, outputs),
    whose sum is the result. `shared` (rows, outputs) is added."""
    (rows, top), outputs = chosen.shape, maps[0].out_features
    parts = 1
    if rows * top > EACH_ALONE and len(maps) * triton.cdiv(outputs, 64) < 132 and top <= 4:
        parts = 2  # too few programs to occupy the GPU
    out = torch.empty(top * parts, rows, outputs, dtype=torch.float32, device=hidden.device)
    _launch(hidden, maps, chosen, scores, shared, out, parts, GATED=False, ACTIVATION="")
    return out


def _launch(
    x: Tensor, maps: Sequence[nn.Linear], chosen: Tensor, scores: Tensor | None, shared: Tensor | None, out: Tensor,
    parts: int, **how: Any,
) -> None:  # fmt: skip
    first, (rows, top) = maps[0], chosen.shape
    inputs, outputs = first.in_features, out.shape[-1]
    assert x.stride(1) == 1
    weights, bias = _table(tuple(one.weight.data_ptr() for one in maps), x.device), first.bias is not None
    biases = _table(tuple(one.bias.data_ptr() for one in maps), x.device) if bias else weights
    given: tuple[Any, ...] = (x, first.weight, first.bias if bias else first.weight, weights, biases, chosen)
    given += (x if scores is None else scores, x if shared is None else shared.contiguous(), out, outputs, inputs)
    given += (x.stride(0), rows)
    how |= {"TOP": top, "DOWN": scores is not None, "BIAS": bias, "SHARED": shared is not None}
    how |= {"OVERLAP": has_pdl(x.device), "launch_pdl": has_pdl(x.device)}
    if rows * top <= EACH_ALONE:
        wide = min(1024, triton.next_power_of_2(inputs))
        _one_choice[(triton.cdiv(outputs, 2), rows * top)](*given, **how, OUTPUTS=2, INPUTS=wide, num_warps=2)
        return
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    _all_choices[(triton.cdiv(outputs, 64), len(maps) * parts, triton.cdiv(rows, tile))](
        *given, **how, PARTS=parts, ROWS=tile, OUTPUTS=64, INPUTS=min(64, max(16, triton.next_power_of_2(inputs))),
        PRECISION=precision, num_warps=4, num_stages=6 if how["GATED"] and x.dtype != torch.float32 else 4,
    )  # fmt: skip
