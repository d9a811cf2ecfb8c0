"""FlexAttention (GPU) with a block mask built from block layouts, so that no n × n mask is materialised.

The kernel's block index table has (time / 128)² int32 entries: one megabyte for 64k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.ops.attention.block_mask import BlockedTokens, BlockLayout
from allyouneed.nn.ops.attention.block_sparse import merge_softmax
from allyouneed.nn.ops.attention.dense import AttentionFn, HasFallback, PairBias, ScoreMod
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.torch_private import raise_recompile_limit

FLEX_BLOCK = 128
MAX_GRID = 1 << 18  # block pairs; up to this number all are tested without waiting for the device


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # one kernel per pattern and (rounded) length; beyond the limit torch would compute all n × n scores
    raise_recompile_limit(64)
    return torch.compile(flex_attention, dynamic=False)


FieldLookup = Callable[
    [Tensor, Tensor], tuple[TokenFields, Tensor]
]  # (row, index) -> fields of the token, and whether it is valid


def _field_lookup(side: BlockedTokens) -> FieldLookup:
    """Computed for consecutive positions, looked up otherwise: a lookup is one memory access per score."""

    def table(fact: Tensor | None) -> Tensor | None:
        return None if fact is None else fact.reshape(side.rows, -1)

    marks = [table(fact) for fact in side.fields[2:]]
    if side.start is not None:
        start, time = side.start, side.time

        def computed(row: Tensor, index: Tensor) -> tuple[TokenFields, Tensor]:
            more = [None if fact is None else fact[row, index] for fact in marks]
            return TokenFields(index + start, torch.ones_like(index), *more), index < time

        return computed
    # int32 and two lookups: more would spill registers and take thirty times as long
    position = side.fields.position.reshape(side.rows, -1).to(torch.int32)
    segment = side.fields.segment.where(side.valid, 0).reshape(side.rows, -1).to(torch.int32)

    def lookup(row: Tensor, index: Tensor) -> tuple[TokenFields, Tensor]:
        more = [None if fact is None else fact[row, index] for fact in marks]
        number = segment[row, index]
        return TokenFields(position[row, index], number, *more), number > 0

    return lookup


def _position_bound(side: BlockedTokens) -> int:
    """Exclusive upper bound of positions; reads from the device unless they follow one another."""
    return int(side.fields.position.max()) + 1 if side.position_bound is None else side.position_bound


def mask_mod(part: BlockLayout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The pattern as a FlexAttention mask_mod over the sorted tokens."""
    same_rows, query, key = part.rows == 1, _field_lookup(part.query), _field_lookup(part.key)
    rule = part.rule.quick(
        lambda: max(_position_bound(part.query), _position_bound(part.key)), part.query.tokens.device
    )

    def allowed(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = batch * 0 if same_rows else batch
        there, real = key(row, k)
        return rule(query(row, q)[0], there) & real

    return allowed


def block_mask(part: BlockLayout) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def table(there: Tensor) -> tuple[Tensor, Tensor]:
        """Number of key blocks per query block, and their indices first."""
        which = there.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return there.sum(-1, dtype=torch.int32)[:, None], which.to(torch.int32)[:, None]

    def chosen(pairs: Tensor) -> Tensor:
        there = torch.zeros(part.rows, part.query.blocks, part.key.blocks, dtype=torch.bool, device=pairs.device)
        there[part.row[pairs], part.q[pairs], part.k[pairs]] = True
        return there

    lengths = (part.query.blocks * part.block, part.key.blocks * part.block)
    if part.rows * part.query.blocks * part.key.blocks <= MAX_GRID:
        some, every = part.grid()
        partial, whole = table(some & ~every), table(every)
    else:
        partial, whole = table(chosen(~part.full)), table(chosen(part.full))
    return BlockMask.from_kv_blocks(
        *partial, *whole, BLOCK_SIZE=part.block, mask_mod=mask_mod(part), seq_lengths=lengths
    )


class Flex(HasFallback):
    """FlexAttention; `make_fallback` builds the plan for what the kernel cannot do: dropout, odd head widths."""

    def __init__(self, parts: Sequence[BlockLayout], make_fallback: Callable[[], AttentionFn]) -> None:
        self.parts, self.masks = list(parts), [block_mask(part) for part in parts]
        self.make_fallback = make_fallback

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        pairwise = score_mod.plain or (score_mod.fused and score_mod.pair_bias is not None)
        if dropout or not pairwise or not can_flex(q, v):
            return self.fallback(q, k, v, dropout, score_mod)
        if len(self.parts) == 1:
            return self._part(0, q, k, v, score_mod, False)[0]
        found = [self._part(number, q, k, v, score_mod, True) for number in range(len(self.parts))]
        return merge_softmax([out for out, _ in found], [lse for _, lse in found])

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The only part of a plan of one, with the log-sum-exp of its scores (batch, heads, queries)."""
        return self._part(0, q, k, v, ScoreMod(scale), True)

    def _part(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod, lse: bool
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        part, gqa = self.parts[number], q.shape[1] != k.shape[1]
        moved = [_to_blocks(x, side) for x, side in ((q, part.query), (k, part.key), (v, part.key))]
        out, aux = (flex_attention if torch.compiler.is_compiling() else _compiled_flex())(
            *moved,
            score_mod=None if score_mod.pair_bias is None else self.add_bias(part, score_mod.pair_bias),
            block_mask=self.masks[number],
            scale=score_mod.scale,
            enable_gqa=gqa,
            return_aux=AuxRequest(lse=lse),
        )
        return _from_blocks(out, part.query), _from_blocks(aux.lse[..., None], part.query)[..., 0] if lse else out

    def add_bias(self, part: BlockLayout, pair_bias: PairBias) -> Callable[..., Tensor]:
        """The bias as a FlexAttention score_mod over the sorted tokens."""
        same_rows, query, key = part.rows == 1, _field_lookup(part.query), _field_lookup(part.key)

        def add(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row = batch * 0 if same_rows else batch
            return score + pair_bias(head, query(row, q)[0].position, key(row, k)[0].position)

        return add


def can_flex(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes heads of these widths."""
    return all(x.shape[-1] >= 16 and not x.shape[-1] & (x.shape[-1] - 1) for x in (q, v))


def _is_identity(side: BlockedTokens) -> bool:
    return not side.sorted and side.time == side.blocks * side.block


def _to_blocks(x: Tensor, side: BlockedTokens) -> Tensor:
    """(batch, heads, time, …) in block order, padded to whole blocks."""
    if _is_identity(side):
        return x
    if side.rows == 1:
        return x.index_select(2, side.tokens.flatten())
    flat = x.transpose(1, 2).flatten(0, 1).index_select(0, side.tokens.flatten())
    return flat.unflatten(0, (side.rows, -1)).transpose(1, 2)


def _from_blocks(x: Tensor, side: BlockedTokens) -> Tensor:
    if _is_identity(side):
        return x
    if side.rows == 1:
        return x.index_select(2, side.slots)
    flat = x.transpose(1, 2).flatten(0, 1).index_select(0, side.slots)
    return flat.unflatten(0, (side.rows, -1)).transpose(1, 2)
