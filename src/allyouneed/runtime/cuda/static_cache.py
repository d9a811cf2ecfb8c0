"""States of a fixed shape: so many rows, with places for so many tokens each. A step over them asks the host nothing
and can be captured in a CUDA graph (infer/cuda_graph/runner.py).

Rows come in groups (beams, or several draws) that belong to one seat. A row's token at place p lies in the row that its
table names, at slot p: reordering beams moves numbers in tables and no keys. Lengths live on the device; whoever has no
more room writes into the last place again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.kernels import usable
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache, KVState
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.runtime.rules import Rules


class StaticKVCache(KVState):
    """Keys and values (rows, heads, capacity, head_width) of one layer, written in place."""

    def __init__(self, states: StaticStates, keys: Tensor, values: Tensor) -> None:
        self.states, self.keys, self.values = states, keys, values

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """One token a row."""
        assert context.slots is not None and keys.shape[2] == 1
        self.put(keys[:, :, 0], values[:, :, 0], context.queries.positions[:, 0])
        return *self.gathered(), context.slots

    def put(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """(rows, heads, head_width) each, at these places (rows,)"""
        self.keys[self.states.row_ids, :, positions] = keys.to(self.keys.dtype)
        self.values[self.states.row_ids, :, positions] = values.to(self.values.dtype)

    def load(self, given: Prefilled, past: State) -> None:
        """The first row of each group gets the keys and values of a prompt."""
        assert isinstance(past, KVCache | WindowKVCache)
        rows = given.rows[:, 0]
        if past.keys is None or past.values is None:
            return
        if isinstance(past, KVCache):
            self.keys[rows, :, : past.end] = past.keys[:, :, : past.end]
            self.values[rows, :, : past.end] = past.values[:, :, : past.end]
            return
        held = past.held()  # what is not there goes where nothing is looked at before it is written
        assert held.real is not None
        places = held.positions.where(held.real, self.states.capacity - 1)
        self.keys[rows[:, None], :, places] = past.keys[:, :, : held.time].transpose(1, 2)
        self.values[rows[:, None], :, places] = past.values[:, :, : held.time].transpose(1, 2)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """What each row's table names, row by row; where nobody shares, what is there."""
        if self.states.group == 1:
            return self.keys, self.values
        slots, table = self.states.static_layout.positions[0], self.states.block_table.long()
        keys, values = (cache[table, :, slots].transpose(1, 2) for cache in (self.keys, self.values))
        return keys, values

    def attend(
        self, q: Tensor, new: tuple[Tensor, Tensor], positions: Tensor, scale: float, turns: Tensor | None
    ) -> Tensor:
        """Of one new token a row, (rows, heads, head_width): its key and value come in, and it sees all there is.
        `turns` (rows, head_width): cosines beside sines by which its query and key are turned."""
        if usable(q):
            from allyouneed.kernels.triton.decode_attention import decode_attention

            every, states = 0 if self.states.group == 1 else 1, self.states
            return decode_attention(
                q, self.keys, self.values, states.block_table, positions, scale, every, new, turns, states.arrived
            )
        k, v = new
        if turns is not None:
            cos, sin = turns[:, None].chunk(2, -1)  # (rows, 1, head_width / 2) each
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        self.put(k, v, positions)
        keys, values = self.gathered()
        seen = self.states.static_layout.positions <= positions[:, None]  # (rows, capacity)
        found = sdpa(
            q[:, :, None], keys, values, seen[:, None, None], scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
        )
        return found[:, :, 0]

    def select(self, rows: Tensor) -> None:
        raise NotImplementedError("rows of a fixed shape stay; their tables move")

    def trim(self, length: int, each: Tensor | None = None) -> None:
        raise NotImplementedError("what is behind a row's length is not seen")

    @property
    def bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * self.keys.itemsize


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


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
    """Requests that were prefilled: their slots (n,), the rows of each (n, group), and what encodes their sources."""

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


class StaticStates:
    """Of a model's `stack` of decoder blocks. `row_ids`: the numbers of the rows. `sources`: the longest source; 0:
    there is none."""

    def __init__(self, stack: Any, seats: int, group: int, capacity: int, sources: int) -> None:
        weight = next(stack.parameters())
        device, dtype = weight.device, weight.dtype
        self.slot_count, self.group, self.capacity, self.source_capacity = seats, group, capacity, sources
        rows = seats * group
        self.rows, self.device = rows, device
        self.row_ids = torch.arange(rows, device=device)
        self.device_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.static_layout = TokenLayout(torch.arange(capacity, device=device)[None])
        each = 1 if group == 1 else capacity
        self.block_table = self.row_ids.int()[:, None].expand(rows, each).contiguous()
        self.source_table = (self.row_ids // group).int()[:, None].contiguous()
        self.source_lengths = torch.ones(rows, dtype=torch.long, device=device)
        heads = [getattr(part, "kv_heads", 1) for block in stack.blocks for part in block.sublayers.values()]
        self.arrived = torch.zeros(rows * max(heads), dtype=torch.int32, device=device)  # for kernels to count with
        self.memory: Memory | None = None
        if sources:
            real = torch.zeros(seats, sources, dtype=torch.long, device=device)
            real[:, 0] = 1
            layout = TokenLayout(torch.arange(sources, device=device)[None], real, start=0)
            self.memory = Memory(torch.zeros(seats, 0, 0, device=device), layout)
        self.layers: list[dict[str, Any]] = [
            {
                name: make_static_state(part, self, dtype)
                for name, part in block.sublayers.items()
                if make_static_state.get(part) is not None
            }
            for block in stack.blocks
        ]

    def load(self, stack: Any, chairs: Tensor, seen: States, counts: Tensor) -> None:
        """These seats are taken by texts of which this has been seen (a row each), and so much of it counts."""
        rows = chairs[:, None] * self.group + torch.arange(self.group, device=self.device)  # (seats, group)
        self.device_lengths[rows] = counts[:, None].expand_as(rows)
        if self.group > 1:  # what is given lies with the first of them
            self.block_table[rows] = rows[:, :1, None].int().expand(-1, -1, self.capacity)
        memory = seen.memory
        if memory is not None:
            assert self.memory is not None and self.memory.layout.segments is not None
            time, real = memory.hidden.shape[1], memory.layout.segments
            segments = torch.zeros(len(chairs), self.source_capacity, dtype=torch.long, device=self.device)
            segments[:, :time] = 1 if real is None else real
            self.memory.layout.segments[chairs] = segments
            self.source_lengths[rows] = segments.sum(1)[:, None].expand_as(rows)
        given = Prefilled(chairs, rows, memory)
        for layer, past in zip(self.layers, seen.layers, strict=True):
            for name, state in layer.items():
                state.load(given, past[name])

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on with the past of row `rows[i]` of its own group."""
        self.block_table.copy_(self.block_table.index_select(0, rows))

    @staticmethod
    def bytes_per_token(stack: Any) -> int:
        """Of one token of a row."""
        parts = [part for block in stack.blocks for part in block.sublayers.values() if isinstance(part, SelfAttention)]
        return sum(2 * part.narrow for part in parts) * next(stack.parameters()).itemsize


def attend_source(q: Tensor, state: CrossKVCache, states: StaticStates, scale: float) -> Tensor:
    """(rows, heads, head_width): of one token a row, at its source; all rows of a seat share one."""
    keys, values = state.keys, state.values
    assert keys is not None and values is not None and states.memory is not None
    if usable(q):
        from allyouneed.kernels.triton.decode_attention import decode_attention

        lengths, arrived = states.source_lengths, states.arrived
        return decode_attention(q, keys, values, states.source_table, lengths, scale, every=0, arrived=arrived)
    real = states.memory.layout.real
    assert real is not None
    beams = q.view(states.slot_count, states.group, *q.shape[1:]).transpose(1, 2)  # (seats, heads, group, head_width)
    found = sdpa(beams, keys, values, real[:, None, None], scale=scale, enable_gqa=q.shape[1] != keys.shape[1])
    return found.transpose(1, 2).reshape(q.shape)
