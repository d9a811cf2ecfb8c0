"""FlexAttention (GPU) over tiles: its block mask is made of the tiles themselves, so no mask of n × n is ever written.

The table of block numbers that the kernel wants has (time / 128)² entries of four bytes: a megabyte for 64k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.ops.attention.block_mask import Side, Tiling
from allyouneed.nn.ops.attention.block_sparse import join
from allyouneed.nn.ops.attention.dense import Plan, ScoreMod
from allyouneed.nn.patterns.core import Place

FLEX_BLOCK = 128
FEW = 1 << 18  # pairs of blocks: so many are asked about one by one, without waiting for the device


@cache
def _compiled_flex() -> Any:
    import torch._dynamo.config as dynamo
    from torch.nn.attention.flex_attention import flex_attention

    # one kernel for each pattern and (rounded) length; past the limit torch would silently compute all n × n scores
    dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False)


Look = Callable[
    [Tensor, Tensor], tuple[Place, Tensor]
]  # (row, index) -> the place of that token, and whether it is one


def _looking(side: Side) -> Look:
    """Counted where rows just count on, looked up where not: in a kernel a look-up is a memory access per score."""

    def table(fact: Tensor | None) -> Tensor | None:
        return None if fact is None else fact.reshape(side.rows, -1)

    said = [table(fact) for fact in side.place[2:]]
    if side.start is not None:
        start, time = side.start, side.time

        def counted(row: Tensor, index: Tensor) -> tuple[Place, Tensor]:
            more = [None if fact is None else fact[row, index] for fact in said]
            return Place(index + start, torch.ones_like(index), *more), index < time

        return counted
    # 32 bits and two look-ups: with more the kernel runs out of registers and takes thirty times as long
    position = side.place.position.reshape(side.rows, -1).to(torch.int32)
    segment = side.place.segment.where(side.inside, 0).reshape(side.rows, -1).to(torch.int32)

    def looked_up(row: Tensor, index: Tensor) -> tuple[Place, Tensor]:
        more = [None if fact is None else fact[row, index] for fact in said]
        number = segment[row, index]
        return Place(position[row, index], number, *more), number > 0

    return looked_up


def _longest(side: Side) -> int:
    """Above every position; asks the device where rows do not just count on."""
    return int(side.place.position.max()) + 1 if side.start is None else side.start + side.blocks * side.block


def mask_mod(part: Tiling) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The pattern as FlexAttention asks for it: one place at a time, of the tokens in their new order."""
    alike, query, key = part.rows == 1, _looking(part.query), _looking(part.key)
    rule = part.rule.quick(lambda: max(_longest(part.query), _longest(part.key)), part.query.tokens.device)

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = batch * 0 if alike else batch
        there, real = key(row, k)
        return rule(query(row, q)[0], there) & real

    return allowed


def block_mask(part: Tiling) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def table(there: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of keys each block of queries has, and which, those first."""
        which = there.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return there.sum(-1, dtype=torch.int32)[:, None], which.to(torch.int32)[:, None]

    def chosen(pairs: Tensor) -> Tensor:
        there = torch.zeros(part.rows, part.query.blocks, part.key.blocks, dtype=torch.bool, device=pairs.device)
        there[part.row[pairs], part.q[pairs], part.k[pairs]] = True
        return there

    lengths = (part.query.blocks * part.block, part.key.blocks * part.block)
    if part.rows * part.query.blocks * part.key.blocks <= FEW:
        some, every = part.grid()
        partly, whole = table(some & ~every), table(every)
    else:
        partly, whole = table(chosen(~part.full)), table(chosen(part.full))
    return BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=part.block, mask_mod=mask_mod(part), seq_lengths=lengths
    )


class Flex:
    """A plan; `otherwise` makes one for what the kernel cannot do: dropout, odd head widths."""

    def __init__(self, parts: Sequence[Tiling], otherwise: Callable[[], Plan]) -> None:
        self.parts, self.masks = list(parts), [block_mask(part) for part in parts]
        self.otherwise = otherwise

    @cached_property
    def fallback(self) -> Plan:
        return self.otherwise()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        odd = any(x.shape[-1] < 16 or x.shape[-1] & (x.shape[-1] - 1) for x in (q, v))
        if dropout or odd or not score_mod.plain:
            return self.fallback(q, k, v, dropout, score_mod)
        if len(self.parts) == 1:
            return self._part(0, q, k, v, score_mod.scale, False)[0]
        found = [self._part(number, q, k, v, score_mod.scale, True) for number in range(len(self.parts))]
        return join([out for out, _ in found], [lse for _, lse in found])

    def _part(self, number: int, q: Tensor, k: Tensor, v: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        part, gqa = self.parts[number], q.shape[1] != k.shape[1]
        moved = [_moved(x, side) for x, side in ((q, part.query), (k, part.key), (v, part.key))]
        out, aux = (flex_attention if torch.compiler.is_compiling() else _compiled_flex())(
            *moved, block_mask=self.masks[number], scale=scale, enable_gqa=gqa, return_aux=AuxRequest(lse=lse)
        )
        return _back(out, part.query), _back(aux.lse[..., None], part.query)[..., 0] if lse else out


def _stays(side: Side) -> bool:
    return not side.sorted and side.time == side.blocks * side.block


def _moved(x: Tensor, side: Side) -> Tensor:
    """(batch, heads, time, …) in the side's order, filled up to whole blocks."""
    if _stays(side):
        return x
    if side.rows == 1:
        return x.index_select(2, side.tokens.flatten())
    flat = x.transpose(1, 2).flatten(0, 1).index_select(0, side.tokens.flatten())
    return flat.unflatten(0, (side.rows, -1)).transpose(1, 2)


def _back(x: Tensor, side: Side) -> Tensor:
    if _stays(side):
        return x
    if side.rows == 1:
        return x.index_select(2, side.slots)
    flat = x.transpose(1, 2).flatten(0, 1).index_select(0, side.slots)
    return flat.unflatten(0, (side.rows, -1)).transpose(1, 2)
