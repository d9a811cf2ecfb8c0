"""Static KV cache: states of a fixed shape, a number of slots with a capacity of tokens each. A step over them needs no
host and can be captured in a CUDA graph (infer/cuda_graph/runner.py).

A slot holds one request, as a group of rows (beams, or samples). A row's token at position p lies in the row that its
block table names, at position p: reordering beams changes the table and moves no keys. Lengths live on the device; a
row without room overwrites its last position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.ops.attention.decode import BlockTable, decode_attention
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache, KVState
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.runtime.rules import Rules


class StaticKVCache(KVState):
    """Keys and values (rows, heads, capacity, head_width) of one layer, written in place."""

    def __init__(self, states: StaticStates, keys: Tensor, values: Tensor) -> None:
        self.states, self.keys, self.values = states, keys, values

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """One token per row."""
        assert context.slots is not None and keys.shape[2] == 1
        rows, positions = self.states.row_ids, context.queries.positions[:, 0]
        self.keys[rows, :, positions] = keys[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, positions] = values[:, :, 0].to(self.values.dtype)
        if self.states.group == 1:
            return self.keys, self.values, context.slots
        table = self.states.table
        return table.gather(self.keys), table.gather(self.values), context.slots

    def attend(
        self, q: Tensor, new: tuple[Tensor, Tensor], positions: Tensor, scale: float, rotation: Tensor | None
    ) -> Tensor:
        """Store one new token per row at `positions` (rows,) and attend to all up to it: (rows, heads, head_width).
        Arguments: see `decode_attention`."""
        states = self.states
        return decode_attention(
            q, self.keys, self.values, positions, scale, states.table, new, rotation, states.counters
        )

    def load(self, given: Prefilled, past: State) -> None:
        """Copy a prefilled cache into the first row of each slot."""
        assert isinstance(past, KVCache | WindowKVCache)
        rows = given.rows[:, 0]
        if past.keys is None or past.values is None:
            return
        if isinstance(past, KVCache):
            self.keys[rows, :, : past.end] = past.keys[:, :, : past.end]
            self.values[rows, :, : past.end] = past.values[:, :, : past.end]
            return
        held = past.stored_layout()
        assert held.real is not None
        # empty slots go to the last position, which is written before it is read
        positions = held.positions.where(held.real, self.states.capacity - 1)
        self.keys[rows[:, None], :, positions] = past.keys[:, :, : held.time].transpose(1, 2)
        self.values[rows[:, None], :, positions] = past.values[:, :, : held.time].transpose(1, 2)

    def select(self, rows: Tensor) -> None:
        pass  # the block table moves

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # positions behind a row's length are masked

    @property
    def bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize


class StaticCrossKVCache(CrossKVCache):
    """Keys and values of the sources (slots, heads, source capacity, head_width), shared by the rows of a slot."""

    def __init__(self, part: CrossAttention, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.part, self.keys, self.values, self.end = part, keys, values, keys.shape[2]

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, CrossKVCache) and self.keys is not None and self.values is not None
        keys, values = past.keys, past.values
        if keys is None or values is None:
            assert given.memory is not None
            keys, values = self.part.source(given.memory.hidden, Context(given.memory.layout))
        self.keys[given.slots, :, : keys.shape[2]] = keys
        self.values[given.slots, :, : keys.shape[2]] = values


class Prefilled(NamedTuple):
    """Requests that were prefilled: their slots (n,), the rows of each (n, group), and their encoded sources."""

    slots: Tensor
    rows: Tensor
    memory: Memory | None


# rule(part, states, dtype) -> a state of a fixed shape, with `load(given: Prefilled, past: State)`
make_static_state = Rules("fixed-shape state")


@make_static_state.register(SelfAttention)
def _kv_cache(part: SelfAttention, states: StaticStates, dtype: torch.dtype) -> StaticKVCache:
    sizes = (2, states.rows, part.kv_heads, states.capacity, part.head_width)
    return StaticKVCache(states, *torch.zeros(sizes, dtype=dtype, device=states.device))


@make_static_state.register(CrossAttention)
def _cross_kv_cache(part: CrossAttention, states: StaticStates, dtype: torch.dtype) -> StaticCrossKVCache:
    sizes = (2, states.slot_count, part.kv_heads, states.source_capacity, part.head_width)
    return StaticCrossKVCache(part, *torch.zeros(sizes, dtype=dtype, device=states.device))


class StaticStates(States):
    """States of a `stack` of decoder blocks: `slot_count` slots of `group` rows, with `capacity` tokens of each row and
    `source_capacity` tokens of a source (0: no source). `device_lengths` (rows,) are its lengths on the device."""

    joins = False

    def __init__(self, stack: Any, slots: int, group: int, capacity: int, sources: int) -> None:
        weight = next(stack.parameters())
        device, dtype = weight.device, weight.dtype
        self.slot_count, self.capacity, self.source_capacity = slots, capacity, sources
        self.rows = rows = slots * group
        self.row_ids = torch.arange(rows, device=device)
        self.device_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        memory: Memory | None = None
        if sources:
            real = torch.zeros(slots, sources, dtype=torch.long, device=device)
            real[:, 0] = 1
            layout = TokenLayout(torch.arange(sources, device=device)[None], real, start=0)
            memory = Memory(torch.zeros(slots, 0, 0, device=device), layout)
        super().__init__([], rows, device, memory)
        self.group = group
        self.static_layout = TokenLayout(torch.arange(capacity, device=device)[None])
        entries = 1 if group == 1 else capacity
        self.block_table = self.row_ids.int()[:, None].expand(rows, entries).contiguous()
        self.table = BlockTable(self.block_table, 0 if group == 1 else 1, 1 if group == 1 else None)
        self.source_table = BlockTable((self.row_ids // group).int()[:, None].contiguous(), 0, group)
        self.source_lengths = torch.ones(rows, dtype=torch.long, device=device)
        heads = [getattr(part, "kv_heads", 1) for block in stack.blocks for part in block.sublayers.values()]
        self.counters = torch.zeros(rows * max(heads), dtype=torch.int32, device=device)
        self.layers = [
            {
                name: make_static_state(part, self, dtype)
                for name, part in block.sublayers.items()
                if make_static_state.get(part) is not None
            }
            for block in stack.blocks
        ]

    @property
    def lengths(self) -> list[int]:
        """Read from the device: a synchronisation, not for a decode step."""
        found: list[int] = self.device_lengths.tolist()
        return found

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self.device_lengths.copy_(torch.tensor(list(lengths)))

    def slot_layout(self, end: int) -> TokenLayout:
        """All positions: there is no other shape."""
        return self.static_layout

    def load(self, stack: Any, slots: Tensor, past: States, counts: Tensor) -> None:
        """Copy prefilled states, a row each, into these slots; `counts`: how many of their tokens to keep."""
        rows = slots[:, None] * self.group + torch.arange(self.group, device=self.device)  # (slots, group)
        self.device_lengths[rows] = counts[:, None].expand_as(rows)
        if self.group > 1:  # the prompt lies in the first row of a slot
            self.block_table[rows] = rows[:, :1, None].int().expand(-1, -1, self.capacity)
        memory = past.memory
        if memory is not None:
            assert self.memory is not None and self.memory.layout.segments is not None
            time, real = memory.hidden.shape[1], memory.layout.segments
            segments = torch.zeros(len(slots), self.source_capacity, dtype=torch.long, device=self.device)
            segments[:, :time] = 1 if real is None else real
            self.memory.layout.segments[slots] = segments
            self.source_lengths[rows] = segments.sum(1)[:, None].expand_as(rows)
        given = Prefilled(slots, rows, memory)
        for layer, others in zip(self.layers, past.layers, strict=True):
            static: dict[str, Any] = {**layer}
            for name, state in static.items():
                state.load(given, others[name])

    def reorder(self, rows: Tensor) -> None:
        """Row i continues row `rows[i]` of its own slot, which has as many tokens."""
        self.block_table.copy_(self.block_table.index_select(0, rows))

    def select(self, rows: Sequence[int]) -> None:
        """Reorder rows within their slots."""
        if [row // self.group for row in rows] != [row // self.group for row in range(self.rows)]:
            self._refuse()
        index = torch.tensor(list(rows), device=self.device)
        self.device_lengths.copy_(self.device_lengths.index_select(0, index))
        self.reorder(index)

    def repeat_rows(self, group: int) -> None:
        self._refuse()

    def copy_rows(self, rows: Sequence[int]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(
            "the shape of static states is fixed: their rows cannot be repeated, copied or dropped"
        )

    @staticmethod
    def bytes_per_token(stack: Any) -> int:
        """Of one row."""
        parts = [part for block in stack.blocks for part in block.sublayers.values() if isinstance(part, SelfAttention)]
        return sum(2 * part.kv_width for part in parts) * next(stack.parameters()).itemsize


def attend_source(q: Tensor, state: CrossKVCache, states: StaticStates, scale: float) -> Tensor:
    """(rows, heads, head_width): one token per row attends to its source, which all rows of a slot share."""
    keys, values, lengths = state.keys, state.values, states.source_lengths
    assert keys is not None and values is not None
    return decode_attention(q, keys, values, lengths, scale, states.source_table, counters=states.counters)
