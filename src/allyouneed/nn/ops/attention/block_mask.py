"""The tiles of a mask that hold anything, found without the mask, so that a sparse pattern costs what it shows.

Tokens of both sides are put in an order that suits the pattern (tokens that see each other close together) and cut
into blocks. Of a block a pattern is told the least and the greatest of what it decides by (`Pattern.feature`); it
answers for a block of queries and a block of keys whether `some` pair may be allowed and whether `every` pair is.
Pairs of large blocks are asked first and only those that may hold something are divided, so the search itself costs
about as much as what it finds; for a pattern about which nothing is known (random blocks) it is (time / block)²
questions, asked all at once. Any order and any cautious answer give the right result: exactness is the mask's business.
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
from allyouneed.nn.patterns.core import And, Not, Or, Pattern, Place, SameSegment

FAR = 1 << 40  # further than any feature
FAN = 8  # how many blocks make one of the next coarser level
LADDER = sorted({2**n for n in range(24)} | {3 * 2**n for n in range(24)})  # numbers of key blocks that share a call


class Side:
    """The tokens of one axis in blocks.

    `tokens` (rows · blocks, block): index of each in the flattened rows; a row is filled up with copies of its last
    token, which are not `inside`, to `used` blocks, or where lengths shall be few (`rounded`) to a few more.
    `slots` (rows · time): where each token went.
    """

    def __init__(self, pattern: Pattern, layout: TokenLayout, rows: int, block: int, rounded: bool = False) -> None:
        time, device = layout.time, layout.device
        self.rows, self.time, self.block, self.used = rows, time, block, -(-time // block)
        self.blocks = LADDER[bisect_left(LADDER, self.used)] if rounded else self.used
        there = _spread(layout, rows)
        order = _order(pattern, there, layout.segments is not None)
        self.sorted = order is not None
        # where counting tells everything, nobody has to look it up: the first position of rows that just count on
        self.start = layout.start if order is None and layout.segments is None else None
        steps = torch.arange(self.blocks * block, device=device)
        filled = steps.clamp(max=time - 1).expand(rows, -1)
        first = torch.arange(rows, device=device)[:, None]
        local = filled if order is None else order.gather(1, filled)
        self.tokens = (local + first * time).view(-1, block)
        self.inside = (steps < time).expand(rows, -1).reshape(-1, block)
        home = (steps[:time] + first * self.blocks * block).flatten()
        if order is None:
            self.slots = home
        else:
            self.slots = torch.empty_like(home).index_copy_(0, (order + first * time).flatten(), home)
        flat = [None if fact is None else fact.reshape(-1)[self.tokens] for fact in there]
        self.place = Place(*flat)  # type: ignore[arg-type]
        self.real = (self.place.segment > 0) & self.inside
        self.levels = 0
        while self.count(self.levels) > FAN:
            self.levels += 1
        self._bounds: dict[tuple[Pattern, int], tuple[Tensor, Tensor]] = {}

    def unblocked(self, x: Tensor) -> Tensor:
        """(rows · blocks, block, …) back to (rows · time, …) in the rows' own order."""
        stays = not self.sorted and self.time == self.blocks * self.block
        return x.flatten(0, 1) if stays else x.flatten(0, 1).index_select(0, self.slots)

    def count(self, level: int) -> int:
        return -(-self.used // FAN**level)

    def table(self, pattern: Pattern, level: int) -> tuple[Tensor, Tensor]:
        """The least and the greatest feature of each stretch of FAN ** level blocks, padding aside: (rows, stretches)
        each; where all is padding the least is above the greatest."""
        key = (pattern, level)
        if key not in self._bounds:
            if level == 0:
                feature = pattern.feature(self.place)
                bounds = feature.where(self.real, FAR).amin(-1), feature.where(self.real, -FAR).amax(-1)
                low, high = (bound.view(self.rows, -1)[:, : self.used] for bound in bounds)
                found = low, high
            else:
                low, high = self.table(pattern, level - 1)
                steps = torch.arange(self.count(level) * FAN, device=low.device).clamp(max=low.shape[1] - 1)
                pooled = [x[:, steps].view(self.rows, -1, FAN) for x in (low, high)]
                found = pooled[0].amin(-1), pooled[1].amax(-1)
            self._bounds[key] = found
        return self._bounds[key]


class Stretches(NamedTuple):
    side: Side
    level: int
    row: Tensor
    number: Tensor

    def bounds(self, pattern: Pattern) -> tuple[Tensor, Tensor]:
        low, high = self.side.table(pattern, self.level)
        return low[self.row, self.number], high[self.row, self.number]


def _spread(layout: TokenLayout, rows: int) -> Place:
    """The places of all rows, each (rows, time)."""
    segments = torch.ones_like(layout.positions) if layout.segments is None else layout.segments
    said = (layout.positions, segments, layout.prompt, layout.chosen, layout.order)
    return Place(*(None if fact is None else fact.expand(rows, -1) for fact in said))  # type: ignore[arg-type]


def _order(pattern: Pattern, place: Place, several: bool) -> Tensor | None:
    """Token indices (rows, time) sorted by sentence, residue, marks; None when they may stay as they are."""
    modulus, marks = pattern.modulus, pattern.marks(place)
    if modulus == 1 and not marks:
        return None
    key = place.position % modulus
    for mark in marks:
        key = 2 * key + mark
    if several:
        key = key + place.segment * (modulus << len(marks))
    return key.argsort(dim=1, stable=True)


def rows_of(*sides: TokenLayout) -> int:
    """How many rows differ in what is known about them: 1 when all are alike."""
    said = [f for s in sides for f in (s.positions, s.segments, s.prompt, s.chosen, s.order) if f is not None]
    return max(fact.shape[0] for fact in said)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some blocks of queries, each with as many blocks of keys: numbers of blocks, and who sees whom inside them.

    `mask` (queries, 1, block, keys · block) bool; None when everybody sees everybody.
    """

    queries: Tensor  # (n,)
    keys: Tensor  # (n, m)
    mask: Tensor | None
    query_positions: Tensor  # (n, block)
    key_positions: Tensor  # (n, m · block)

    @cached_property
    def blind(self) -> Tensor | None:
        """(n, 1, block) bool: queries that see nothing here."""
        return None if self.mask is None else ~self.mask.any(-1)


class Tiling:
    """The tiles of one pattern: `query` and `key` are blocks, `row`, `q`, `k` the pairs of them that hold something,
    `full` whether such a pair holds everything."""

    def __init__(
        self, pattern: Pattern, queries: TokenLayout, keys: TokenLayout, block: int, rounded: bool = False
    ) -> None:
        rows = rows_of(queries, keys)
        self.rule = pattern & SameSegment() if queries.packed and keys.packed else pattern
        self.rows, self.block = rows, block
        self.query = Side(pattern, queries, rows, block, rounded)
        same = keys is queries
        self.key = self.query if same else Side(pattern, keys, rows, block, rounded)

    @property
    def row(self) -> Tensor:
        return self._found[0]

    @property
    def q(self) -> Tensor:
        return self._found[1]

    @property
    def k(self) -> Tensor:
        return self._found[2]

    @property
    def full(self) -> Tensor:
        return self._found[3]

    def grid(self) -> tuple[Tensor, Tensor]:
        """(rows, query blocks, key blocks) bool: the tiles that hold something, and those that hold everything. Asked
        of every pair, so that the host never has to wait for the device to know how many there are."""
        sizes = [self.rows, self.query.count(0), self.key.count(0)]
        device, real = self.query.tokens.device, SameSegment()
        row, q, k = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).unbind(1)
        query, key = Stretches(self.query, 0, row, q), Stretches(self.key, 0, row, k)
        some = self.rule.some(query, key) & (key.bounds(real)[1] > 0) & (query.bounds(real)[1] > 0)
        every = some & self.rule.every(query, key) & self.key.real.all(-1)[row * self.key.blocks + k]
        beyond = (0, self.key.blocks - sizes[2], 0, self.query.blocks - sizes[1])
        return pad(some.view(sizes), beyond), pad(every.view(sizes), beyond)

    @cached_property
    def _found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device, level, real = self.query.tokens.device, max(self.query.levels, self.key.levels), SameSegment()
        sizes = [self.rows, self.query.count(level), self.key.count(level)]
        row, q, k = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).unbind(1)
        step = torch.arange(FAN, device=device)
        while True:
            query, key = Stretches(self.query, level, row, q), Stretches(self.key, level, row, k)
            keep = self.rule.some(query, key) & (key.bounds(real)[1] > 0) & (query.bounds(real)[1] > 0)
            row, q, k = row[keep], q[keep], k[keep]
            if level == 0:
                break
            level -= 1
            q = (q[:, None, None] * FAN + step[:, None]).expand(-1, FAN, FAN).flatten()
            k = (k[:, None, None] * FAN + step).expand(-1, FAN, FAN).flatten()
            row = row.repeat_interleave(FAN * FAN)
            there = (q < self.query.count(level)) & (k < self.key.count(level))
            row, q, k = row[there], q[there], k[there]
        by_query = ((row * self.query.blocks + q) * self.key.blocks + k).argsort()
        row, q, k = row[by_query], q[by_query], k[by_query]
        query, key = Stretches(self.query, 0, row, q), Stretches(self.key, 0, row, k)
        return row, q, k, self.rule.every(query, key) & self.key.real.all(-1)[row * self.key.blocks + k]

    @property
    def area(self) -> int:
        """Scores to compute, for one of the rows on average."""
        return len(self.q) * self.block**2 // self.rows

    def chunks(self, keys_per_call: int) -> Iterator[Chunk]:
        """All tiles, in calls of about so many gathered keys; query blocks that have about as many keys share one."""
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

    def _chunk(self, queries: Tensor, starts: Tensor, counts: Tensor, width: int, all_keys: Tensor) -> Chunk:
        step = torch.arange(width, device=queries.device)
        used = step < counts[:, None]  # (n, width)
        pairs = starts[:, None] + step.minimum(counts[:, None] - 1)
        keys = all_keys[pairs]
        query, key, mask = self.query.place.position[queries], self.key.place.position[keys], None
        full = self.full[pairs] & used
        if not bool(full.all()):
            tiles = full[..., None, None].repeat(1, 1, self.block, self.block)  # (n, width, block, block)
            item, column = (used & ~full).nonzero(as_tuple=True)
            tiles[item, column] = self._inside(queries[item], keys[item, column])
            mask = tiles.transpose(1, 2).flatten(2)[:, None]
        return Chunk(queries, keys, mask, query, key.flatten(1))

    def _inside(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The masks of single tiles: (pairs, block, block)."""
        beside = [None if fact is None else fact[queries][:, :, None] for fact in self.query.place]
        below = [None if fact is None else fact[keys][:, None, :] for fact in self.key.place]
        seen = self.rule.allowed(Place(*beside), Place(*below))  # type: ignore[arg-type]
        return seen & self.key.real[keys][:, None, :]


# --- patterns that are cheaper as several ---------------------------------------------------------------------------


def apart(pattern: Pattern) -> list[Pattern]:
    """The same pattern as alternatives that no pair of places has in common, one for each order of the tokens.

    `causal & (window(l) | strided(l))` wants neighbours together for its window and every l-th token together for its
    strides; each alternative is computed in its own order, and their softmaxes are joined (block_sparse.py).
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
