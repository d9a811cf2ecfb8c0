"""Static KV cache: states of a fixed shape, a number of slots with a capacity of tokens each. A step over them needs no
host and can be captured in a CUDA graph (infer/cuda_graph/runner.py).

A slot holds one request, as a group of rows (beams, or samples). A row's token at position p lies in the row that its
block table names, at position p: reordering beams changes the table and moves no keys. Lengths live on the device; a
row without room overwrites its last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.shared_kv import SharedKeys
from allyouneed.nn.models.decoder_decoder import DecoderDecoderModel
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.ops.attention.decode import (
    BlockTable,
    DilatedBranches,
    RelativeTables,
    copy_blocks,
    decode_attention,
    rotate_halves,
)
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache, KVState
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.nn.sublayer import SubLayer
from allyouneed.runtime.rules import Rules


class Prefilled(NamedTuple):
    """Requests that were prefilled: their slots (n,), the rows of each (n, group), and their encoded sources."""

    slots: Tensor
    rows: Tensor
    memory: Memory | None


class StaticTokens:
    """Tensors (rows, heads, capacity, features) of every token, written in place; allocated by the first write, before
    a graph is captured, unless they are given."""

    def __init__(self, states: StaticStates, stored: Sequence[Tensor] = ()) -> None:
        self.states, self.stored = states, tuple(stored)

    def allocate(self, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`like`: tensors (n, heads, time, features) of other rows."""
        if not self.stored:
            rows, capacity = self.states.rows, self.states.capacity
            self.stored = tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in like)
        return self.stored

    def write(self, new: Sequence[Tensor], positions: Tensor) -> None:
        """One token per row: tensors (rows, heads, 1, features), positions (rows,)."""
        for stored, one in zip(self.allocate(new), new, strict=True):
            stored[self.states.row_ids, :, positions] = one[:, :, 0].to(stored.dtype)

    def write_rows(self, new: Sequence[Tensor], rows: Tensor, positions: Tensor) -> None:
        """Tokens of any rows: tensors (n, heads, features), rows and positions (n,)."""
        for stored, one in zip(self.allocate([x[:, :, None] for x in new]), new, strict=True):
            stored[rows, :, positions] = one.to(stored.dtype)

    def read(self) -> tuple[Tensor, ...]:
        """Every row's tokens, in order of their positions."""
        if self.states.group == 1:
            return self.stored
        return tuple(self.states.table.gather(stored) for stored in self.stored)

    def load(self, given: Prefilled, past: Sequence[Tensor], positions: Tensor | None = None) -> None:
        """Copy the tokens (n, heads, time, features) of prefilled rows into the first row of each slot, at `positions`
        (n, time) or from position 0 on."""
        rows = given.rows[:, 0]
        for stored, old in zip(self.allocate(past), past, strict=True):
            if positions is None:
                stored[rows, :, : old.shape[2]] = old.to(stored.dtype)
            else:
                stored[rows[:, None], :, positions] = old.transpose(1, 2).to(stored.dtype)

    def load_blocks(self, rows: Tensor, past: Sequence[Tensor], table: BlockTable, counts: Tensor) -> None:
        """Copy the first `counts` (n,) tokens of a paged cache, (blocks, heads, size, features) each, into these rows
        (n,)."""
        for stored, old in zip(self.allocate(past), past, strict=True):
            copy_blocks(old, table, stored, rows, counts)

    @property
    def bytes(self) -> int:
        return sum(stored.numel() * stored.itemsize for stored in self.stored)


class StaticKVCache(KVState):
    """Keys and values (rows, heads, capacity, head_width) of one layer."""

    def __init__(self, states: StaticStates, stored: Sequence[Tensor] = ()) -> None:
        self.states, self.tokens = states, StaticTokens(states, stored)

    @property
    def keys(self) -> Tensor:
        return self.tokens.stored[0]

    @property
    def values(self) -> Tensor:
        return self.tokens.stored[1]

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """One token per row."""
        assert context.slots is not None and keys.shape[2] == 1
        self.tokens.write((keys, values), context.queries.positions[:, 0])
        keys, values = self.tokens.read()
        return keys, values, context.slots

    def attend(
        self, q: Tensor, new: tuple[Tensor, Tensor], positions: Tensor, scale: float, rotation: Tensor | None,
        bias: Tensor | None = None, relative: RelativeTables | None = None, branches: DilatedBranches | None = None,
    ) -> Tensor:  # fmt: skip
        """Store one new token per row at `positions` (rows,) and attend to all up to it: (rows, heads, head_width).
        Arguments: see `decode_attention`. Several tokens per row (multi_token.py) are all stored before they attend."""
        states = self.states
        if len(positions) > states.rows:
            key = new[0]
            if rotation is not None:
                key = rotate_halves(key, *rotation[:, None].chunk(2, -1))
            self.tokens.write_rows((key, new[1]), states.rows_of(len(positions)), positions)
            table, counts = states.table_of(len(positions)), positions + 1
            return decode_attention(
                q, self.keys, self.values, counts, scale, table, None, rotation, states.counters, bias, relative,
                branches,
            )  # fmt: skip
        return decode_attention(
            q, self.keys, self.values, positions, scale, states.table, new, rotation, states.counters, bias, relative,
            branches,
        )  # fmt: skip

    def allocate(self, like: tuple[Tensor, Tensor]) -> None:
        self.tokens.allocate(like)

    @property
    def most(self) -> int:
        """Tokens of a row that are stored at most."""
        return self.states.capacity

    def slot_layout(self, context: Context) -> TokenLayout:
        """The layout of all stored tokens, the new ones included."""
        return self.states.static_layout

    def load(self, given: Prefilled, past: State) -> None:
        """Copy a prefilled cache into the first row of each slot."""
        assert isinstance(past, KVCache | WindowKVCache)
        if past.keys is None or past.values is None:
            return
        if isinstance(past, KVCache):
            self.tokens.load(given, (past.keys[:, :, : past.end], past.values[:, :, : past.end]))
            return
        held = past.stored_layout()
        assert held.real is not None
        # empty slots go to the last position, which is written before it is read
        positions = held.positions.where(held.real, self.states.capacity - 1)
        self.tokens.load(given, (past.keys[:, :, : held.time], past.values[:, :, : held.time]), positions)

    def select(self, rows: Tensor) -> None:
        pass  # the block table moves

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # positions behind a row's length are masked

    @property
    def bytes(self) -> int:
        return self.tokens.bytes


class StaticCrossKVCache(CrossKVCache):
    """Keys and values of the sources (slots, heads, source capacity, head_width), shared by the rows of a slot."""

    def __init__(self, part: CrossAttention, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.part, self.keys, self.values, self.end = part, keys, values, keys.shape[2]

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, CrossKVCache) and self.keys is not None and self.values is not None
        keys, values = past.keys, past.values
        if keys is None or values is None:
            memory = given.memory
            if memory is not None and _reads_context(self.part):
                memory = memory.preceding
            assert memory is not None
            keys, values = self.part.source(memory.hidden, Context(memory.layout))
        self.keys[given.slots, :, : keys.shape[2]] = keys
        self.values[given.slots, :, : keys.shape[2]] = values


# rule(state, part, states) -> the fixed-shape form of a part's state, with `load(given: Prefilled, past: State)`
make_static_state = Rules("fixed-shape form", __name__)


PLAIN = (RelativeModule, RotaryModule)  # positions that add no features to keys


@make_static_state.register(KVCache)
def static_kv_cache(state: State, part: Any, states: StaticStates) -> StaticKVCache:
    """For attention, allocated at once, since its kernels write into it; otherwise when a token is first stored."""
    if type(part) is not SelfAttention or part.caches_hidden or type(part.relative) not in PLAIN:
        return StaticKVCache(states)
    sizes = (2, states.rows, part.kv_heads, states.capacity, part.head_width)
    return StaticKVCache(states, tuple(torch.zeros(sizes, dtype=states.dtype, device=states.device)))


@make_static_state.register(CrossKVCache)
def _cross_kv_cache(state: State, part: CrossAttention, states: StaticStates) -> StaticCrossKVCache:
    sizes = (2, states.slot_count, part.kv_heads, states.source_capacity, part.head_width)
    return StaticCrossKVCache(part, *torch.zeros(sizes, dtype=states.dtype, device=states.device))


def step_stacks(model: Any) -> list[tuple[str, Stack]]:
    """The stacks that a new token runs through, by name."""
    names = ("first", "second") if isinstance(model, DecoderDecoderModel) else ("decoder",)
    return [(name, getattr(model, name)) for name in names]


def step_layers(owner: Any) -> list[dict[str, Any]]:
    """The parts of a model's decoder, or of a stack, that may keep states: by name, for each entry of its
    `States.layers`."""
    if isinstance(owner, Stack):
        return [dict(block.sublayers.items()) for block in owner.blocks]  # type: ignore[union-attr, operator]
    if isinstance(owner, DecoderDecoderModel):
        return [*step_layers(owner.first), {"keys": owner.keys}, *step_layers(owner.second)]
    return step_layers(owner.decoder)


def _reads_context(part: Any) -> bool:
    """Whether a part attends to the sentences before the source."""
    return getattr(part, "reads_context", False)


# plain states whose fixed-shape forms hold all that their parts need of a source
OWN_SOURCE: set[type] = {CrossKVCache}


def plain_state(part: Any) -> State | None:
    """What a part keeps while it decodes; None also where it cannot decode, or where it depends on weights that a meta
    model does not have (adaptive spans)."""
    if isinstance(part, SharedKeys):
        return KVCache()
    if not isinstance(part, SubLayer):
        return None
    try:
        found: State | None = part.new_state()
    except (ValueError, RuntimeError):
        return None
    return found


class StaticStates(States):
    """States of a model, or of a stack of decoder blocks: `slot_count` slots of `group` rows, with `capacity` tokens of
    each row and `source_capacity` tokens of a source (0: no source). `device_lengths` (rows,) are its lengths on the
    device. `tokens`: a row may get as many at once (multi_token.py). Encoded sources are kept as a whole if a part or
    the head reads them in every step."""

    joins = False

    def __init__(self, owner: Any, slots: int, group: int, capacity: int, sources: int, tokens: int = 1) -> None:
        weight = next(owner.parameters())
        device, self.dtype = weight.device, weight.dtype
        self.width: int = owner.width if isinstance(owner, Stack) else owner.config.width
        self.slot_count, self.capacity, self.source_capacity, self.tokens = slots, capacity, sources, tokens
        self.rows = rows = slots * group
        self.row_ids = torch.arange(rows, device=device)
        self.device_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        parts = step_layers(owner)
        plain = [{name: plain_state(part) for name, part in layer.items()} for layer in parts]
        memory: Memory | None = None
        if sources:
            crosses = [layer["cross"] for layer in plain if "cross" in layer]
            read = getattr(getattr(owner, "head", None), "reads_source", False)
            read = read or any(type(state) not in OWN_SOURCE for state in crosses)
            memory = self._empty_memory(self.width if read else 0, device)
            if any(_reads_context(part) for layer in parts for part in layer.values()):
                memory = replace(memory, preceding=self._empty_memory(0, device))
        super().__init__([], rows, device, memory)
        self.group = group
        self.static_layout = TokenLayout(torch.arange(capacity, device=device)[None])
        entries = 1 if group == 1 else capacity
        self.block_table = self.row_ids.int()[:, None].expand(rows, entries).contiguous()
        self.table = BlockTable(self.block_table, 0 if group == 1 else 1, 1 if group == 1 else None)
        self.own_rows = BlockTable(self.row_ids.int()[:, None].contiguous(), 0, 1)  # of caches that beams do not share
        self.source_table = BlockTable((self.row_ids // group).int()[:, None].contiguous(), 0, group)
        self.source_lengths = torch.ones(rows, dtype=torch.long, device=device)
        inside = [one for layer in parts for part in layer.values() for one in part.modules()]
        heads = [getattr(one, "kv_heads", getattr(one, "heads", 1)) for one in inside]
        self.counters = torch.zeros(rows * tokens * max(heads, default=1), dtype=torch.int32, device=device)
        self.derived: list[Callable[[], None]] = []  # compute again what was made of weights (derived.py)
        self.token_rows = self.row_ids.repeat_interleave(tokens)  # of all new tokens
        self.token_blocks = self.block_table.repeat_interleave(tokens, 0)
        sources_of = (self.token_rows // group).int()[:, None].contiguous()
        self.token_sources = BlockTable(sources_of, 0, group * tokens)
        self.layers = [
            {name: make_static_state(state, parts[n][name], self) for name, state in layer.items() if state is not None}
            for n, layer in enumerate(plain)
        ]

    def rows_of(self, queries: int) -> Tensor:
        """The row of each query; a row has one query or `tokens`."""
        return self.row_ids if queries == self.rows else self.token_rows

    def table_of(self, queries: int) -> BlockTable:
        if queries == self.rows:
            return self.table
        return self.table._replace(blocks=self.token_blocks, rows_per_block=self.tokens if self.group == 1 else None)

    def _empty_memory(self, width: int, device: torch.device) -> Memory:
        """A memory of sources that are one token long; `width` 0 if nothing reads them."""
        sizes = (self.slot_count, self.source_capacity)
        real = torch.zeros(sizes, dtype=torch.long, device=device)
        real[:, 0] = 1
        layout = TokenLayout(torch.arange(self.source_capacity, device=device)[None], real, start=0)
        if not width:
            return Memory(torch.zeros(self.slot_count, 0, 0, device=device), layout)
        hidden, inputs = torch.zeros(2, *sizes, width, dtype=self.dtype, device=device)
        return Memory(hidden, layout, None, inputs, torch.zeros(sizes, dtype=torch.long, device=device))

    @property
    def lengths(self) -> list[int]:
        """The lengths, read from the device: a synchronisation, not for a decode step."""
        found: list[int] = self.device_lengths.tolist()
        return found

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self.device_lengths.copy_(torch.tensor(list(lengths)))

    def slot_layout(self, end: int) -> TokenLayout:
        """All positions: there is no other shape."""
        return self.static_layout

    def load(self, slots: Tensor, past: States, counts: Tensor) -> None:
        """Copy prefilled states, a row each, into these slots; `counts`: how many of their tokens to keep."""
        rows, memory = self.reset_rows(slots, counts), past.memory
        if memory is not None:
            assert self.memory is not None
            time, segments = memory.hidden.shape[1], self._load_segments(slots, self.memory, memory)
            if self.memory.preceding is not None and memory.preceding is not None:
                self._load_segments(slots, self.memory.preceding, memory.preceding)
            self.source_lengths[rows] = segments.sum(1)[:, None].expand_as(rows)
            kept = zip(*((m.hidden, m.inputs, m.tokens) for m in (self.memory, memory)), strict=True)
            for own, given_source in kept:
                if own is not None and given_source is not None and own.numel():
                    own[slots, :time] = given_source.to(own.dtype)
        given = Prefilled(slots, rows, memory)
        for layer, others in zip(self.layers, past.layers, strict=True):
            static: dict[str, Any] = {**layer}
            for name, state in static.items():
                state.load(given, others[name])

    def refresh(self) -> None:
        """Recompute what was derived from weights, which may have changed. Not part of a captured graph."""
        for update in self.derived:
            update()

    def reset_rows(self, slots: Tensor, counts: Tensor) -> Tensor:
        """The rows (slots, group) of these slots, which now have `counts` tokens; a prompt's are in the first."""
        rows = slots[:, None] * self.group + torch.arange(self.group, device=self.device)
        self.device_lengths[rows] = counts[:, None].expand_as(rows)
        if self.group > 1:
            self.block_table[rows] = rows[:, :1, None].int().expand(-1, -1, self.capacity)
        return rows

    def load_blocks(
        self, slots: Tensor, past: Sequence[Sequence[Tensor]], table: BlockTable, counts: Tensor, copied: Tensor
    ) -> None:
        """`load` from the blocks of a pool: `past` are its tensors, layer by layer. `copied`: how many tokens to copy,
        which may be fewer where a slot is given twice."""
        rows = self.reset_rows(slots, counts)[:, 0].contiguous()
        for layer, stored in zip(self.layers, past, strict=True):
            for state in layer.values():
                assert isinstance(state, StaticKVCache)
                state.tokens.load_blocks(rows, stored, table, copied)

    def _load_segments(self, slots: Tensor, own: Memory, given: Memory) -> Tensor:
        """Which tokens of the sources are real, (slots, source capacity)."""
        assert own.layout.segments is not None
        real = given.layout.segments
        segments = torch.zeros(len(slots), self.source_capacity, dtype=torch.long, device=self.device)
        segments[:, : given.hidden.shape[1]] = 1 if real is None else real
        own.layout.segments[slots] = segments
        return segments

    def reorder(self, rows: Tensor) -> None:
        """Row i continues row `rows[i]` of its own slot, which has as many tokens."""
        self.block_table.copy_(self.block_table.index_select(0, rows))
        for layer in self.layers:
            for state in layer.values():
                if not state.shared:
                    state.select(rows)

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


def attend_source(q: Tensor, state: CrossKVCache, states: StaticStates, scale: float) -> Tensor:
    """(rows, heads, head_width): each query attends to its source, which all rows of a slot share."""
    keys, values, lengths, table = state.keys, state.values, states.source_lengths, states.source_table
    assert keys is not None and values is not None
    if q.shape[-3] > states.rows:
        lengths, table = lengths[states.token_rows], states.token_sources
    return decode_attention(q, keys, values, lengths, scale, table, counters=states.counters)
