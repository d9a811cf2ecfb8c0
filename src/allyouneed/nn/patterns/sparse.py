"""Sparse patterns by position.

Child et al. 2019, 4.3 (Sparse Transformer), strided: `causal & (window(l) | strided(l))`; fixed: `causal & (block(l) |
fixed(l, c))`. Liu et al. 2018, 4.2.4, block-local: `causal & block(n)`. Beltagy et al. 2020, 3.1 (Longformer):
`dilated(w, d) | chosen`. Zaheer et al. 2020, 2 (BigBird): `block-window(b, 2) | global-prefix(b) | random-blocks(b, r,
seed)`. Ding et al. 2023, 3.2 (LongNet), one head of one branch: `segment-dilated(w, r, head)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from allyouneed.nn.patterns.core import (
    Allowed,
    BlockRange,
    KVWindow,
    Natural,
    Pattern,
    Positive,
    SameFeature,
    TokenFields,
    Window,
)


class Self(Pattern):
    """The token itself."""

    kind: Literal["self"] = "self"

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return query.position == key.position

    @property
    def reach(self) -> tuple[float, float]:
        return 0, 0


class Strided(SameFeature):
    """Every `step`-th position, counted from the query: atrous attention; the far half of Child et al. 2019, 4.3."""

    kind: Literal["strided"] = "strided"
    step: Positive
    """Distance between the keys."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (query.position - key.position) % self.step == 0

    def feature(self, token: TokenFields) -> Tensor:
        return token.position % self.step

    @property
    def modulus(self) -> int:
        return self.step


class Dilated(Pattern):
    """A dilated window: fewer than `size` steps of `dilation` positions away (Longformer, 3.1)."""

    kind: Literal["dilated"] = "dilated"
    size: Positive
    """Keys are fewer than this many steps away."""
    dilation: Positive
    """Positions of a step."""

    @property
    def _both(self) -> Pattern:
        return Window(size=(self.size - 1) * self.dilation + 1) & Strided(step=self.dilation)

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        far = query.position - key.position
        return (far % self.dilation == 0) & (far.abs() < self.size * self.dilation)

    @property
    def reach(self) -> tuple[float, float]:
        return self._both.reach

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return self._both.some(query, key)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return self._both.every(query, key)

    @property
    def modulus(self) -> int:
        return self.dilation


class BlockWindow(Pattern):
    """Fewer than `count` blocks of `block` positions away; BigBird's window has count 2."""

    kind: Literal["block-window"] = "block-window"
    block: Positive
    """Positions of a block."""
    count: Positive
    """Keys are fewer than this many blocks away."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (query.position // self.block - key.position // self.block).abs() < self.count

    @property
    def reach(self) -> tuple[float, float]:
        return 1 - self.count * self.block, self.count * self.block - 1

    def feature(self, token: TokenFields) -> Tensor:
        return token.position // self.block

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_low - q_high < self.count) & (q_low - k_high < self.count)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_high - q_low < self.count) & (q_high - k_low < self.count)


class BlockDiagonal(SameFeature):
    """The query's block of `size` positions (Liu et al. 2018, 4.2.4)."""

    kind: Literal["block"] = "block"
    size: Positive
    """Positions of a block."""

    @property
    def reach(self) -> tuple[float, float]:
        return 1 - self.size, self.size - 1

    def feature(self, token: TokenFields) -> Tensor:
        return token.position // self.size


class SegmentDilated(SameFeature):
    """Every `dilation`-th position of the query's segment, from `offset` on: one head of one branch of LongNet.

    These positions attend to each other, the others to nothing (Ding et al. 2023, eq. 4-6, with the shift per head of
    3.2.3). LongNet combines several of them, see mixers/attention/longnet.py.
    """

    kind: Literal["segment-dilated"] = "segment-dilated"
    segment: Positive
    """Positions of a segment."""
    dilation: Positive
    """Distance between the keys."""
    offset: Natural
    """The first position within the segment."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        mine, other = self.feature(query), self.feature(key)
        return (mine == other) & (mine >= 0)

    @property
    def reach(self) -> tuple[float, float]:
        shift, last = self.offset % self.dilation, self.segment - 1
        far = (last - shift) // self.dilation * self.dilation if last >= shift else -math.inf
        return -far, far

    def feature(self, token: TokenFields) -> Tensor:
        """Index of the segment, or -1 for skipped positions."""
        taken = (token.position % self.segment) % self.dilation == self.offset % self.dilation
        return torch.where(taken, token.position // self.segment, -1)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return super().some(query, key) & (query.bounds(self)[1] >= 0) & (key.bounds(self)[1] >= 0)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return super().every(query, key) & (query.bounds(self)[0] >= 0)

    @property
    def kv_window(self) -> KVWindow:
        return KVWindow(0, self.segment)

    def marks(self, token: TokenFields) -> list[Tensor]:
        return [] if self.dilation == 1 else [(self.feature(token) >= 0).long()]


class Fixed(Pattern):
    """The last `count` positions of every block of `block`, which summarise it (Child et al., 4.3)."""

    kind: Literal["fixed"] = "fixed"
    block: Positive
    """Positions of a block."""
    count: Positive
    """Positions at the end of a block that are attended to."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (self.feature(key) > 0) & (query.position == query.position)

    def feature(self, token: TokenFields) -> Tensor:
        return (token.position % self.block >= self.block - self.count).long()

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[1] > 0

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[0] > 0

    def marks(self, token: TokenFields) -> list[Tensor]:
        return [self.feature(token)]


class Global(Pattern):
    """One position attends to all and is attended to by all."""

    kind: Literal["global"] = "global"
    place: Natural
    """The position, from 0."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (query.position == self.place) | (key.position == self.place)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        here = self.place
        return ((q_low <= here) & (here <= q_high)) | ((k_low <= here) & (here <= k_high))

    @property
    def kv_window(self) -> KVWindow:
        return KVWindow(self.place + 1, 0)

    def leak(self) -> str:
        return f"{self} lets position {self.place} attend to everything"


class GlobalPrefix(Pattern):
    """The first `length` positions attend to all and are attended to by all: BigBird's first global block (Zaheer et
    al. 2020, 2).

    BigBird-ITC also has a global last block. Positions do not know the sentence length; a batch may mark those tokens
    as chosen, with the pattern `| chosen`.
    """

    kind: Literal["global-prefix"] = "global-prefix"
    length: Natural
    """Number of leading positions."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (query.position < self.length) | (key.position < self.length)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return (query.bounds(self)[0] < self.length) | (key.bounds(self)[0] < self.length)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return (query.bounds(self)[1] < self.length) | (key.bounds(self)[1] < self.length)

    @property
    def kv_window(self) -> KVWindow:
        return KVWindow(self.length, 0)

    def leak(self) -> str:
        return f"{self} lets the first {self.length} positions attend to everything"


MAX_TABLE = 2048  # blocks, up to which pairs of them are tabulated for kernels: 4 MB


class RandomBlocks(Pattern):
    """Blocks of `block` positions attend to random blocks (Zaheer et al. 2020, 2).

    BigBird draws `count` of all blocks of the sentence. Here the draw is independent of the sentence length, so that
    appended text does not change earlier results: every block draws `count` of the blocks before it (with replacement),
    and attention is symmetric. It is still a random graph with `count` edges per block, and `causal & random-blocks(…)`
    is its half for decoding. The draw depends only on `seed` and the block indices.
    """

    kind: Literal["random-blocks"] = "random-blocks"
    block: Positive
    """Positions of a block."""
    count: Positive
    """Random blocks that each block draws."""
    seed: Natural
    """Decides the draw, with the block indices."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        one, other = self.feature(query), self.feature(key)
        return self._draws(one, other, other) | self._draws(other, one, one)

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        block = torch.arange(-(-longest() // self.block), device=device)
        if len(block) <= MAX_TABLE:  # one lookup for a pair instead of two for each draw
            grid = self._draws(block[:, None], block, block) | self._draws(block, block[:, None], block[:, None])
            return lambda query, key: grid[self.feature(query), self.feature(key)]
        tables = [self._drawn(block, draw).where(block > 0, -1).to(torch.int32) for draw in range(self.count)]

        def lookup(query: TokenFields, key: TokenFields) -> Tensor:
            one, other = self.feature(query), self.feature(key)
            found = one != one
            for table in tables:
                found = found | (table[one] == other) | (table[other] == one)
            return found

        return lookup

    def feature(self, token: TokenFields) -> Tensor:
        return token.position // self.block

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return self._any_draws(q_low, q_high, k_low, k_high) | self._any_draws(k_low, k_high, q_low, q_high)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        drawn = self._draws(q_low, k_low, k_low) | self._draws(k_low, q_low, q_low)
        return drawn & (q_low == q_high) & (k_low == k_high)

    def _any_draws(self, low: Tensor, high: Tensor, least: Tensor, most: Tensor, look: int = 16) -> Tensor:
        """Whether a block in [low, high] may have drawn one in [least, most]; True if there are too many to test."""
        widest = look
        if _can_read(low):
            widest = int((high - low).max()) + 1 if low.numel() else 0
        found = (high - low >= look) | (least > most)
        for step in range(min(widest, look)):
            found = found | self._draws((low + step).minimum(high), least, most)
        return found

    def _draws(self, block: Tensor, least: Tensor, most: Tensor) -> Tensor:
        """Whether this block has drawn one in [least, most]."""
        found = (block != block) | (least != least)
        for draw in range(self.count):
            drawn = self._drawn(block, draw)
            found = found | ((least <= drawn) & (drawn <= most) & (block > 0))
        return found

    def _drawn(self, block: Tensor, draw: int) -> Tensor:
        return _hash(block, self.seed * 1_000_003 + draw) % block.clamp(min=1)


def _hash(x: Tensor, salt: int) -> Tensor:
    """A pseudo-random integer, equal on every device: a few rounds modulo the prime 2³¹ − 1, where products stay below
    63 bits."""
    prime = 2**31 - 1
    x = (x.long() * 48_271 + salt * 69_621 % prime) % prime
    for odd in (16_807, 630_360_016, 742_938_285):
        x = (x * ((x + odd) % prime)) % prime
        x = (x * 39_373 + odd) % prime
    return x


def _can_read(x: Tensor) -> bool:
    """Whether the host may look at values: it would wait for a GPU, and cannot while a graph is captured."""
    return not x.is_cuda
