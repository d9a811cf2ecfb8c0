"""States of a constant size in a fixed-shape form: tensors (rows, …) that every step overwrites.

Plain states also keep recent inputs, so that tokens can be trimmed; these need not, for `load` fills a slot anew. Their
tensors are allocated by the first step, before a graph is captured (`GraphRunner`), as rows that have seen no token:
`StaticTensors.fresh` remembers them for requests that start with an empty past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.mixers.attention.chunked_cross import ChunkedCrossAttention, RetrievedKeyValues
from allyouneed.nn.mixers.attention.infini import CompressiveMemory, InfiniModule
from allyouneed.nn.mixers.attention.lsh import HashedKeyValues
from allyouneed.nn.mixers.attentive_gru import AttentiveGRUModule, AttentiveGRUState
from allyouneed.nn.mixers.convolution import RecentTokens
from allyouneed.nn.mixers.performer import PerformerCross, SourceFeatureSums
from allyouneed.nn.ops.deferred import Deferred, Recent
from allyouneed.nn.states.base import State
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.states.recurrent import Carry, Recurrent
from allyouneed.runtime.cuda.static_cache import OWN_SOURCE, Prefilled, StaticStates, StaticTokens, make_static_state


class StaticTensors:
    """Tensors (rows, …) that are only written in place, and what they hold for a row that has seen no token."""

    def __init__(self, fresh: Sequence[Tensor]) -> None:
        self.tensors = tuple(x.clone() for x in fresh)
        self.fresh = tuple(x[:1].clone() for x in fresh)
        # (rows, elements) as they lie in memory, so that whole rows are copied without being transposed
        self.flat = tuple(x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1)) for x in self.tensors)
        self.kept: tuple[Tensor, ...] = ()  # (tokens, rows, elements)

    def write(self, new: Sequence[Tensor]) -> None:
        for own, value in zip(self.tensors, new, strict=True):
            own.copy_(value)

    def select(self, rows: Tensor) -> None:
        for own in self.flat:
            own.copy_(own.index_select(0, rows))

    def load(self, given: Prefilled, past: Sequence[Tensor] | None) -> None:
        """Prefilled values (n, …), one row each, for all rows of their slots; None: no token was prefilled."""
        for number, own in enumerate(self.tensors):
            value = self.fresh[number].expand(len(given.rows), *own.shape[1:]) if past is None else past[number]
            own[given.rows] = value[:, None].to(own.dtype).expand(-1, given.rows.shape[1], *own.shape[1:])

    def keep(self, token: int, tokens: int) -> None:
        """Remember the values after one of several tokens, for `restore`."""
        if not self.kept:
            self.kept = tuple(own.new_empty(tokens, *own.shape) for own in self.flat)
        for kept, own in zip(self.kept, self.flat, strict=True):
            kept[token].copy_(own)

    def restore(self, token: Tensor) -> None:
        """The values after this token (rows,) of each row."""
        rows = torch.arange(len(token), device=token.device)
        for kept, own in zip(self.kept, self.flat, strict=True):
            own.copy_(kept[token, rows])

    @property
    def bytes(self) -> int:
        return sum(own.numel() * own.itemsize for own in self.tensors)


def by_columns(x: Tensor) -> Tensor:
    """The same matrices (…, m, width + 1), stored by columns: kernels read pieces of 16 bytes, which start anywhere in
    rows of an odd length."""
    return x.mT.contiguous().mT


class InPlace:
    """A state whose tensors keep their place once they are known: `fixed`."""

    fixed: StaticTensors | None = None

    def select(self, rows: Tensor) -> None:
        if self.fixed is not None:
            self.fixed.select(rows)

    @property
    def bytes(self) -> int:
        return 0 if self.fixed is None else self.fixed.bytes


class StaticRecurrent(InPlace, Recurrent):
    """The carry of a recurrence."""

    def carry(self, batch: int, like: Tensor) -> Carry:
        if self.fixed is None:
            self.fixed = StaticTensors([x.contiguous() for x in self.begin(batch, like)])
        return self.fixed.tensors

    def update(self, inputs: Tensor, carry: Carry, context: Context, between: Carry | None = None) -> None:
        assert self.fixed is not None
        self.fixed.write(carry)

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, Recurrent) and self.fixed is not None
        self.fixed.load(given, past.now)


class DeferredRecurrent(StaticRecurrent):
    """The carry of a recurrence whose matrices are written once in several tokens (nn/ops/deferred.py): beside it, the
    tokens since then. Matrices are stored by columns."""

    def __init__(self, part: Deferred) -> None:
        super().__init__(part.begin, part.fold)
        self.part = part

    def buffers(self, batch: int, like: Tensor) -> tuple[Carry, Recent]:
        """The carry, and the tokens that its matrices do not hold yet."""
        if self.fixed is None:
            carry = self.begin(batch, like)
            stored = [by_columns(x) if x.dim() == 4 else x.contiguous() for x in carry]
            self.fixed = StaticTensors([*stored, *self.part.begin_recent(carry)])
        keys, values, logs = self.fixed.tensors[-3:]
        return self.fixed.tensors[:-3], (keys, values, logs)

    def advance(self, run: Any, inputs: Tensor, context: Context, *others: Tensor) -> Any:
        """One token per row."""
        carry, recent = self.buffers(len(inputs), inputs)
        return self.part.step(inputs, carry, recent, context.queries.positions[:, 0])

    def load(self, given: Prefilled, past: State) -> None:
        """Prefilled matrices hold all tokens."""
        assert isinstance(past, Recurrent) and self.fixed is not None
        none = [fresh.expand(len(given.rows), *fresh.shape[1:]) for fresh in self.fixed.fresh[-3:]]
        self.fixed.load(given, None if past.now is None else [*past.now, *none])


class StaticRecentTokens(InPlace, RecentTokens):
    """The last `back` inputs (rows, back, width)."""

    def append(self, x: Tensor, context: Context) -> Tensor:
        tokens = self.buffer(x)
        both = torch.cat((tokens, x), 1)
        tokens.copy_(both[:, 1:])
        return both

    def buffer(self, like: Tensor) -> Tensor:
        """The stored inputs, for tokens like these (rows, 1, width)."""
        if self.fixed is None:
            self.fixed = StaticTensors([like.new_zeros(len(like), self.back, like.shape[2])])
        return self.fixed.tensors[0]

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, RecentTokens) and self.fixed is not None
        self.fixed.load(given, None if past.tokens is None else [past.tokens[:, -self.back :]])


class StaticNestedStates(NestedStates):
    """The fixed-shape states of nested parts."""

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, NestedStates)
        static: dict[str, Any] = {**self.parts}
        for name, state in static.items():
            state.load(given, past.parts[name])


class StaticHashedKeyValues(HashedKeyValues):
    """Keys, values and buckets (rows, heads, capacity, …)."""

    def __init__(self, states: StaticStates) -> None:
        super().__init__()
        self.stored = StaticTokens(states)

    def append_hashed(
        self, k: Tensor, v: Tensor, buckets: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, TokenLayout]:
        assert context.slots is not None
        self.stored.write((k, v, buckets), context.queries.positions[:, 0])
        keys, values, all_buckets = self.stored.read()
        return keys, values, all_buckets, context.slots

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, HashedKeyValues)
        if past.keys is not None and past.values is not None and past.buckets is not None:
            self.stored.load(given, [x[:, :, : past.end] for x in (past.keys, past.values, past.buckets)])

    def select(self, rows: Tensor) -> None:
        pass  # the block table moves

    @property
    def bytes(self) -> int:
        return self.stored.bytes


class StaticCompressiveMemory(InPlace, CompressiveMemory):
    """Infini-attention's memory of the segments before the current one; rotated keys and values of the current one
    (rows, heads, slots, head_width), as many slots as a row has tokens if that is less than a segment; and
    `following`: the memory with its tokens so far, which becomes the memory when the segment ends. Within a segment
    the memory is constant, so that each token is added once (eq. 4, 5).
    """

    fixed: StaticTensors | None = None  # memory, following, keys, values

    def __init__(self, module: InfiniModule, capacity: int) -> None:
        super().__init__(module)
        self.slots = min(module.segment, capacity)

    def append(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        module, segment = self.module, self.module.segment
        memory, following, keys, values = self.buffers(k)
        place = context.memoize(InfiniModule, ("place", segment), lambda: context.queries.positions % segment)
        slots = torch.arange(self.slots, device=place.device)[None]
        memory.copy_(torch.where((place == 0)[..., None, None], following, memory))
        following.copy_(following + module.added(memory, k, v))
        rows = torch.arange(len(k), device=k.device)
        keys[rows, :, place[:, 0]] = module.rotate(k, place, False, context)[:, :, 0]
        values[rows, :, place[:, 0]] = v[:, :, 0]
        near = sdpa(module.rotate(q, place, True, context), keys, values, (slots <= place)[:, None, None])
        return near, module.read(memory, q)

    def buffers(self, k: Tensor) -> tuple[Tensor, ...]:
        """All tensors, for keys like these (rows, heads, 1, head_width)."""
        if self.fixed is None:
            empty, kept = self.module.initial_memory(k), k.new_zeros(*k.shape[:2], self.slots, k.shape[3])
            self.fixed = StaticTensors([by_columns(empty), by_columns(empty), kept, kept])
        return self.fixed.tensors

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, CompressiveMemory) and self.fixed is not None
        self.fixed.load(given, None if past.memory is None else self._continued(past))

    def _continued(self, past: CompressiveMemory) -> tuple[Tensor, ...]:
        """What this state holds after the tokens of a plain one, whose memory may lag behind."""
        assert past.memory is not None and past.lengths is not None and past.since is not None
        assert past.keys is not None and past.values is not None
        module, segment = self.module, self.module.segment
        memory, count = past.memory, past.lengths - past.since  # (n,): cached tokens
        # the last token's segment: a complete one is moved into the memory by the next token
        current = (count - 1).clamp(min=0) // segment
        following, known = memory, torch.arange(segment, device=count.device)
        keys, values = (cache[:, :, :segment] for cache in (past.keys, past.values))
        for number in range(-(-past.kept // segment)):
            some = slice(number * segment, (number + 1) * segment)
            k, v = (cache[:, :, some] for cache in (past.keys, past.values))
            real = known[: k.shape[2]] < (count - number * segment)[:, None]
            here = (current == number)[:, None, None, None]
            after = module.update_memory(memory, k, v, real)
            following = torch.where(here, after, following)
            missing = segment - k.shape[2]
            k, v = (nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
            keys, values = torch.where(here, k, keys), torch.where(here, v, values)
            memory = torch.where((current > number)[:, None, None, None], after, memory)
        context = Context(TokenLayout(known[None]))
        keys = module.rotate(keys, known[None], False, context)
        return memory, following, keys[:, :, : self.slots], values[:, :, : self.slots]


class StaticFeatureSums(SourceFeatureSums):
    """Performer's sums of the sources (slots, …)."""

    def __init__(self, part: PerformerCross, states: StaticStates) -> None:
        super().__init__()
        self.part = part
        hidden = torch.zeros(states.slot_count, 1, states.width, dtype=states.dtype, device=states.device)
        with torch.no_grad():
            self.sums = part.source(hidden, None)

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, SourceFeatureSums) and self.sums is not None
        sums = past.sums
        if sums is None:
            assert given.memory is not None
            sums = self.part.source(given.memory.hidden, given.memory.layout.real)
        self.sums[given.slots] = sums


class StaticAttentiveGRUState(AttentiveGRUState):
    """The last state of each row, and the keys of the sources (slots, source capacity, …)."""

    def __init__(self, part: AttentiveGRUModule, states: StaticStates) -> None:
        super().__init__()
        self.part, self.recent = part, StaticRecentTokens(1)
        assert states.memory is not None
        with torch.no_grad():
            self.keys = part.key(states.memory.hidden)

    def last(self, begin: Tensor, context: Context) -> Tensor:
        recent = self.recent.fixed  # type: ignore[attr-defined]
        if recent is None:
            return begin
        return torch.where(context.queries.positions[:, :1] > 0, recent.tensors[0][:, -1], begin)

    def keys_of(self, memory: Memory, project: nn.Module) -> Tensor:
        assert self.keys is not None
        return self.keys

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, AttentiveGRUState) and given.memory is not None and self.keys is not None
        self.recent.load(given, past.recent)  # type: ignore[attr-defined]
        self.keys[given.slots, : given.memory.hidden.shape[1]] = self.part.key(given.memory.hidden)


class StaticRetrievedKeyValues(RetrievedKeyValues):
    """Keys and values of the sources (slots, heads, source capacity, head_width) for chunked cross-attention."""

    def __init__(self, part: ChunkedCrossAttention, states: StaticStates) -> None:
        super().__init__()
        self.part, self.end = part, states.source_capacity
        sizes = (2, states.slot_count, part.kv_heads, self.end, part.head_width)
        self.keys, self.values = torch.zeros(sizes, dtype=states.dtype, device=states.device)

    def load(self, given: Prefilled, past: State) -> None:
        assert given.memory is not None and self.keys is not None and self.values is not None
        keys, values = self.part.project_memory(given.memory, 0, Context(given.memory.layout))
        self.keys[given.slots, :, : keys.shape[2]] = keys
        self.values[given.slots, :, : keys.shape[2]] = values


OWN_SOURCE.add(SourceFeatureSums)


def fixed_in(states: Any) -> Iterator[StaticTensors]:
    """The tensors of constant size in these states; they exist after the first step."""
    if isinstance(states, dict):
        states = list(states.values())
    if isinstance(states, list):
        for state in states:
            yield from fixed_in(state)
    elif isinstance(states, NestedStates):
        yield from fixed_in(states.parts)
    elif isinstance(states, AttentiveGRUState):
        yield from fixed_in(states.recent)
    elif isinstance(fixed := getattr(states, "fixed", None), StaticTensors):
        yield fixed


@make_static_state.register(Recurrent)
def _recurrent(state: Recurrent, part: Any, states: StaticStates) -> StaticRecurrent:
    if isinstance(part, Deferred):
        return DeferredRecurrent(part)
    return StaticRecurrent(state.begin, state.fold)


@make_static_state.register(RecentTokens)
def _recent(state: RecentTokens, part: Any, states: StaticStates) -> StaticRecentTokens:
    return StaticRecentTokens(state.back)


@make_static_state.register(NestedStates)
def _nested(state: NestedStates, part: Any, states: StaticStates) -> StaticNestedStates:
    inside = dict(getattr(part, "pieces", part).named_children())
    found = {name: make_static_state(one, inside.get(name), states) for name, one in state.parts.items()}
    return StaticNestedStates(found)


@make_static_state.register(HashedKeyValues)
def _hashed(state: HashedKeyValues, part: Any, states: StaticStates) -> StaticHashedKeyValues:
    return StaticHashedKeyValues(states)


@make_static_state.register(CompressiveMemory)
def _compressive(state: CompressiveMemory, part: Any, states: StaticStates) -> StaticCompressiveMemory:
    return StaticCompressiveMemory(state.module, states.capacity)


@make_static_state.register(SourceFeatureSums)
def _feature_sums(state: SourceFeatureSums, part: PerformerCross, states: StaticStates) -> StaticFeatureSums:
    return StaticFeatureSums(part, states)


@make_static_state.register(AttentiveGRUState)
def _attentive(state: AttentiveGRUState, part: AttentiveGRUModule, states: StaticStates) -> StaticAttentiveGRUState:
    return StaticAttentiveGRUState(part, states)


@make_static_state.register(RetrievedKeyValues)
def _retrieved(
    state: RetrievedKeyValues, part: ChunkedCrossAttention, states: StaticStates
) -> StaticRetrievedKeyValues:
    return StaticRetrievedKeyValues(part, states)
