"""First kernel of a decode step: position, token and position embedding, and rotary table row of each row's newest
token. It ends before the other kernels start, which read positions and tables before waiting for each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed_step(
    tokens, lengths, vectors, positions, rotations, table, positions_out, out, rotation, last, scale, table_row,
    width: tl.constexpr, WIDE: tl.constexpr, turn: tl.constexpr, TURN: tl.constexpr,
    PLACED: tl.constexpr, TURNS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    at = tl.minimum(length, last)
    f = tl.arange(0, WIDE)
    inside = f < width
    x = tl.load(vectors + tl.load(tokens + row) * width + f, mask=inside, other=0.0).to(tl.float32) * scale
    if PLACED:
        x += tl.load(positions + at * width + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + f, x.to(out.dtype.element_ty), mask=inside)
    if TURNS:
        g = tl.arange(0, TURN)
        tl.store(rotation + row * turn + g, tl.load(rotations + at * turn + g, mask=g < turn, other=0.0), mask=g < turn)
    if TABLE:
        tl.store(table + row * table_row + at, row.to(tl.int32))
    tl.store(positions_out + row, at)
    tl.store(lengths + row, length + 1)


def embed_step(
    tokens: Tensor, lengths: Tensor, last: int, vectors: Tensor, scale: float, positions: Tensor | None,
    rotations: Tensor | None, table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """For rows of `lengths` tokens plus a new one: x (rows, width), positions (rows,), at most `last`, and rotary rows.
    `vectors` (vocab, width) are scaled, `positions` and `rotations` (positions, …) looked up, and `table` (rows,
    positions) maps each new token to its own row."""
    rows, width = len(tokens), vectors.shape[1]
    assert all(part is None or part.is_contiguous() for part in (vectors, positions, rotations, table))
    x, positions_out = torch.empty(rows, width, dtype=vectors.dtype, device=vectors.device), torch.empty_like(lengths)
    turn = 1 if rotations is None else rotations.shape[1]
    rotation = None if rotations is None else torch.empty(rows, turn, dtype=rotations.dtype, device=rotations.device)
    _embed_step[(rows,)](
        tokens, lengths, vectors, x if positions is None else positions, x if rotations is None else rotations,
        x if table is None else table, positions_out, x, x if rotation is None else rotation, last, scale,
        0 if table is None else table.stride(0), width=width, WIDE=triton.next_power_of_2(width), turn=turn,
        TURN=triton.next_power_of_2(turn), PLACED=positions is not None, TURNS=rotations is not None,
        TABLE=table is not None, num_warps=4,
    )  # fmt: skip
    return x, positions_out, rotation
