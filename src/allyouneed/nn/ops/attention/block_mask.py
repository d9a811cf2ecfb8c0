"""Finds the non-empty blocks of a mask without building it, so that cost follows the sparsity of the pattern.

Tokens are sorted so that tokens that attend to each other are close, and cut into blocks. A pattern knows the range of
`Pattern.feature` in a block; for a block of queries and a block of keys it tells whether `some` pair may be allowed and
whether `every` pair is. Large blocks are tested first and only possible ones are subdivided, so the search costs about
as much as its result; patterns without such bounds (random blocks) test all (time / block)² pairs at once. Any order
and any conservative answer are correct: the mask inside a block decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.patterns.core import And, Not, Or, Pattern, SameSegment, TokenFields

FAR = 1 << 40  # beyond any feature value
BRANCHING = 8  # blocks per block of the next coarser level
# rounded numbers of key blocks, to limit distinct shapes
LADDER = sorted({2**n for n in range(24)} | {3 * 2**n for n in range(24)})


class BlockedTokens:
    """The tokens of one axis in blocks.

    `tokens` (rows · blocks, block): index of each token in the flattened rows; rows are padded with copies of their
    last token (not `valid`) to `used` blocks, or to the next number of LADDER if `rounded`. `slots` (rows · time): new
    index of each token.
    """

    def __init__(self, pattern: Pattern, layout: TokenLayout, rows: int, block: int, rounded: bool = False) -> None:
        time, device = layout.time, layout.device
        self.rows, self.time, self.block, self.used = rows, time, block, -(-time // block)
        self.blocks = LADDER[bisect_left(LADDER, self.used)] if rounded else self.used
        fields = _expand_rows(layout, rows)
        order = _order(pattern, fields, layout.segments is not None)
        self.sorted = order is not None
        # first position of rows with consecutive positions: no lookup needed
        self.start = layout.start if order is None and layout.segments is None else None
        self.position_bound = layout.position_bound if self.start is None else self.start + self.blocks * block
        steps = torch.arange(self.blocks * block, device=device)
        filled = steps.clamp(max=time - 1).expand(rows, -1)
        first = torch.arange(rows, device=device)[:, None]
        local = filled if order is None else order.gather(1, filled)
        self.tokens = (local + first * time).view(-1, block)
        self.valid = (steps < time).expand(rows, -1).reshape(-1, block)
        home = (steps[:time] + first * self.blocks * block).flatten()
        if order is None:
            self.slots = home
        else:
            self.slots = torch.empty_like(home).index_copy_(0, (order + first * time).flatten(), home)
        flat = [None if fact is None else fact.reshape(-1)[self.tokens] for fact in fields]
        self.fields = TokenFields(*flat)  # type: ignore[arg-type]
        self.real = (self.fields.segment > 0) & self.valid
        self.levels = 0
        while self.count(self.levels) > BRANCHING:
            self.levels += 1
        self._bounds: dict[tuple[Pattern, int], tuple[Tensor, Tensor]] = {}

    def unblock(self, x: Tensor) -> Tensor:
        """(rows · blocks, block, …) back to (rows · time, …) in the original order."""
        is_identity = not self.sorted and self.time == self.blocks * self.block
        return x.flatten(0, 1) if is_identity else x.flatten(0, 1).index_select(0, self.slots)

    def count(self, level: int) -> int:
        return -(-self.used // BRANCHING**level)

    def table(self, pattern: Pattern, level: int) -> tuple[Tensor, Tensor]:
        """Minimum and maximum feature of each range of BRANCHING ** level blocks without padding: (rows, ranges) each;
        minimum above maximum if all is padding."""
        key = (pattern, level)
        if key not in self._bounds:
            if level == 0:
                feature = pattern.feature(self.fields)
                bounds = feature.where(self.real, FAR).amin(-1), feature.where(self.real, -FAR).amax(-1)
                low, high = (bound.view(self.rows, -1)[:, : self.used] for bound in bounds)
                found = low, high
            else:
                low, high = self.table(pattern, level - 1)
                steps = torch.arange(self.count(level) * BRANCHING, device=low.device).clamp(max=low.shape[1] - 1)
                pooled = [x[:, steps].view(self.rows, -1, BRANCHING) for x in (low, high)]
                found = pooled[0].amin(-1), pooled[1].amax(-1)
            self._bounds[key] = found
        return self._bounds[key]


class BlockRanges(NamedTuple):
    side: BlockedTokens
    level: int
    row: Tensor
    number: Tensor

    def bounds(self, pattern: Pattern) -> tuple[Tensor, Tensor]:
        low, high = self.side.table(pattern, self.level)
        return low[self.row, self.number], high[self.row, self.number]


def _expand_rows(layout: TokenLayout, rows: int) -> TokenFields:
    """Token fields expanded to all rows, (rows, time) each."""
    segments = torch.ones_like(layout.positions) if layout.segments is None else layout.segments
    fields = (layout.positions, segments, layout.prompt, layout.chosen, layout.order)
    return TokenFields(*(None if fact is None else fact.expand(rows, -1) for fact in fields))  # type: ignore[arg-type]


def _order(pattern: Pattern, token: TokenFields, several: bool) -> Tensor | None:
    """Token indices (rows, time) sorted by sentence, residue and marks; None to keep the order."""
    modulus, marks = pattern.modulus, pattern.marks(token)
    if modulus == 1 and not marks:
        return None
    key = token.position % modulus
    for mark in marks:
        key = 2 * key + mark
    if several:
        key = key + token.segment * (modulus << len(marks))
    return key.argsort(dim=1, stable=True)


def distinct_rows(*sides: TokenLayout) -> int:
    """Number of rows with distinct layouts: 1 when all are equal."""
    fields = [f for s in sides for f in (s.positions, s.segments, s.prompt, s.chosen, s.order) if f is not None]
    return max(fact.shape[0] for fact in fields)


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Query blocks with the same number of key blocks each: block indices and the mask inside them.

    `mask` (queries, 1, block, keys · block) bool; None when all pairs are allowed.
    """

    queries: Tensor  # (n,)
    keys: Tensor  # (n, m)
    mask: Tensor | None
    query_positions: Tensor  # (n, block)
    key_positions: Tensor  # (n, m · block)

    @cached_property
    def empty_queries(self) -> Tensor | None:
        """(n, 1, block) bool: queries without keys in this group."""
        return None if self.mask is None else ~self.mask.any(-1)


class BlockLayout:
    """The blocks of one pattern: `query` and `key` are blocked tokens, `row`, `q`, `k` the non-empty pairs, `full`
    whether all their entries are allowed."""

    def __init__(
        self, pattern: Pattern, queries: TokenLayout, keys: TokenLayout, block: int, rounded: bool = False
    ) -> None:
        rows = distinct_rows(queries, keys)
        self.rule = pattern & SameSegment() if queries.packed and keys.packed else pattern
        self.rows, self.block = rows, block
        self.query = BlockedTokens(pattern, queries, rows, block, rounded)
        same = keys is queries
        self.key = self.query if same else BlockedTokens(pattern, keys, rows, block, rounded)

    @property
    def row(self) -> Tensor:
        return self._pairs[0]

    @property
    def q(self) -> Tensor:
        return self._pairs[1]

    @property
    def k(self) -> Tensor:
        return self._pairs[2]

    @property
    def full(self) -> Tensor:
        return self._pairs[3]

    def grid(self) -> tuple[Tensor, Tensor]:
        """(rows, query blocks, key blocks) bool: non-empty blocks and full blocks. Tests every pair, so that the host
        need not wait for the device."""
        sizes = [self.rows, self.query.count(0), self.key.count(0)]
        device, real = self.query.tokens.device, SameSegment()
        row, q, k = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).unbind(1)
        query, key = BlockRanges(self.query, 0, row, q), BlockRanges(self.key, 0, row, k)
        some = self.rule.some(query, key) & (key.bounds(real)[1] > 0) & (query.bounds(real)[1] > 0)
        every = some & self.rule.every(query, key) & self.key.real.all(-1)[row * self.key.blocks + k]
        beyond = (0, self.key.blocks - sizes[2], 0, self.query.blocks - sizes[1])
        return pad(some.view(sizes), beyond), pad(every.view(sizes), beyond)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device, level, real = self.query.tokens.device, max(self.query.levels, self.key.levels), SameSegment()
        sizes = [self.rows, self.query.count(level), self.key.count(level)]
        row, q, k = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).unbind(1)
        step = torch.arange(BRANCHING, device=device)
        while True:
            query, key = BlockRanges(self.query, level, row, q), BlockRanges(self.key, level, row, k)
            keep = self.rule.some(query, key) & (key.bounds(real)[1] > 0) & (query.bounds(real)[1] > 0)
            row, q, k = row[keep], q[keep], k[keep]
            if level == 0:
                break
            level -= 1
            q = (q[:, None, None] * BRANCHING + step[:, None]).expand(-1, BRANCHING, BRANCHING).flatten()
            k = (k[:, None, None] * BRANCHING + step).expand(-1, BRANCHING, BRANCHING).flatten()
            row = row.repeat_interleave(BRANCHING * BRANCHING)
            there = (q < self.query.count(level)) & (k < self.key.count(level))
            row, q, k = row[there], q[there], k[there]
        by_query = ((row * self.query.blocks + q) * self.key.blocks + k).argsort()
        row, q, k = row[by_query], q[by_query], k[by_query]
        query, key = BlockRanges(self.query, 0, row, q), BlockRanges(self.key, 0, row, k)
        return row, q, k, self.rule.every(query, key) & self.key.real.all(-1)[row * self.key.blocks + k]

    @property
    def area(self) -> int:
        """Scores to compute per row, on average."""
        return len(self.q) * self.block**2 // self.rows

    def chunks(self, keys_per_call: int) -> Iterator[BlockGroup]:
        """All blocks in groups of about `keys_per_call` gathered keys; query blocks with similar key counts share a
        group."""
        if not len(self.q):
            return
        queries, counts = (self.row * self.query.blocks + self.q).unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        ladder = torch.tensor(LADDER, device=counts.device)
        rung = torch.bucketize(counts, ladder)
        keys = self.row * self.key.blocks + self.k
        for step in rung.unique().tolist():
            items = (rung == step).nonzero().flatten()
            width = int(counts[items].max())
            for some in items.split(max(1, keys_per_call // (width * self.block))):
                yield self._chunk(queries[some], starts[some], counts[some], width, keys)

    def _chunk(self, queries: Tensor, starts: Tensor, counts: Tensor, width: int, all_keys: Tensor) -> BlockGroup:
        step = torch.arange(width, device=queries.device)
        used = step < counts[:, None]  # (n, width)
        pairs = starts[:, None] + step.minimum(counts[:, None] - 1)
        keys = all_keys[pairs]
        query, key, mask = self.query.fields.position[queries], self.key.fields.position[keys], None
        full = self.full[pairs] & used
        if not bool(full.all()):
            tiles = full[..., None, None].repeat(1, 1, self.block, self.block)  # (n, width, block, block)
            item, column = (used & ~full).nonzero(as_tuple=True)
            tiles[item, column] = self.tile_masks(queries[item], keys[item, column])
            mask = tiles.transpose(1, 2).flatten(2)[:, None]
        return BlockGroup(queries, keys, mask, query, key.flatten(1))

    def tile_masks(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Masks inside single blocks: (pairs, block, block)."""
        beside = [None if fact is None else fact[queries][:, :, None] for fact in self.query.fields]
        below = [None if fact is None else fact[keys][:, None, :] for fact in self.key.fields]
        seen = self.rule.allowed(TokenFields(*beside), TokenFields(*below))  # type: ignore[arg-type]
        return seen & self.key.real[keys][:, None, :]


# --- patterns that are cheaper in several parts ---------------------------------------------------------------------


def disjoint_alternatives(pattern: Pattern) -> list[Pattern]:
    """The pattern as disjoint alternatives, one per token order.

    `causal & (window(l) | strided(l))` needs neighbours together for its window and every l-th token together for its
    strides; each alternative is computed in its own order, and their softmaxes are merged (block_sparse.py).
    """
    by_modulus: dict[int, Pattern] = {}
    for one in _alternatives(pattern):
        known = by_modulus.get(one.modulus)
        by_modulus[one.modulus] = one if known is None else known | one
    found: list[Pattern] = []
    before: Pattern | None = None
    for one in by_modulus.values():
        found.append(one if before is None else one & ~before)
        before = one if before is None else before | one
    return found


def _alternatives(pattern: Pattern) -> list[Pattern]:
    if isinstance(pattern, Or):
        return [one for side in (pattern.left, pattern.right) for one in _alternatives(side)]
    if isinstance(pattern, And) and not isinstance(pattern.right, Not):
        left, right = _alternatives(pattern.left), _alternatives(pattern.right)
        if len({one.modulus for one in left + right}) > 1 and len(left) * len(right) <= 8:
            return [a & b for a in left for b in right]
    return [pattern]
