"""Keys and values in blocks of one pool (Kwon et al. 2023, "Efficient Memory Management for Large Language Model
Serving with PagedAttention", arXiv:2309.06180, 4.2-4.4).

A row has a list of blocks, its table, that holds for all layers alike. Rows that share a past share its blocks; who
writes into a block that others hold as well gets a copy of it first. Leaving, joining and reordering rows move numbers
in tables and no keys.

Attention sees what it always sees: `PagedKVCache.append` gathers a row's blocks side by side. That is the definition;
of one new token a row, a kernel reads the blocks where they lie (`PagedKVCache.attend_new_token`, kernels/triton/decode_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import KVCache, KVState

BLOCK = 8  # tokens of a block: half of one is wasted in each row


class PoolFullError(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """So many blocks of so many tokens, in every layer that remembers keys and values. Block 0 belongs to nobody:
    tables are filled up with it."""

    def __init__(self, blocks: int, size: int = BLOCK) -> None:
        self.blocks, self.size = blocks, size
        self.free = list(range(blocks, 0, -1))
        self.ref_counts = [0] * (blocks + 1)
        self.storage: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    @property
    def used(self) -> int:
        return self.blocks - len(self.free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self.free):
            raise PoolFullError(f"{count} blocks asked for, {len(self.free)} of {self.blocks} are free")
        found = [self.free.pop() for _ in range(count)]
        for block in found:
            self.ref_counts[block] = 1
        return found

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free.append(block)

    def layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Storage (blocks, heads, size, width) of a layer with such keys and values (batch, heads, time, width)"""
        if number not in self.storage:
            self.storage[number] = tuple(  # type: ignore[assignment]
                new.new_zeros(self.blocks + 1, new.shape[1], self.size, new.shape[3]) for new in (keys, values)
            )
        return self.storage[number]


class PagedKVCache(KVState):
    """One layer's view of the pool; who holds which blocks is the states' affair."""

    def __init__(self, states: PagedStates, number: int) -> None:
        self.states, self.number = states, number

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        slots, states = context.slots, self.states
        assert slots is not None
        stored = self._stored(keys, values)
        for cache, new in zip(stored, (keys, values), strict=True):
            cache[states.into, :, states.at] = new.transpose(1, 2)  # (batch, time, heads, width)
        found = [
            # (batch, blocks, heads, size, width) -> (batch, heads, end, width)
            cache[states.tables].transpose(1, 2).flatten(2, 3)[:, :, : slots.time]
            for cache in stored
        ]
        return found[0], found[1], slots

    def _stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's storage, in which whoever writes has a block of its own."""
        states = self.states
        stored = states.pool.layer(self.number, keys, values)
        if states.copies:
            old, own = (list(blocks) for blocks in zip(*states.copies, strict=True))
            for cache in stored:
                cache[own] = cache[old]
        return stored

    def attend_new_token(
        self, q: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float
    ) -> Tensor | None:
        """On a GPU a kernel reads the blocks where they lie."""
        queries = context.queries
        if not usable(q) or queries.time != 1 or queries.segments is not None or q.shape[-1] % 2:
            return None
        from allyouneed.kernels.triton.decode_attention import decode_attention

        stored, states = self._stored(keys, values), self.states
        seen = queries.positions[:, 0].expand(len(q)).contiguous()
        new = keys[:, :, 0].contiguous(), values[:, :, 0].contiguous()
        return decode_attention(q[:, :, 0].contiguous(), *stored, states.tables, seen, scale, states.pool.size, new)[
            :, :, None
        ]

    def select(self, rows: Tensor) -> None:
        pass

    def join(self, other: Self) -> None:
        pass

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass

    @property
    def bytes(self) -> int:
        stored = self.states.pool.storage.get(self.number, ())
        blocks = len({block for table in self.states.block_tables for block in table})
        return sum(cache[0].numel() * cache.itemsize for cache in stored) * blocks


class PagedStates(States):
    """States whose growing caches lie in a pool; other states are what they were. Whoever drops them gives the blocks
    back with `close`."""

    def __init__(self, states: States, pool: BlockPool) -> None:
        layers: list[dict[str, State]] = []
        for number, layer in enumerate(states.layers):
            paged = {
                name: PagedKVCache(self, number) if type(state) is KVCache else state for name, state in layer.items()
            }
            layers.append(paged)
        super().__init__(layers, len(states.lengths), states.device, states.memory)
        self.pool = pool
        self.block_tables: list[list[int]] = [[] for _ in states.lengths]
        self.copies: list[tuple[int, int]] = []
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}  # what blocks held, by layer
        self.places: list[list[int]] = []  # and which of them each row had
        own = [state for layer in layers for state in layer.values() if not state.shared]
        self.has_pages = any(isinstance(state, PagedKVCache) for state in own)
        self.fully_paged = all(
            isinstance(state, PagedKVCache) for state in own
        )  # all that is remembered lies in blocks
        self.into = self.at = self.tables = torch.empty(0, dtype=torch.long)

    def mark(self, new: TokenLayout, end: int) -> None:
        """New tokens are about to come: give every row blocks for its own, and find where they go."""
        rows, size = len(self.lengths), self.pool.size
        self.reserve([new.time] * rows if new.segments is None else new.segments.sum(1).tolist())
        super().mark(new, end)
        if not self.has_pages:
            return
        longest = max(*map(len, self.block_tables), -(-end // size))
        table = [blocks + [0] * (longest - len(blocks)) for blocks in self.block_tables]
        self.tables = torch.tensor(table, dtype=torch.long, device=self.device)
        positions = new.positions.expand(rows, -1)
        into = self.tables.gather(1, positions // size)  # (batch, time)
        self.into, self.at = (into if new.real is None else into.where(new.real, 0)), positions % size

    def reserve(self, counts: Sequence[int]) -> None:
        """Blocks for so many more tokens of each row, and copies of those that others hold as well. All or nothing."""
        if not self.has_pages:
            return
        size, needs = self.pool.size, []
        holders: dict[int, int] = {}
        for row, (seen, count) in enumerate(zip(self.lengths, counts, strict=True)):
            held = self.block_tables[row]
            more = -(-(seen + count) // size) - len(held)
            part = seen // size  # the block that is written into, if it is there already
            shared = None
            if count and part < len(held):
                left = holders.setdefault(held[part], self.pool.ref_counts[held[part]])
                if left > 1:
                    shared, holders[held[part]] = part, left - 1
            needs.append((row, max(0, more), shared))
        blocks = self.pool.allocate(sum(more + (shared is not None) for _, more, shared in needs))
        self.copies = []
        for row, more, shared in needs:
            held = self.block_tables[row]
            if shared is not None:
                own = blocks.pop()
                self.copies.append((held[shared], own))
                self.pool.release([held[shared]])
                held[shared] = own
            self.block_tables[row] = held + [blocks.pop() for _ in range(more)]

    def close(self) -> None:
        for blocks in self.block_tables:
            self.pool.release(blocks)
        self.block_tables = [[] for _ in self.block_tables]

    def adopt_blocks(self, row: int, blocks: list[int]) -> None:
        """A new row has seen what these full blocks hold; they are held for it already."""
        self.block_tables[row], self.lengths[row] = blocks, len(blocks) * self.pool.size

    def swap_out(self) -> None:
        """Keep what the blocks hold outside of the pool, and give them back."""
        blocks = sorted({block for held in self.block_tables for block in held})
        self.outside = {n: (keys[blocks], values[blocks]) for n, (keys, values) in self.pool.storage.items()}
        place = {block: number for number, block in enumerate(blocks)}
        self.places = [[place[block] for block in held] for held in self.block_tables]
        self.close()

    def swap_in(self) -> None:
        blocks = self.pool.allocate(self.swapped_blocks)
        for number, both in self.outside.items():
            for cache, kept in zip(self.pool.storage[number], both, strict=True):
                cache[blocks] = kept
        self.block_tables = [[blocks[place] for place in places] for places in self.places]
        for held in self.block_tables:
            self.pool.retain(held)
        self.pool.release(blocks)  # now the rows hold them
        self.outside, self.places = {}, []

    @property
    def swapped_blocks(self) -> int:
        """How many blocks they had, and will need."""
        return 1 + max((place for places in self.places for place in places), default=-1)

    def join(self, other: Self) -> None:
        super().join(other)
        self.block_tables, other.block_tables = self.block_tables + other.block_tables, []

    def copy_rows(self, rows: Sequence[int]) -> Self:
        for blocks in self.block_tables:  # the copy holds them too, until it lets go of all but its own
            self.pool.retain(blocks)
        new = super().copy_rows(rows)
        for layer in new.layers:
            for state in layer.values():
                if isinstance(state, PagedKVCache):
                    state.states = new
        return new

    def trim(self, length: int | Sequence[int]) -> None:
        super().trim(length)
        for row, (blocks, left) in enumerate(zip(self.block_tables, self.lengths, strict=True)):
            kept = -(-left // self.pool.size)
            self.pool.release(blocks[kept:])
            self.block_tables[row] = blocks[:kept]

    def _select(self, rows: list[int], sources: list[int] | None) -> None:
        super()._select(rows, sources)
        kept = [list(self.block_tables[row]) for row in rows]
        for blocks in kept:
            self.pool.retain(blocks)
        for blocks in self.block_tables:
            self.pool.release(blocks)
        self.block_tables = kept
