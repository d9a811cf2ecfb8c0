"""What all layers of one forward pass share: the facts of the batch, and the plans made from them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from allyouneed.nn.batch import Rows
from allyouneed.nn.patterns.core import Place

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Where the tokens of one axis stand. Everything but the tensors is known without asking the device.

    `positions` (batch or 1, time): place in the own sentence.
    `segments` (batch, time) or None: number of the own sentence in the row, 0 for padding; None: one sentence a row.
    `start`: when every row's positions are start, start+1, …, this start; otherwise None.
    `packed`: rows hold several sentences.
    `prompt`, `chosen`, `order`, `types` (batch, time): what the batch says besides (see `Rows`); None where it says
    nothing.
    """

    positions: Tensor
    segments: Tensor | None = None
    start: int | None = None
    packed: bool = False
    prompt: Tensor | None = None
    chosen: Tensor | None = None
    order: Tensor | None = None
    types: Tensor | None = None

    @property
    def time(self) -> int:
        return self.positions.shape[1]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def real(self) -> Tensor | None:
        """(batch, time) bool: the places that are no padding; None when all are."""
        return None if self.segments is None else self.segments > 0

    @classmethod
    def of(cls, rows: Rows) -> TokenLayout:
        return replace(cls._of(rows), prompt=rows.prompt, chosen=rows.chosen, order=rows.order, types=rows.types)

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
        """New tokens in each row, after as many as it has `seen`; unequal numbers are padded on the right."""
        if new.order is not None:
            raise ValueError("decoding says tokens in reading order; leave out the batch's own order")
        if new.prompt is not None and any(n and bool(row.any()) for n, row in zip(seen, new.prompt, strict=True)):
            raise ValueError("tokens of a prompt see each other, so a prompt is read at once, before any other token")
        time, device = new.tokens.shape[1], new.tokens.device
        steps = torch.arange(time, device=device)[None]
        inside = None if new.lengths is None else (steps < new.lengths.to(device)[:, None]).long()
        if len(set(seen)) <= 1:
            start = seen[0] if seen else 0
            return cls(steps + start, inside, start, prompt=new.prompt, chosen=new.chosen, types=new.types)
        starts = torch.tensor(list(seen), device=device)[:, None]
        return cls(steps + starts, inside, prompt=new.prompt, chosen=new.chosen, types=new.types)

    def select(self, rows: Tensor) -> TokenLayout:
        def kept(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.index_select(0, rows)

        return replace(
            self,
            positions=self.positions if self.positions.shape[0] == 1 else self.positions.index_select(0, rows),
            segments=kept(self.segments),
            prompt=kept(self.prompt),
            chosen=kept(self.chosen),
            order=kept(self.order),
            types=kept(self.types),
        )

    def join(self, other: TokenLayout, rows: tuple[int, int]) -> TokenLayout:
        """Of both sides' rows (so many), the shorter ones padded on the right."""
        if self.packed or other.packed or any(x is not None for f in (self, other) for x in f._said):
            raise ValueError("packed rows, and rows with marks of their own, cannot be joined")
        time, start = max(self.time, other.time), self.start if self.start == other.start else None
        positions, segments = [], []
        for side, count in zip((self, other), rows, strict=True):
            real = side.segments if side.segments is not None else torch.ones_like(side.positions).expand(count, -1)
            segments.append(pad(real, (0, time - side.time)))
            positions.append(pad(side.positions.expand(count, -1), (0, time - side.time)))
        places = torch.cat(positions)
        if start is not None:
            places = torch.arange(start, start + time, device=self.device)[None]
        whole = self.segments is None and other.segments is None and self.time == other.time
        return TokenLayout(places, None if whole else torch.cat(segments), start)

    @property
    def _said(self) -> tuple[Tensor | None, ...]:
        return self.prompt, self.chosen, self.order, self.types

    def at(self, places: Tensor) -> TokenLayout:
        """Of the tokens at these places (batch or 1, few), none of which is padding."""

        def kept(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.take_along_dim(places, 1)

        positions = self.positions.take_along_dim(places, 1)
        said = (kept(self.prompt), kept(self.chosen), kept(self.order), kept(self.types))
        return TokenLayout(positions, None, None, False, *said)

    def place(self, axis: int) -> Place:
        """The places as (batch, …) tensors that broadcast along another axis: 1 for queries, 2 for keys."""
        other = 3 - axis

        def spread(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.unsqueeze(other)

        segments = self.segments if self.segments is not None else torch.ones_like(self.positions)
        said = (spread(self.prompt), spread(self.chosen), spread(self.order))
        return Place(self.positions.unsqueeze(other), segments.unsqueeze(other), *said)


def _restart(segments: Tensor) -> Tensor:
    """Positions that begin anew where a new segment begins."""
    steps = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return steps - torch.where(first, steps, 0).cummax(1).values


@dataclass(frozen=True, eq=False)
class Memory:
    """What an encoder hands to a decoder: hidden states (batch, time, width) and where they stand.

    `shared`: keys and values (batch, heads, time, head_width) already made of them, for all layers (mixers/attention/shared_kv.py).
    `inputs`: the embeddings they were made of.
    """

    hidden: Tensor
    layout: TokenLayout
    shared: tuple[Tensor, Tensor] | None = None
    inputs: Tensor | None = None

    def select(self, rows: Tensor) -> Memory:
        shared = None if self.shared is None else (self.shared[0][rows], self.shared[1][rows])
        inputs = None if self.inputs is None else self.inputs.index_select(0, rows)
        return Memory(self.hidden.index_select(0, rows), self.layout.select(rows), shared, inputs)

    def join(self, other: Memory) -> Memory:
        """Of the sources of both."""
        assert self.shared is None and other.shared is None, "keys for all layers are made anew in every pass"
        ours, theirs = (self.hidden, self.inputs), (other.hidden, other.inputs)
        time = max(self.hidden.shape[1], other.hidden.shape[1])
        hidden, inputs = (
            None if a is None or b is None else torch.cat([pad(x, (0, 0, 0, time - x.shape[1])) for x in (a, b)])
            for a, b in zip(ours, theirs, strict=True)
        )
        assert hidden is not None
        return Memory(hidden, self.layout.join(other.layout, (len(self.hidden), len(other.hidden))), None, inputs)


@dataclass
class Wanted:
    """Attention weights somebody wants to see: of these heads (None: all); `found` gets one entry each time the module
    is called, for a module that layers share is called by each of them."""

    heads: Sequence[int] | None = None
    found: list[Tensor] = field(default_factory=list)


Record = dict[nn.Module, Wanted]  # attention module -> what is wanted of it


class Replay:
    """What a part decided, in order, to be decided alike when the part is computed once more: an input taken back from
    the output differs in its last bits, and a choice made of it (a bucket, an expert) might turn out otherwise."""

    def __init__(self) -> None:
        self.decisions: list[Any] = []
        self.again: int | None = None  # the next decision to repeat; None: the first time

    def decide(self, make: Callable[[], T]) -> T:
        if self.again is None:
            self.decisions.append(make())
            found: T = self.decisions[-1]
            return found
        self.again += 1
        found = self.decisions[self.again - 1]
        return found


# what a layer reads, its context and its state -> memory; None: there is nothing to look at yet
Asks = Callable[[Tensor, "Context", Any], Memory | None]


@dataclass(eq=False)
class Context:
    """Handed to every layer. Layers read it; they never keep it."""

    queries: TokenLayout
    slots: TokenLayout | None = None  # decoding: the places of everything seen so far, the new tokens included
    memory: Memory | None = None
    inputs: Tensor | None = None  # the embeddings that went into the stack
    record: Record | None = None  # the attention weights somebody wants to see
    said: TokenLayout | None = (
        None  # with states: the first of the queries, where the others only ask and are not remembered
    )
    losses: list[Tensor] | None = None  # what parts add to the loss (a mixture's balance), each a mean over real tokens
    plans: dict[Hashable, Any] = field(default_factory=dict)
    # makes memory of what the first layer that looks at it reads (RETRO), where it is not there from the start
    asks: Asks | None = None
    replay: Replay | None = None  # there where a layer will be computed once more, for its gradients

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """Compute something once for all layers."""
        if key not in self.plans:
            self.plans[key] = make()
        found: T = self.plans[key]
        return found

    def call(self, part: Any, x: Any, state: Any = None) -> Any:
        """part(x). Stacks, blocks and wirings call every sub-layer, norm and end through here, so that a tracing
        context (runtime/trace.py) can record the call instead."""
        return part(x, context=self) if state is None else part(x, context=self, state=state)

    @property
    def kept(self) -> Context:
        """As it is for a state, which only takes in what is said."""
        if self.said is None:
            return self
        said = self.said
        return self.plan("kept", lambda: Context(said, self.slots))

    def decide(self, make: Callable[[], T]) -> T:
        """Compute something without gradients that must come out alike if this layer is computed once more."""
        return make() if self.replay is None else self.replay.decide(make)

    @property
    def again(self) -> bool:
        """This layer is being computed once more: what it counts and gathers, it has counted and gathered."""
        return self.replay is not None and self.replay.again is not None


def call_part(part: Any, x: Any, context: Context, state: Any = None) -> Any:
    """`context.call`, for partials: a wiring that recomputes a sub-layer replaces their `context`."""
    return context.call(part, x, state)
