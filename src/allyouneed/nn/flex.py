"""FlexAttention (GPU) over tiles: its block mask is made of the tiles themselves, so no mask of n × n is ever written.

The table of block numbers that the kernel wants has (time / 128)² entries of four bytes: a megabyte for 64k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.dense import Manner, Plan
from allyouneed.nn.patterns import Place
from allyouneed.nn.tiled import join
from allyouneed.nn.tiles import Side, Tiling

FLEX_BLOCK = 128


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
    position, segment = (fact.reshape(side.rows, -1).to(torch.int32) for fact in side.place[:2])
    real = ((side.place.segment > 0) & side.inside).reshape(side.rows, -1)

    def looked_up(row: Tensor, index: Tensor) -> tuple[Place, Tensor]:
        more = [None if fact is None else fact[row, index] for fact in said]
        return Place(position[row, index].long(), segment[row, index].long(), *more), real[row, index]

    return looked_up


def mask_mod(part: Tiling) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The pattern as FlexAttention asks for it: one place at a time, of the tokens in their new order."""
    alike, query, key = part.rows == 1, _looking(part.query), _looking(part.key)

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = batch * 0 if alike else batch
        there, real = key(row, k)
        return part.rule.allowed(query(row, q)[0], there) & real

    return allowed


def block_mask(part: Tiling) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def table(pairs: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of keys each block of queries has, and which, those first."""
        there = torch.zeros(part.rows, part.query.blocks, part.key.blocks, dtype=torch.int8, device=pairs.device)
        there[part.row[pairs], part.q[pairs], part.k[pairs]] = 1
        which = there.argsort(dim=-1, descending=True, stable=True)
        return there.sum(-1, dtype=torch.int32)[:, None], which.to(torch.int32)[:, None]

    lengths = (part.query.blocks * part.block, part.key.blocks * part.block)
    partly, whole = table(~part.full), table(part.full)
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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
        odd = any(x.shape[-1] < 16 or x.shape[-1] & (x.shape[-1] - 1) for x in (q, v))
        if dropout or odd or not manner.plain:
            return self.fallback(q, k, v, dropout, manner)
        if len(self.parts) == 1:
            return self._part(0, q, k, v, manner.scale, False)[0]
        found = [self._part(number, q, k, v, manner.scale, True) for number in range(len(self.parts))]
        return join([out for out, _ in found], [lse for _, lse in found])

    def _part(self, number: int, q: Tensor, k: Tensor, v: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        part, gqa = self.parts[number], q.shape[1] != k.shape[1]
        moved = [_moved(x, side) for x, side in ((q, part.query), (k, part.key), (v, part.key))]
        out, aux = _compiled_flex()(
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
