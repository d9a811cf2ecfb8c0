"""Paged KV cache: keys and values in blocks of one pool (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention", arXiv:2309.06180, 4.2-4.4).

A row's block table lists its blocks, for all layers alike. Rows with a common prefix share its blocks; a row that
writes into a shared block gets a copy first. Dropping, joining and reordering rows changes block tables and moves no
keys.

`PagedKVCache.append` gathers a row's blocks for any attention; for one new token per row,
`PagedKVCache.attend_new_token` reads them in place on a GPU (nn/ops/attention/decode.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Self

import numpy as np
import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.batch import to_device
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.attention.decode import BlockTable, decode_attention
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import KVCache, KVState

BLOCK = 8  # tokens per block: on average half a block per row is unused


class PoolFullError(Exception):
    """More blocks were requested than are free."""


class BlockPool:
    """`blocks` blocks of `size` tokens in every layer with a KV cache, reference-counted. Block 0 is never allocated:
    it pads block tables. `cached`: blocks that a prefix cache holds, too; `evictable`: how many of them nobody else
    holds, `most_evictable` in the long run."""

    def __init__(self, blocks: int, size: int = BLOCK, most_evictable: int | None = None) -> None:
        self.blocks, self.size = blocks, size
        self.most_evictable = blocks if most_evictable is None else most_evictable
        self.free = list(range(blocks, 0, -1))
        self.ref_counts = [0] * (blocks + 1)
        self.cached: set[int] = set()
        self.evictable = 0
        self.storage: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    @property
    def used(self) -> int:
        return self.blocks - len(self.free)

    def allocate(self, count: int) -> list[int]:
        left = len(self.free) - count
        if left < 0:
            raise PoolFullError(f"{count} blocks requested, {len(self.free)} of {self.blocks} are free")
        found = self.free[left:][::-1]
        del self.free[left:]
        for block in found:
            self.ref_counts[block] = 1
        return found

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_counts[block] += 1
            if self.ref_counts[block] == 2 and block in self.cached:
                self.evictable -= 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free.append(block)
            elif self.ref_counts[block] == 1 and block in self.cached:
                self.evictable += 1

    def cache(self, blocks: Sequence[int]) -> None:
        """A prefix cache holds them, besides the row that has read them."""
        self.retain(blocks)
        self.cached.update(blocks)

    def uncache(self, block: int) -> None:
        self.cached.remove(block)
        self.evictable -= self.ref_counts[block] == 1
        self.release([block])

    def recount(self, held: Iterable[Sequence[int]]) -> None:
        """Set the reference counts anew: these blocks are held, all others are free."""
        counts = [0] * (self.blocks + 1)
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        self.ref_counts = counts
        self.free = [block for block in range(self.blocks, 0, -1) if not counts[block]]
        self.evictable = sum(counts[block] == 1 for block in self.cached)

    def layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Storage (blocks, heads, size, width) of a layer with such keys and values (batch, heads, time, width)."""
        if number not in self.storage:
            self.storage[number] = tuple(  # type: ignore[assignment]
                untouched_zeros(new, self.blocks + 1, new.shape[1], self.size, new.shape[3]) for new in (keys, values)
            )
        return self.storage[number]


def untouched_zeros(like: Tensor, *sizes: int) -> Tensor:
    """Zeros. On a CPU, memory that is only taken from the system where it is used: numpy asks for zeroed pages, torch
    writes the zeros."""
    if like.device.type != "cpu" or not prod(sizes):
        return like.new_zeros(sizes)
    return torch.from_numpy(np.zeros(prod(sizes) * like.itemsize, np.uint8)).view(like.dtype).view(sizes)


class PagedKVCache(KVState):
    """One layer's view of the pool; the block tables belong to `PagedStates`."""

    def __init__(self, states: PagedStates, number: int) -> None:
        self.states, self.number = states, number

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        slots, states = context.slots, self.states
        assert slots is not None
        storage = self._storage(keys, values)
        for cache, new in zip(storage, (keys, values), strict=True):
            cache[states.write_blocks, :, states.write_slots] = new.transpose(1, 2)  # (batch, time, heads, width)
        if not states.reads_past:
            return keys, values, slots
        table = BlockTable(states.block_table, states.pool.size)
        found = [table.gather(cache)[:, :, : slots.time] for cache in storage]  # (batch, heads, end, width)
        if states.unused is not None:
            found = [one.masked_fill_(states.unused[:, None, :, None], 0) for one in found]
        return found[0], found[1], slots

    def _storage(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's storage, after copying shared blocks that are written to."""
        states = self.states
        storage = states.pool.layer(self.number, keys, values)
        if states.copies:
            old, own = (list(blocks) for blocks in zip(*states.copies, strict=True))
            for cache in storage:
                cache[own] = cache[old]
        return storage

    def attend_new_token(
        self, q: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float
    ) -> Tensor | None:
        queries, states = context.queries, self.states
        if not usable(q) or queries.segments is not None:
            return None
        if q.shape[-1] % 2 or states.pool.size == 1:  # to the kernel, blocks of one token are those of beams
            return None
        storage = self._storage(keys, values)
        lengths = queries.positions[:, 0].expand(len(q)).contiguous()
        new = keys[:, :, 0].contiguous(), values[:, :, 0].contiguous()
        table = BlockTable(states.block_table, states.pool.size)
        return decode_attention(q[:, :, 0].contiguous(), *storage, lengths, scale, table, new)[:, :, None]

    def select(self, rows: Tensor) -> None:
        pass  # block tables move

    def join(self, other: Self) -> None:
        pass

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass

    @property
    def bytes(self) -> int:
        storage = self.states.pool.storage.get(self.number, ())
        blocks = len({block for table in self.states.block_tables for block in table})
        return sum(cache[0].numel() * cache.itemsize for cache in storage) * blocks


class PagedStates(States):
    """States whose growing KV caches lie in a pool; other states stay as they are. `close` frees the blocks."""

    def __init__(self, states: States, pool: BlockPool) -> None:
        layers: list[dict[str, State]] = []
        own = list[State]()  # of a row's tokens, not of its source
        for number, layer in enumerate(states.layers):
            layers.append({})
            for name, state in layer.items():
                layers[-1][name] = state = PagedKVCache(self, number) if type(state) is KVCache else state
                if not state.shared:
                    own.append(state)
        super().__init__(layers, len(states.lengths), states.device, states.memory)
        self.pool = pool
        self.block_tables: list[list[int]] = [[] for _ in states.lengths]
        self.copies: list[tuple[int, int]] = []  # (shared block, own copy) of the tokens about to be written
        self.swapped: dict[int, tuple[Tensor, Tensor]] = {}  # blocks outside of the pool, by layer
        self.swapped_tables: list[list[int]] = []  # and which of them belong to each row
        pages = [isinstance(state, PagedKVCache) for state in own]
        self.has_pages, self.fully_paged = any(pages), all(pages)  # fully: no other state but a source's
        self.reads_past = True  # False: no row has tokens before the new ones
        # (batch, end) bool: behind the end of a row, where others may have left what is not finite; None: nowhere
        self.unused: Tensor | None = None
        # where new tokens are written (batch, time), and the block tables as a tensor (batch, blocks)
        self.write_blocks = self.write_slots = self.block_table = torch.empty(0, dtype=torch.long)

    def append_marks(self, new: TokenLayout, end: int) -> None:
        """Allocate the blocks of new tokens before they are stored, and find where they are written."""
        rows, size = len(self.lengths), self.pool.size
        counts = [new.time] * rows if new.segments is None else new.segments.sum(1).tolist()
        self.reserve(counts)
        super().append_marks(new, end)
        if not self.has_pages:
            return
        self.unused = self.behind([seen + count for seen, count in zip(self.lengths, counts, strict=True)], end)
        self.block_table = self.padded_table(end)
        positions = new.positions.expand(rows, -1)
        blocks = self.block_table.gather(1, positions // size)  # (batch, time)
        self.write_blocks = blocks if new.real is None else blocks.where(new.real, 0)
        self.write_slots = positions % size

    def behind(self, lengths: Sequence[int], end: int) -> Tensor | None:
        """The positions (batch, end) from the lengths of rows on; None if there are none."""
        if min(lengths, default=end) == end:
            return None
        return torch.arange(end, device=self.device) >= to_device(torch.tensor(lengths), self.device)[:, None]

    def padded_table(self, end: int, dtype: torch.dtype = torch.long) -> Tensor:
        """The block tables for positions up to `end` (batch, blocks); those of shorter rows end with block 0."""
        longest = max(*map(len, self.block_tables), -(-end // self.pool.size))
        table = [blocks + [0] * (longest - len(blocks)) for blocks in self.block_tables]
        return to_device(torch.tensor(table, dtype=dtype), self.device)

    def copy_shared_blocks(self) -> None:
        """Copy the shared blocks that are written to, in all layers (`PagedKVCache` does it in one layer)."""
        if self.copies:
            old, own = (list(blocks) for blocks in zip(*self.copies, strict=True))
            for storage in self.pool.storage.values():
                for cache in storage:
                    cache[own] = cache[old]
            self.copies = []

    def reserve(self, counts: Sequence[int]) -> None:
        """Allocate blocks for `counts` more tokens of each row, and copies of shared blocks. All or nothing."""
        if not self.has_pages:
            return
        size, needs, wanted = self.pool.size, [], 0
        ref_counts: dict[int, int] = {}
        for row, (seen, count) in enumerate(zip(self.lengths, counts, strict=True)):
            blocks = self.block_tables[row]
            more = max(0, -(-(seen + count) // size) - len(blocks))
            last = seen // size  # the block that is written to, if it exists
            shared = None
            if count and last < len(blocks):
                left = ref_counts.setdefault(blocks[last], self.pool.ref_counts[blocks[last]])
                if left > 1:
                    shared, ref_counts[blocks[last]] = last, left - 1
            needs.append((row, more, shared))
            wanted += more + (shared is not None)
        new = self.pool.allocate(wanted) if wanted else []
        self.copies = []
        for row, more, shared in needs if wanted else ():
            blocks = self.block_tables[row]
            if shared is not None:
                own = new.pop()
                self.copies.append((blocks[shared], own))
                self.pool.release([blocks[shared]])
                blocks[shared] = own
            if more:
                self.block_tables[row] = blocks + [new.pop() for _ in range(more)]

    def close(self) -> None:
        for blocks in self.block_tables:
            self.pool.release(blocks)
        self.block_tables = [[] for _ in self.block_tables]

    def adopt_blocks(self, row: int, blocks: list[int]) -> None:
        """Start a new row with these full blocks, already retained for it."""
        self.block_tables[row], self.lengths[row] = blocks, len(blocks) * self.pool.size

    def unpaged_rows(self, rows: Sequence[int]) -> States:
        """A copy of these rows in KV caches of their own."""
        copied = self.copy_rows(rows)
        end = max(copied.lengths)
        table, unused = BlockTable(copied.padded_table(end), self.pool.size), copied.behind(copied.lengths, end)
        layers: list[dict[str, State]] = []
        for layer in copied.layers:
            layers.append({})
            for name, state in layer.items():
                if isinstance(state, PagedKVCache):
                    cache, stored = KVCache(), self.pool.storage.get(state.number)
                    if stored is not None:
                        found = [table.gather(one)[:, :, :end] for one in stored]
                        if unused is not None:
                            found = [one.masked_fill_(unused[:, None, :, None], 0) for one in found]
                        (cache.keys, cache.values), cache.end = found, end
                    state = cache
                layers[-1][name] = state
        new = States(layers, len(rows), self.device, copied.memory)
        new.lengths, new.group, new.marks = copied.lengths, copied.group, copied.marks
        copied.close()
        return new

    def swap_out(self) -> None:
        """Copy the blocks out of the pool and free them."""
        blocks = sorted({block for table in self.block_tables for block in table})
        self.swapped = {n: (keys[blocks], values[blocks]) for n, (keys, values) in self.pool.storage.items()}
        index = {block: number for number, block in enumerate(blocks)}
        self.swapped_tables = [[index[block] for block in table] for table in self.block_tables]
        self.close()

    def swap_in(self) -> None:
        blocks = self.pool.allocate(self.swapped_blocks)
        for number, both in self.swapped.items():
            for cache, kept in zip(self.pool.storage[number], both, strict=True):
                cache[blocks] = kept
        self.block_tables = [[blocks[index] for index in table] for table in self.swapped_tables]
        for table in self.block_tables:
            self.pool.retain(table)
        self.pool.release(blocks)  # the rows hold them now
        self.swapped, self.swapped_tables = {}, []

    @property
    def swapped_blocks(self) -> int:
        """Blocks that `swap_in` allocates."""
        return 1 + max((index for table in self.swapped_tables for index in table), default=-1)

    def join(self, other: Self) -> None:
        super().join(other)
        self.block_tables, other.block_tables = self.block_tables + other.block_tables, []

    def copy_rows(self, rows: Sequence[int]) -> Self:
        for blocks in self.block_tables:  # retained for the copy, which releases those of other rows in `_select`
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
