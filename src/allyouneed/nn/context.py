"""State of one forward pass shared by all layers: token layout, memory, and memoized values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from allyouneed.nn.batch import Rows, to_device
from allyouneed.nn.observe import current_probe
from allyouneed.nn.patterns.core import TokenFields

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Layout of the tokens of one axis. All but the tensors is known on the host.

    `positions` (batch or 1, time): position in the sentence. `segments` (batch, time) or None: index of the sentence in
    the row, 0 for padding; None: one sentence per row. `start`: first position if every row has positions start,
    start+1, …; otherwise None. `packed`: several sentences per row. `consecutive`: tokens of a sentence are neighbours,
    and their positions follow one another. `prompt`, `chosen`, `order`, `types` (batch, time):
    optional marks of the batch, `mirrored`: how its rows belong together, `details` (batch, time, n): further ids (see
    `Rows`).
    """

    positions: Tensor
    segments: Tensor | None = None
    start: int | None = None
    packed: bool = False
    prompt: Tensor | None = None
    chosen: Tensor | None = None
    order: Tensor | None = None
    types: Tensor | None = None
    mirrored: bool = False
    details: Tensor | None = None
    consecutive: bool = False

    @property
    def time(self) -> int:
        return self.positions.shape[1]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def real(self) -> Tensor | None:
        """(batch, time) bool: tokens that are not padding; None if there is no padding."""
        return None if self.segments is None else self.segments > 0

    @property
    def real_positions(self) -> Tensor:
        """(batch or 1, time); those of padding, which may exceed all others, are 0."""
        return self.positions if self.real is None else self.positions.where(self.real, 0)

    @property
    def position_bound(self) -> int | None:
        """A number above all positions, if the host knows one."""
        return self.time if self.consecutive else None

    def longer_than(self, limit: int) -> int | None:
        """Tokens up to the last position, if they are more than `limit`. Reads from the device, unless rows are known
        to be no longer."""
        positions, bound = self.real_positions, self.position_bound
        if (bound is not None and bound <= limit) or not positions.numel():
            return None
        longest = int(positions.max()) + 1
        return longest if longest > limit else None

    @classmethod
    def of(cls, rows: Rows) -> TokenLayout:
        layout = replace(cls._of(rows), mirrored=rows.mirrored, details=rows.details)
        layout = replace(layout, consecutive=rows.positions is None)
        return replace(layout, prompt=rows.prompt, chosen=rows.chosen, order=rows.order, types=rows.types)

    @classmethod
    def _of(cls, rows: Rows) -> TokenLayout:
        device, (_, time) = rows.tokens.device, rows.tokens.shape
        steps = torch.arange(time, device=device)[None]  # (1, time)
        if rows.segments is not None:
            positions = rows.positions if rows.positions is not None else _restart(rows.segments)
            return cls(positions.where(rows.segments > 0, 0), rows.segments, packed=True)
        if rows.lengths is None:
            return cls(steps, start=0) if rows.positions is None else cls(rows.positions)
        lengths = rows.lengths.to(device)[:, None]
        counted = steps if rows.side == "right" else steps - (time - lengths)
        real = (counted >= 0) & (counted < lengths)
        if rows.positions is not None:
            return cls(rows.positions.where(real, 0), real.long())
        return cls(counted.clamp(min=0), real.long(), start=0 if rows.side == "right" else None)

    @classmethod
    def following(cls, seen: Sequence[int], new: Rows) -> TokenLayout:
        """Layout of new tokens that follow `seen` tokens per row; rows of unequal length are padded on the right."""
        if new.order is not None:
            raise ValueError("decoding does not support Rows.order; remove it")
        if new.prompt is not None and any(n and bool(row.any()) for n, row in zip(seen, new.prompt, strict=True)):
            raise ValueError("a prompt must be prefilled in one call, before any other token")
        time, device = new.tokens.shape[1], new.tokens.device
        steps = torch.arange(time, device=device)[None]
        inside = None if new.lengths is None else (steps < new.lengths.to(device)[:, None]).long()
        if len(set(seen)) <= 1:
            start = seen[0] if seen else 0
            layout = cls(steps + start, inside, start)
        else:
            layout = cls(steps + to_device(torch.tensor(list(seen)), device)[:, None], inside)
        return replace(layout, prompt=new.prompt, chosen=new.chosen, types=new.types, mirrored=new.mirrored)

    def select(self, rows: Tensor) -> TokenLayout:
        def take(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.index_select(0, rows)

        return replace(
            self,
            positions=self.positions if self.positions.shape[0] == 1 else self.positions.index_select(0, rows),
            segments=take(self.segments),
            prompt=take(self.prompt),
            chosen=take(self.chosen),
            order=take(self.order),
            types=take(self.types),
            details=take(self.details),
        )

    def join(self, other: TokenLayout, rows: tuple[int, int]) -> TokenLayout:
        """Concatenate the rows of both (`rows` of each), the shorter ones padded on the right."""
        if self.packed or other.packed or any(x is not None for f in (self, other) for x in f._marks):
            raise ValueError("cannot join packed rows or rows with marks")
        time, start = max(self.time, other.time), self.start if self.start == other.start else None
        positions, segments = [], []
        for side, count in zip((self, other), rows, strict=True):
            real = side.segments if side.segments is not None else torch.ones_like(side.positions).expand(count, -1)
            segments.append(pad(real, (0, time - side.time)))
            positions.append(pad(side.positions.expand(count, -1), (0, time - side.time)))
        joined = torch.cat(positions)
        if start is not None:
            joined = torch.arange(start, start + time, device=self.device)[None]
        whole = self.segments is None and other.segments is None and self.time == other.time
        return TokenLayout(joined, None if whole else torch.cat(segments), start)

    @property
    def _marks(self) -> tuple[Tensor | None, ...]:
        return self.prompt, self.chosen, self.order, self.types, self.details

    def at(self, columns: Tensor) -> TokenLayout:
        """Layout of the tokens at these columns (batch or 1, count), none of them padding."""

        def take(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.take_along_dim(columns, 1)

        positions = self.positions.take_along_dim(columns, 1)
        marks = (take(self.prompt), take(self.chosen), take(self.order), take(self.types))
        return TokenLayout(positions, None, None, False, *marks)

    def fields(self, axis: int) -> TokenFields:
        """Fields as (batch, …) tensors that broadcast along the other axis: 1 for queries, 2 for keys."""
        other = 3 - axis
        segments = self.segments if self.segments is not None else torch.ones_like(self.positions)
        marks = [None if one is None else one.unsqueeze(other) for one in (self.prompt, self.chosen, self.order)]
        return TokenFields(self.positions.unsqueeze(other), segments.unsqueeze(other), *marks)


def _restart(segments: Tensor) -> Tensor:
    """Positions that restart at every segment."""
    steps = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return steps - torch.where(first, steps, 0).cummax(1).values


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoder output for a decoder: hidden states (batch, time, width) and their layout.

    `shared`: keys and values (batch, heads, time, head_width) projected once for all layers
    (mixers/attention/shared_kv.py). `inputs`: the embeddings of the source. `tokens` (batch, time): its ids, if it is
    a text. `preceding`: the encoded sentences before the source (models/context_encoder.py).
    """

    hidden: Tensor
    layout: TokenLayout
    shared: tuple[Tensor, Tensor] | None = None
    inputs: Tensor | None = None
    tokens: Tensor | None = None
    preceding: Memory | None = None

    def select(self, rows: Tensor) -> Memory:
        shared = None if self.shared is None else (self.shared[0][rows], self.shared[1][rows])
        inputs, tokens = (None if x is None else x.index_select(0, rows) for x in (self.inputs, self.tokens))
        preceding = None if self.preceding is None else self.preceding.select(rows)
        return Memory(self.hidden.index_select(0, rows), self.layout.select(rows), shared, inputs, tokens, preceding)

    def join(self, other: Memory) -> Memory:
        """Concatenate the sources of both."""
        assert self.shared is None and other.shared is None, "shared keys exist only within a forward pass"
        ours, theirs = (self.hidden, self.inputs, self.tokens), (other.hidden, other.inputs, other.tokens)
        time = max(self.hidden.shape[1], other.hidden.shape[1])
        hidden, inputs, tokens = (
            None
            if a is None or b is None
            else torch.cat([pad(x, (0, 0) * (x.dim() - 2) + (0, time - x.shape[1])) for x in (a, b)])
            for a, b in zip(ours, theirs, strict=True)
        )
        assert hidden is not None
        layout = self.layout.join(other.layout, (len(self.hidden), len(other.hidden)))
        preceding = None
        if self.preceding is not None and other.preceding is not None:
            preceding = self.preceding.join(other.preceding)
        return Memory(hidden, layout, None, inputs, tokens, preceding)


@dataclass
class WeightRequest:
    """Request to record attention weights of these heads (None: all); `weights` gets one entry per call, several for a
    shared module."""

    heads: Sequence[int] | None = None
    weights: list[Tensor] = field(default_factory=list)


WeightRecord = dict[nn.Module, WeightRequest]  # attention module -> request


class ReplayedDecisions:
    """Decisions of a layer in order, to be repeated when the layer is recomputed: a recomputed input differs in its
    last bits, which could change a discrete choice (a bucket, an expert)."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []
        self.next: int | None = None  # index of the next decision to repeat; None: recording

    def decide(self, make: Callable[[], T]) -> T:
        if self.next is None:
            self.decisions.append(make())
            return self.decisions[-1]
        self.next += 1
        found = self.decisions[self.next - 1]
        return found


# (layer input, context, state) -> memory; None: no memory yet
MemoryBuilder = Callable[[Tensor, "Context", Any], Memory | None]


@dataclass(eq=False)
class Context:
    """Passed to every layer; layers read it and never keep it."""

    queries: TokenLayout
    slots: TokenLayout | None = None  # decoding: layout of all cached tokens, the new ones included
    memory: Memory | None = None
    inputs: Tensor | None = None  # embeddings of the stack input
    record: WeightRecord | None = None  # attention weights to record
    # decoding with a query stream: the leading queries, which are cached (models/two_stream.py)
    content: TokenLayout | None = None
    losses: list[Tensor] | None = None  # auxiliary losses (load balancing), each a mean over real tokens
    memo: dict[tuple[type, Hashable], Any] = field(default_factory=dict)
    # builds the memory from the input of the first layer that needs it (RETRO)
    memory_builder: MemoryBuilder | None = None
    skips: str | None = None  # a sub-layer that is left out (RETRO without retrieval: "cross")
    encoder_preceding: Memory | None = None  # for encoder layers: the encoded sentences before the source
    replay: ReplayedDecisions | None = None  # set if the layer will be recomputed for its gradients
    # a step of fixed shape (runtime/cuda): nothing may wait for the device, positions are known to be within limits
    static: bool = False

    def memoize(self, owner: type, name: Hashable, make: Callable[[], T]) -> T:
        """Compute a value once per forward pass for all layers. `owner`: the class that asks, so that parts of others
        may use the same names; `name` tells its values apart."""
        key = owner, name
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def call(self, part: Any, x: Any, state: Any = None) -> Any:
        """part(x). Stacks, blocks and wirings call every sub-layer, norm and end through here, so that a tracing
        context (runtime/trace.py) can record the call instead, and a probe the result."""
        if (probe := current_probe()) is not None:
            probe.call(part, x, self)
        found = part(x, context=self) if state is None else part(x, context=self, state=state)
        return found if probe is None else probe.observe(part, "", found)

    @property
    def preceding(self) -> Memory | None:
        """The encoded sentences before the source; None: there are none."""
        return self.encoder_preceding if self.memory is None else self.memory.preceding

    @property
    def content_context(self) -> Context:
        """The context for states, which cache the content stream only."""
        if self.content is None:
            return self
        content = self.content
        return self.memoize(Context, "content", lambda: Context(content, self.slots))

    def decide(self, make: Callable[[], T]) -> T:
        """Compute a value without gradients that must be equal if this layer is recomputed."""
        return make() if self.replay is None else self.replay.decide(make)

    @property
    def is_recomputing(self) -> bool:
        """Whether this layer is being recomputed: it must not update statistics or collect losses again."""
        return self.replay is not None and self.replay.next is not None
