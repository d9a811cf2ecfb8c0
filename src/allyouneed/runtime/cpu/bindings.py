"""The states of a model as the interpreter reads and writes them: addresses, kept until a state gets other tensors.

A pass updates carries and lengths in place. So that nothing else changes with them (a snapshot, a copy of the states),
a binding gives the state tensors of its own the first time it sees it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels.cpu.abi import Cache, Mask, Memory
from allyouneed.nn.patterns.core import Pattern, TokenFields
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.states.paged import PagedKVCache, PagedStates
from allyouneed.nn.states.recurrent import TAIL, Recurrent
from allyouneed.nn.states.window import MAX_TRIM, WindowKVCache
from allyouneed.runtime.cpu.instructions import FORMATS, CacheSlot, MemorySlot
from allyouneed.runtime.rules import Rules

HUGE = LARGE = 2 << 20  # bytes of a huge page, and of a carry that is moved to some
SETTLED = 16  # passes after which it is
bind_state = Rules("native binding", __name__)  # of states of constant size: rule(state, features, memory)
AHEAD = 64  # positions whose masks are computed together, and tokens that recent ones are moved after


class StateBinding:
    """Binds all states that a program reads; `supported`: they are of the kinds that it was written for."""

    def __init__(
        self, caches: Sequence[CacheSlot], memories: Sequence[MemorySlot], masks: Sequence[Pattern], states: States
    ) -> None:
        self.layers, self.source = states.layers, states.memory
        self.slots = caches
        self.states: list[Any] = [find_state(slot, states) for slot in caches]
        paged = isinstance(states, PagedStates)
        self.supported = list(map(type, self.states)) == [kind_of_cache(slot, paged) for slot in caches]
        self.keys: list[Tensor | None] = [None] * len(caches)
        self.caches = (Cache * max(1, len(caches)))()
        self.memories = (Memory * max(1, len(memories)))()
        self.masks = (Mask * max(1, len(masks)))()
        self.mask_tables = [MaskTable(pattern) for pattern in masks]
        self.bound: list[Any] = []
        for number, memory in enumerate(memories):
            state = find_state(memory, states)
            kind = bind_state.get(state)
            if kind is None:
                self.supported = False
            else:
                self.bound.append(kind(state, memory.features, self.memories[number]))
        self.source_lengths: Any = None
        if states.memory is not None:
            layout = states.memory.layout
            self.supported = self.supported and layout.start == 0 and not layout.packed
            count = len(states.memory.hidden)
            ends = [layout.time] * count if layout.real is None else layout.real.sum(1).tolist()
            self.source_lengths = (ctypes.c_int32 * count)(*ends)

    def point(self, number: int) -> None:
        """Point to the keys and values that a cache has now."""
        state = self.states[number]
        keys, values = state.keys, state.values
        if keys.dtype is not torch.float32 or keys.stride(3) != 1 or (values.shape[3] and values.stride(3) != 1):
            keys, values = keys.float().contiguous(), values.float().contiguous()
            replace_cache(state, keys, values)
        self.point_to(number, keys, values)
        if self.slots[number].rounds:
            state.buckets = state.buckets.contiguous()
            cache = self.caches[number]
            cache.buckets = state.buckets.data_ptr()
            cache.bucket_row, cache.bucket_head, cache.bucket_time = state.buckets.stride()[:3]

    def point_to(self, number: int, keys: Tensor, values: Tensor, paged: bool = False) -> None:
        """Tensors (rows or blocks, heads, time, head_width)."""
        cache = self.caches[number]
        cache.paged = paged
        self.keys[number] = keys
        values = values if values.shape[3] else keys
        cache.keys, cache.values = keys.data_ptr(), values.data_ptr()
        cache.row, cache.head, cache.time = keys.stride()[:3]
        cache.value_row, cache.value_head, cache.value_time = values.stride()[:3]

    def prepare(self, rows: int, starts: Sequence[int], like: Tensor) -> bool:
        """Prepare a pass of one token per row; False where a state has other rows. `like`: dtype of new carries."""
        for mask, table in zip(self.masks, self.mask_tables, strict=False):
            table.point(mask, starts)
        return all(one.prepare(rows, like) for one in self.bound)

    def finish(self, end: int) -> None:
        """Update the states after a pass; no row has more than `end` tokens."""
        for one in self.bound:
            one.finish(end)
        done: dict[int, tuple[Tensor, Tensor]] = {}  # layers share these tensors
        for slot, state in zip(self.slots, self.states, strict=True):
            if not slot.window:
                continue
            if id(state.lengths) not in done:
                lengths = state.lengths + 1
                done[id(state.lengths)] = lengths, state.written.maximum(lengths)
                done[id(lengths)] = done[id(state.lengths)]
            state.lengths, state.written = done[id(state.lengths)]


def find_state(slot: CacheSlot | MemorySlot, states: States) -> State | None:
    name, *inner = slot.state.name.split("/")
    found = states.layers[slot.state.layer].get(name)
    for name in inner:
        found = found.parts.get(name) if isinstance(found, NestedStates) else None
    return found


def leaf_states(states: Iterable[State]) -> Iterator[State]:
    """States, and instead of nested ones those inside them."""
    for state in states:
        if isinstance(state, NestedStates):
            yield from leaf_states(state.parts.values())
        else:
            yield state


def kind_of_cache(slot: CacheSlot, paged: bool) -> type:
    """`paged`: growing caches of whole sub-layers lie in a pool."""
    if slot.state.name == "cross":
        return CrossKVCache
    if slot.window:
        return WindowKVCache
    if slot.rounds:
        from allyouneed.nn.mixers.attention.lsh import HashedKeyValues

        return HashedKeyValues
    return PagedKVCache if paged and "/" not in slot.state.name else KVCache


def grow_window(state: WindowKVCache, slot: CacheSlot, rows: int, end: int) -> None:
    """Make room for the tokens of a pass in a ring that is not full yet."""
    state.end = min(end, state.first + state.ring)
    if state.keys is None or state.end >= state.keys.shape[2]:
        state.keys = state._grow(state.keys, torch.empty(rows, slot.heads, 0, slot.head_width))
        state.values = state._grow(state.values, torch.empty(rows, slot.heads, 0, slot.value_width))
    if state.lengths is None or state.written is None:
        state.lengths = state.written = torch.zeros(rows, dtype=torch.long)


def replace_cache(state: Any, keys: Tensor, values: Tensor) -> None:
    """Replace a cache by tensors of another dtype, which have no spare rows."""
    state.keys, state.values = keys, values
    if isinstance(state, KVCache):
        state.drop_spare()


def grow_cache(state: KVCache, slot: CacheSlot, rows: int, capacity: int) -> None:
    """Grow a cache to `rows` rows and `capacity` tokens."""
    sizes = {"keys": (slot.head_width, torch.float32), "values": (slot.value_width, torch.float32)}
    sizes |= {"buckets": (slot.rounds, torch.int32)} if slot.rounds else {}
    for name, (width, dtype) in sizes.items():
        grown, cache = torch.zeros(rows, slot.heads, capacity, width, dtype=dtype), getattr(state, name)
        if cache is not None:
            grown[:, :, : cache.shape[2]] = cache
        setattr(state, name, grown)
    state.drop_spare()


class MaskTable:
    """Which keys a pattern allows to the queries of a pass; of rows at the same position, also to the next ones."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.start = 0
        self.table = torch.empty(0, 0, dtype=torch.uint8)  # (queries, keys)

    def point(self, mask: Any, starts: Sequence[int]) -> None:
        first, last = min(starts), max(starts)
        if first == last:
            if not self.start <= first < self.start + len(self.table):
                self.start, self.table = first, self.allowed(torch.arange(first, first + AHEAD))
            mask.allowed, mask.row = self.table[first - self.start].data_ptr(), 0
        else:
            self.table, self.start = self.allowed(torch.tensor(starts)), -len(starts) - 1
            mask.allowed, mask.row = self.table.data_ptr(), self.table.shape[1]

    def allowed(self, positions: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.long)
        keys = torch.arange(int(positions.max()) + 1)[None]
        found = self.pattern.allowed(TokenFields(positions[:, None], one), TokenFields(keys, one))
        return found.expand(len(positions), keys.shape[1]).to(torch.uint8).contiguous()


def unchanged(known: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether a state still has the tensors that it was bound with; none are known before."""
    return len(known) == len(now) and all(was is one for was, one in zip(known, now, strict=True))


def in_single_precision(tensor: Tensor) -> Tensor:
    """A copy; a count of tokens stays an integer, of as many bytes."""
    return tensor.detach().to(single_dtype(tensor), copy=True).contiguous()


def single_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else torch.int32


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in single precision. Of a large one, a third of the time to read and write it would be address
    translation."""
    return in_single_precision(tensor) if tensor.numel() * 4 < LARGE else huge_pages(tensor).copy_(tensor)


def huge_pages(like: Tensor) -> Tensor:
    """Zeros of this shape. The system clears the pages of a large one when they are first written to."""
    if like.numel() * 4 < LARGE:
        return torch.zeros_like(like, dtype=single_dtype(like), memory_format=torch.contiguous_format)
    # of shared memory, mmap's default, most systems give none
    memory = mmap.mmap(-1, like.numel() * 4 + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=single_dtype(like))  # holds the memory
    return pages.narrow(0, -pages.data_ptr() % HUGE // 4, like.numel()).view(like.shape)


@bind_state.register(Recurrent)
class RecurrentBinding:
    """Carry, inputs and lengths of a `Recurrent`; the carry consists of numbers of four bytes. A new state's carry is
    copied to huge pages, since most stay where they are. Rows that are reordered in every step are copied in every
    step: their carry moves to huge pages once it has stayed in place for a while."""

    def __init__(self, state: Recurrent, features: int, memory: Any) -> None:
        self.state, self.features, self.memory = state, features, memory
        self.known: tuple[Any, ...] = ()  # what the addresses belong to
        self.snapshot: Any = None  # that is this state's alone
        self.passes = 0  # since the carry was copied

    def prepare(self, rows: int, like: Tensor) -> bool:
        state = self.state
        if state.now is not None and state.lengths is not None and len(state.lengths) != rows:
            return False
        if state.most + 1 > TAIL:
            if not unchanged(self.known, self.tensors()):
                self.bind(rows, like)
            if state.snapshot is not self.snapshot:
                state.snapshot = self.snapshot = tuple(part.clone() for part in state.snapshot)
            state.make_room()
        if self.passes == SETTLED or not unchanged(self.known, self.tensors()):
            self.bind(rows, like)
        return True

    def tensors(self) -> tuple[Any, ...]:
        state = self.state
        return state.now, state.pending, state.tail, state.since, state.lengths, state.pending_at

    def bind(self, rows: int, like: Tensor) -> None:
        state = self.state
        carry = state.carry(rows, like.new_empty(rows, 1, self.features))
        now, (known, pending) = carry, self.known[:2] or (None, None)
        settled = known is None or (carry is known and self.passes == SETTLED)
        copied, empty = (in_huge_pages, huge_pages) if settled else (in_single_precision, torch.empty_like)
        if settled or carry is not known:
            now, self.passes = tuple(map(copied, carry)), SETTLED + 1 if settled else 0
        if state.tail is None or state.since is None or state.lengths is None:
            state.tail = like.new_zeros(rows, TAIL + 1, self.features)
            state.since, state.lengths = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        state.tail = state.tail.detach().contiguous()
        if state.pending_at is None:
            state.pending = now
            state.pending_at = state.lengths.where(state.lengths - state.since == MAX_TRIM, -1)
        state.now, state.lengths, state.since = now, state.lengths.clone(), state.since.clone()
        if state.pending is not pending:  # else this state's alone already
            state.pending = tuple(map(empty if bool((state.pending_at < 0).all()) else copied, state.pending))
        pending, state.pending_at = state.pending, state.pending_at.clone()
        self.held = (
            (ctypes.c_void_p * len(now))(*(part.data_ptr() for part in now)),
            (ctypes.c_void_p * len(now))(*(part.data_ptr() for part in pending)),
            (ctypes.c_int32 * len(now))(*(part[0].numel() for part in now)),
        )
        memory = self.memory
        memory.carry, memory.pending, memory.sizes = (ctypes.addressof(array) for array in self.held)
        memory.parts, memory.snapshot_after, memory.format = len(now), MAX_TRIM, FORMATS[state.tail.dtype]
        memory.inputs, memory.row = state.tail.data_ptr(), state.tail.stride(0)
        memory.lengths, memory.since = state.lengths.data_ptr(), state.since.data_ptr()
        memory.pending_at = state.pending_at.data_ptr()
        self.known = self.tensors()

    def finish(self, end: int) -> None:
        self.state.most += 1
        self.passes += 1
