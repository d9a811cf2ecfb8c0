"""Several linear maps of the same rows in one launch, limited by reading the weights: what a recurrent mixer projects
from a token. The input of each map may be mixed with the previous token first (RWKV's token shift, Peng et al. 2023,
eq. 11-13): μ ⊙ x + (1 − μ) ⊙ before, with a μ for each map. Accumulation is fp32. The definition: `linear` of each map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs

MOST = 4  # maps of a launch


@triton.jit
def _finish(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "relu-squared":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def _joint(
    x, before, w0, w1, w2, w3, m0, m1, m2, m3, b0, b1, b2, b3, out, rows, total, x_row, inputs: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr,
    MAPS: tl.constexpr, MIX: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`ROWS` 1: one row, without tensor cores."""
    block = tl.program_id(0)
    e0: tl.constexpr = (N0 + OUTPUTS - 1) // OUTPUTS
    e1: tl.constexpr = e0 + (N1 + OUTPUTS - 1) // OUTPUTS
    e2: tl.constexpr = e1 + (N2 + OUTPUTS - 1) // OUTPUTS
    weight, mix, bias, count, first, begin = w0, m0, b0, block * 0 + N0, block * 0, block * 0
    if MAPS > 1:  # noqa: SIM102  # MAPS is a compile-time constant, the block is not
        if block >= e0:
            weight, mix, bias, count, first, begin = w1, m1, b1, block * 0 + N1, block * 0 + N0, block * 0 + e0
    if MAPS > 2:  # noqa: SIM102
        if block >= e1:
            weight, mix, bias, count, first, begin = w2, m2, b2, block * 0 + N2, block * 0 + N0 + N1, block * 0 + e1
    if MAPS > 3:  # noqa: SIM102
        if block >= e2:
            weight, mix, bias, count, begin = w3, m3, b3, block * 0 + N3, block * 0 + e2
            first = block * 0 + N0 + N1 + N2
    n = (block - begin) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = n < count
    here = weight + n[:, None].to(tl.int64) * inputs
    kind = x.dtype.element_ty
    if ROWS == 1:
        at = tl.arange(0, INPUTS)
        tile = tl.load(here + at[None, :], mask=inside[:, None] & (at < inputs)[None, :], other=0.0)
        await_inputs(OVERLAP)
        sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
        for _ in range(0, inputs, INPUTS):
            given = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
            if MIX:
                old = tl.load(before + at, mask=at < inputs, other=0.0).to(tl.float32)
                share = tl.load(mix + at, mask=at < inputs, other=0.0).to(tl.float32)
                given = (old + share * (given - old)).to(kind).to(tl.float32)
            at += INPUTS
            following = tl.load(here + at[None, :], mask=inside[:, None] & (at < inputs)[None, :], other=0.0)
            sums += tile.to(tl.float32) * given[None, :]
            tile = following
        found = tl.sum(sums, 1)
        if BIAS:
            found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        target = out + first + n
        keep = inside
    else:
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        await_inputs(OVERLAP)
        found = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for start in range(0, inputs, INPUTS):
            at = start + tl.arange(0, INPUTS)
            spot = r[None, :].to(tl.int64) * x_row + at[:, None]
            real = (r < rows)[None, :] & (at < inputs)[:, None]
            given = tl.load(x + spot, mask=real, other=0.0)  # (INPUTS, ROWS)
            if MIX:
                spot = r[None, :].to(tl.int64) * inputs + at[:, None]
                old = tl.load(before + spot, mask=real, other=0.0).to(tl.float32)
                share = tl.load(mix + at, mask=at < inputs, other=0.0).to(tl.float32)[:, None]
                given = (old + share * (given.to(tl.float32) - old)).to(kind)
            tile = tl.load(here + at[None, :], mask=inside[:, None] & (at < inputs)[None, :], other=0.0)
            found = tl.dot(tile, given, found)
        if BIAS:
            found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        target = out + r[None, :].to(tl.int64) * total + (first + n)[:, None]
        keep = inside[:, None] & (r < rows)[None, :]
    if begin == 0:
        found = _finish(found, A0)
    if MAPS > 1:  # noqa: SIM102
        if begin == e0:
            found = _finish(found, A1)
    if MAPS > 2:  # noqa: SIM102
        if begin == e1:
            found = _finish(found, A2)
    if MAPS > 3:  # noqa: SIM102
        if begin == e2:
            found = _finish(found, A3)
    tl.store(target, found.to(kind), mask=keep)


def joint_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str] = (),
    before: Tensor | None = None, mixes: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """x (rows, inputs), weights (outputs, inputs) each, to (rows, outputs) each, side by side in memory. `activations`:
    "", "silu", "sigmoid" or "relu-squared" of each map. `before` (rows, inputs) and `mixes` (inputs,): see above.
    Either all maps have a bias or none."""
    (rows, inputs), count = x.shape, len(weights)
    assert x.stride(1) == 1 and 0 < count <= MOST and all(weight.is_contiguous() for weight in weights)
    assert before is None or (before.is_contiguous() and len(mixes) == count)
    sizes = [weight.shape[0] for weight in weights] + [0] * (MOST - count)
    names = [*(activations or [""] * count), *[""] * (MOST - count)]
    padded = [*weights, *[weights[0]] * (MOST - count)]
    shares = [*mixes, *[weights[0]] * (MOST - len(mixes))]
    shifts = [x if bias is None else bias for bias in biases] + [x] * (MOST - count)
    total = sum(sizes)
    out = torch.empty(rows, total, dtype=x.dtype, device=x.device)
    among = 1 if rows == 1 else min(64, max(16, triton.next_power_of_2(rows)))
    tile = {"OUTPUTS": 4, "INPUTS": 512, "num_warps": 2, "num_stages": 2}
    if rows == 1 and inputs >= 1024:
        tile |= {"OUTPUTS": 2, "INPUTS": 1024}
    if rows > 1:  # enough programs to occupy the GPU
        few = total * triton.cdiv(rows, 64) < 64 * 132
        tile = {"OUTPUTS": 32 if few else 64, "INPUTS": 128, "num_warps": 4, "num_stages": 4}
    blocks = sum(triton.cdiv(size, tile["OUTPUTS"]) for size in sizes)
    _joint[(blocks, triton.cdiv(rows, among))](
        x, x if before is None else before, *padded, *shares, *shifts, out, rows, total, x.stride(0), inputs,
        *sizes, *names, MAPS=count, MIX=before is not None, BIAS=biases[0] is not None, ROWS=among,
        OVERLAP=has_pdl(x.device), launch_pdl=has_pdl(x.device), **tile,
    )  # fmt: skip
    return list(out.split(sizes[:count], -1))
