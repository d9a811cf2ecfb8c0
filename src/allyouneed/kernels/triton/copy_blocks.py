"""Copies rows of a paged KV cache into rows that hold all their tokens in one piece (nn/ops/attention/decode.py
`copy_blocks`). A row's blocks are read where they lie; rows without tokens cost nothing."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_blocks(
    storage, table, target, rows, counts, entries, heads, block_numbers, capacity_numbers, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row and head; `block_numbers`, `capacity_numbers`: of a block and of a whole row, in one head."""
    row, entry, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if entry * size < tl.load(counts + row):
        block = tl.load(table + row * entries + entry).to(tl.int64)
        to = tl.load(rows + row).to(tl.int64)
        at = tl.arange(0, BLOCK)
        there = entry * block_numbers + at  # in a row of the target
        inside = (at < block_numbers) & (there < capacity_numbers)
        values = tl.load(storage + (block * heads + head) * block_numbers + at, mask=inside, other=0.0)
        here = target + (to * heads + head) * capacity_numbers + there
        tl.store(here, values.to(target.dtype.element_ty), mask=inside)


def copy_blocks(storage: Tensor, table: Tensor, target: Tensor, rows: Tensor, counts: Tensor) -> None:
    """`storage` (blocks, heads, size, width), `table` (n, entries), `target` (rows, heads, capacity, width), all
    contiguous; `rows` and `counts` (n,)."""
    (_, heads, size, width), capacity = storage.shape, target.shape[2]
    entries = min(table.shape[1], -(-capacity // size))
    numbers = size * width
    _copy_blocks[(len(rows), entries, heads)](
        storage, table, target, rows, counts, table.shape[1], heads, numbers, capacity * width, size,
        BLOCK=triton.next_power_of_2(numbers),
    )  # fmt: skip
