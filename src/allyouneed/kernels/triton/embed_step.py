"""How a step begins: each row's place, the vector of its newest token with that of its place, and its turn. No kernel
of the step begins before this one has ended: they read places and tables before they wait for each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _begin(
    tokens, lengths, vectors, positions, turns, table, places, out, turned, last, scale, table_row,
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
        tl.store(turned + row * turn + g, tl.load(turns + at * turn + g, mask=g < turn, other=0.0), mask=g < turn)
    if TABLE:
        tl.store(table + row * table_row + at, row.to(tl.int32))
    tl.store(places + row, at)
    tl.store(lengths + row, length + 1)


def begin(
    tokens: Tensor, lengths: Tensor, last: int, vectors: Tensor, scale: float, positions: Tensor | None,
    turns: Tensor | None, table: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Of rows that have so many tokens, and one more now: x (rows, width), their places (rows,), which are `last` at
    most, and their turns. `vectors` (vocab, width) are scaled, `positions` and `turns` (places, …) looked up, and the
    `table` (rows, places) says that the new token of a row lies in that row."""
    rows, width = len(tokens), vectors.shape[1]
    assert all(part is None or part.is_contiguous() for part in (vectors, positions, turns, table))
    x, places = torch.empty(rows, width, dtype=vectors.dtype, device=vectors.device), torch.empty_like(lengths)
    turn = 1 if turns is None else turns.shape[1]
    turned = None if turns is None else torch.empty(rows, turn, dtype=turns.dtype, device=turns.device)
    _begin[(rows,)](
        tokens, lengths, vectors, x if positions is None else positions, x if turns is None else turns,
        x if table is None else table, places, x, x if turned is None else turned, last, scale,
        0 if table is None else table.stride(0), width=width, WIDE=triton.next_power_of_2(width), turn=turn,
        TURN=triton.next_power_of_2(turn), PLACED=positions is not None, TURNS=turns is not None,
        TABLE=table is not None, num_warps=4,
    )  # fmt: skip
    return x, places, turned
