"""One token per row and the compressive memory of Infini-attention, a matrix per head that is updated in place
(Munkhdalai et al. 2024, eq. 3-5, 7). Definition: nn/mixers/attention/infini.py; the form of the states:
runtime/cuda/constant_states.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from allyouneed.kernels import has_pdl
from allyouneed.kernels.triton import await_inputs


@triton.jit
def _infini_step(
    q, k, v, near, places, positions, gates, memory, following, out, row_stride, segment, least,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, DELTA: tl.constexpr, LOCAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and head: memory and `following` are (width + 1, width), the last row the normaliser z. What a step
    begins with has been stored by the step before, so it is read before the kernels in front of this one have ended."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.arange(0, WIDE)
    known = f < WIDTH
    base = (row * HEADS + head) * WIDTH * (WIDTH + 1)
    spot, both = base + f[:, None] * WIDTH + f[None, :], known[:, None] & known[None, :]
    last = base + WIDTH * WIDTH + f
    next_sums = tl.load(following + spot, mask=both, other=0.0)
    next_z = tl.load(following + last, mask=known, other=0.0)
    sums = tl.load(memory + spot, mask=both, other=0.0)
    z = tl.load(memory + last, mask=known, other=0.0)
    await_inputs(OVERLAP)
    begins = tl.load(places + row) == 0
    at = row * row_stride + head * WIDTH + f
    key, query = tl.load(k + at, mask=known, other=0.0), tl.load(q + at, mask=known, other=0.0)
    key, query = key.to(tl.float32), query.to(tl.float32)
    key = tl.where(known, tl.where(key > 0, key + 1.0, tl.exp(key)), 0.0)  # elu + 1
    query = tl.where(known, tl.where(query > 0, query + 1.0, tl.exp(query)), 0.0)
    value = tl.load(v + at, mask=known, other=0.0).to(tl.float32)
    sums, z = tl.where(begins, next_sums, sums), tl.where(begins, next_z, z)
    if begins:
        tl.store(memory + spot, sums, mask=both)
        tl.store(memory + last, z, mask=known)
    if DELTA:
        value -= tl.sum(key[None, :] * sums, 1) / tl.maximum(tl.sum(key * z, 0), least)
    tl.store(following + spot, next_sums + value[:, None] * key[None, :], mask=both)
    tl.store(following + last, next_z + key, mask=known)
    far = tl.sum(query[None, :] * sums, 1) / tl.maximum(tl.sum(query * z, 0), least)
    gate = tl.sigmoid(tl.load(gates + head).to(tl.float32))
    if LOCAL:
        gate = tl.where(tl.load(positions + row) >= segment, gate, 0.0)
    target = (row * HEADS + head) * WIDTH + f
    found = gate * far + (1.0 - gate) * tl.load(near + target, mask=known, other=0.0).to(tl.float32)
    tl.store(out + target, found.to(out.dtype.element_ty), mask=known)


def infini_step(
    qkv: Tensor, near: Tensor, places: Tensor, positions: Tensor, gates: Tensor, memory: Tensor, following: Tensor,
    segment: int, delta: bool, local: bool, least: float,
) -> Tensor:  # fmt: skip
    """`near` (rows, heads, width) is the local attention, `places` (rows,) the position in the segment. `memory` and
    `following` (rows, heads, width, width + 1), stored by columns, are updated. The result: (rows, heads · width)."""
    rows, heads, width, _ = memory.shape
    memory, following = memory.mT, following.mT
    assert all(x.is_contiguous() for x in (near, memory, following)) and qkv.stride(1) == 1
    q, k, v = qkv.split(heads * width, -1)
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    _infini_step[(rows, heads)](
        q, k, v, near, places, positions, gates, memory, following, out, qkv.stride(0), segment, least, HEADS=heads,
        WIDTH=width, WIDE=triton.next_power_of_2(width), DELTA=delta, LOCAL=local, OVERLAP=has_pdl(qkv.device),
        launch_pdl=has_pdl(qkv.device), num_warps=4,
    )  # fmt: skip
    return out
