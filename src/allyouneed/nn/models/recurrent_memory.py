"""A decoder with memory tokens that are passed from segment to segment: the Recurrent Memory Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.tokens import TokenEmbed
from allyouneed.nn.models.base import (
    GenerativeModel,
    Layers,
    Problem,
    Size,
    last_positions,
    outer_problems,
    stack_problems,
)
from allyouneed.nn.models.decoder import DecoderModel
from allyouneed.nn.models.stack import behind, stack_cost
from allyouneed.nn.ops.unpack import UnpackedRows
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.window import MAX_TRIM


class RecurrentMemory(GenerativeModel):
    """Bulatov et al. 2022, "Recurrent Memory Transformer", 3.2: a text is read in segments of `segment`
    tokens, each between two copies of the memory,

        H̃_τ = [M_τ ∘ H_τ ∘ M_τ],   M_{τ+1} = the stack's outputs at the last copy

    The first copy is read by the segment's tokens, the second has read the whole segment when it is written. No layer
    sees other segments, and the gradient flows back through the memory. The first memory is learned.

    Patterns see both copies as `prompt`: `causal | prompt` lets the tokens of each copy attend to each other, as in the
    paper; with `causal` they attend to earlier ones only, as in the authors' later code for pretrained decoders.
    """

    kind: Literal["recurrent-memory"] = "recurrent-memory"
    memory: Size
    """Memory tokens (m)."""
    segment: Size
    """Tokens of a segment, without the memory."""
    bptt: Size | None = None
    """Number of segments after which the gradient is cut; 1: each segment is trained alone. Default: it flows through
    all segments of a training row."""
    decoder: Layers
    """The stack's layers: a list of layers, or text over the names defined under `layers`."""

    @property
    def limit(self) -> int | None:
        return None  # positions are counted within a segment

    @property
    def bounded_state(self) -> bool:
        return True

    @property
    def longest(self) -> int:
        """Positions of a segment with both copies of the memory."""
        return self.segment + 2 * self.memory

    @property
    def kept(self) -> int:
        """Segments whose memory and tokens are kept, so that the last tokens can be trimmed."""
        return 2 + MAX_TRIM // self.segment

    def build(self) -> RecurrentMemoryModel:
        return RecurrentMemoryModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """The cost of a text token, with its share of the memory tokens."""
        used = min(length, self.segment) + 2 * self.memory
        stack = stack_cost(self.decoder, self, used)
        state = stack.state_constant + stack.state_per_token * used + (self.kept + 1) * self.memory * self.width
        share = 1 + 2 * self.memory / self.segment
        wide = stack.wide_constant + stack.wide_per_token * used
        own = Cost(stack.parameters + self.memory * self.width, stack.flops * share)
        total = own + Cost(state_constant=state, wide_constant=wide)
        total += self.embed.cost(self, self.vocab)
        return total + self.head.cost(behind(self.decoder, self), self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("decoder", self.decoder, self, has_source=False, decodes=True)
        yield from outer_problems(self.embed, self.head, self, self.vocab, self.decoder)
        if not isinstance(self.embed, TokenEmbed):
            yield ("embed", "kind"), "a generative model needs embed.kind: tokens"
        elif self.embed.inner is not None:
            yield ("embed", "inner"), "memory tokens have the model's width; remove it"
        if (limit := self.embed.limit) is not None and limit < self.longest:
            text = f"{limit}, but a segment of {self.segment} with 2 × {self.memory} memory tokens has {self.longest}"
            yield ("embed", "positions", "length"), text


class MemoryTokens(State):
    """What is kept of each row: the layers' states of its current segment, which begin with the memory; that memory;
    and the memories and tokens of the last segments, to trim tokens.

    A segment that is full stays until the next token: the memory is written when it is needed.
    """

    def __init__(self, model: RecurrentMemoryModel, rows: int) -> None:
        self.model = model
        self.lengths = [0] * rows
        # dicts, not lists: State copies, joins and detaches their values
        self.layers = new_layers(model)
        self.memory: Tensor | None = None  # (rows, m, width); None: no token was read
        self.past: Tensor | None = None  # (rows, kept, m, width): memory of segment s at s % kept, without gradient
        self.tokens: Tensor | None = None  # (rows, kept * segment): token of position p at p % (kept * segment)

    def segment_of(self, length: int) -> int:
        """The current segment of a row with `length` tokens."""
        return max(0, length - 1) // self.model.config.segment

    def inside(self, length: int) -> int:
        """Tokens of the current segment."""
        return length - self.segment_of(length) * self.model.config.segment

    def set_memory(self, rows: Sequence[int], segments: Sequence[int], memory: Tensor) -> None:
        """Rows begin these segments with this memory (len(rows), m, width)."""
        config, count = self.model.config, len(self.lengths)
        if self.past is None:
            self.past = memory.new_zeros(count, config.kept, *memory.shape[1:])
        if self.memory is None or len(rows) == count:
            self.memory = memory
        else:
            self.memory = self.memory.index_copy(0, torch.tensor(rows, device=memory.device), memory)
        past = self.past.clone()  # copies of this state share it
        past[list(rows), [segment % config.kept for segment in segments]] = memory.detach()
        self.past = past

    def append_tokens(self, new: Tensor, counts: Sequence[int]) -> None:
        """Count and store the next `counts` tokens of each row (rows, time)."""
        size = self.model.config.kept * self.model.config.segment
        tokens = new.new_zeros(len(new), size) if self.tokens is None else self.tokens.clone()
        steps = torch.arange(new.shape[1], device=new.device)
        real = steps < torch.tensor(counts, device=new.device)[:, None]
        at = (torch.tensor(self.lengths, device=new.device)[:, None] + steps) % size
        rows = torch.arange(len(new), device=new.device)[:, None].expand_as(new)
        tokens[rows[real], at[real]] = new[real]
        self.tokens = tokens
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def replace_rows(self, rows: Sequence[int], fresh: Layered) -> None:
        """These rows continue with other layer states, the rest with their own."""
        count = len(self.lengths)
        others = [row for row in range(count) if row not in set(rows)]
        if not others:
            self.layers = fresh
            return
        order, device = [*others, *rows], self.model.memory.device
        for name, layer in self.layers.items():
            for part, state in layer.items():
                state.select(torch.tensor(others, device=device))
                state.join(fresh[name][part])
                state.select(torch.tensor([order.index(row) for row in range(count)], device=device))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    def join(self, other: Self) -> None:
        lengths = self.lengths + other.lengths
        self.lengths = other.lengths  # equal in both, or not joined by `State`
        super().join(other)
        self.lengths = lengths

    @torch.no_grad()
    def trim(self, length: int, each: Tensor | None = None) -> None:
        own = [length] * len(self.lengths) if each is None else each.tolist()
        left = [min(both) for both in zip(self.lengths, own, strict=True)]
        if self.memory is None or self.past is None or self.tokens is None or left == self.lengths:
            return
        config, size = self.model.config, self.tokens.shape[1]
        now, then = ([self.segment_of(n) for n in lengths] for lengths in (self.lengths, left))
        if any(a - b >= config.kept for a, b in zip(now, then, strict=True)):
            raise ValueError(f"a recurrent memory can trim at most {MAX_TRIM} tokens")
        back = [row for row, both in enumerate(zip(now, then, strict=True)) if both[0] != both[1]]
        if back:  # into an earlier segment, which is read again
            memory = torch.stack([self.past[row, then[row] % config.kept] for row in back])
            counts = [self.inside(left[row]) for row in back]
            steps = torch.arange(max(counts), device=memory.device)
            begins = torch.tensor([then[row] * config.segment for row in back], device=memory.device)
            tokens = self.tokens[back].gather(1, (begins[:, None] + steps) % size)
            fresh = new_layers(self.model)
            self.model.read(fresh, memory, Rows(tokens, torch.tensor(counts, device=memory.device)))
            self.replace_rows(back, fresh)
            self.set_memory(back, [then[row] for row in back], memory)
        ends = [config.memory + self.inside(n) for n in left]
        at = torch.tensor(ends, device=self.memory.device)
        for layer in self.layers.values():
            for state in layer.values():
                state.trim(max(ends), at)
        self.lengths = left

    @property
    def bytes(self) -> int:
        own = [value for value in (self.memory, self.past) if value is not None]
        inside = sum(state.bytes for layer in self.layers.values() for state in layer.values())
        return inside + sum(value.numel() * value.itemsize for value in own)


Layered = dict[str, dict[str, State]]


def new_layers(model: RecurrentMemoryModel) -> Layered:
    return {str(number): states for number, states in enumerate(model.decoder.new_states())}


class RecurrentMemoryModel(DecoderModel):
    """Runs whole texts, segment by segment (training), or new tokens over `States` (decoding), which hold one
    `MemoryTokens`."""

    config: RecurrentMemory
    embed: Any  # a TokenEmbedModule

    def __init__(self, config: RecurrentMemory) -> None:
        super().__init__(config)
        with torch.no_grad():  # as large as token vectors (the authors' code)
            size: Tensor = self.embed.tokens.weight.std() * self.embed.scale
            self.memory = nn.Parameter(torch.randn(config.memory, config.width) * size)

    def decode(self, target: Rows, record: WeightRecord | None = None, losses: list[Tensor] | None = None) -> Tensor:
        unpacked = UnpackedRows.of(self.embed.layout(target))
        tokens, types = (None if x is None else unpacked.gather(x) for x in (target.tokens, target.types))
        assert tokens is not None
        lengths = None if unpacked.real is None else unpacked.real.sum(1)
        state = MemoryTokens(self, len(tokens))
        hidden = self.read_segments(state, Rows(tokens, lengths, types=types), True, losses, record)
        return unpacked.scatter(hidden, target.tokens)

    def attention(
        self, batch: Batch, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Attention weights by layer, of a text of one segment: (batch, heads, m + queries, m + keys), the memory
        first."""
        if batch.rows.tokens.shape[1] > self.config.segment:
            raise UserError(f"attention weights are shown of one segment: at most {self.config.segment} tokens")
        return super().attention(batch, layers, heads)

    def start(self, rows: int, device: torch.device | str | None = None) -> States:
        """Empty states for `rows` texts."""
        where = self.memory.device if device is None else torch.device(device)
        return States([{"memory": MemoryTokens(self, rows)}], rows, where, None)

    def advance(self, new: Rows, states: States, last: bool = False, losses: list[Tensor] | None = None) -> Tensor:
        """Prefill or decode the next tokens of every row, one or many, padded on the right: hidden states of all of
        them, or of the `last` of each row (batch, 1, width)."""
        assert new.side == "right" and new.segments is None, "decoding needs one sentence per row, padded on the right"
        state = states.layers[0]["memory"]
        assert isinstance(state, MemoryTokens)
        hidden = self.read_segments(state, new, False, losses)
        states.lengths = list(state.lengths)
        return hidden.take_along_dim(last_positions(TokenLayout.of(new))[..., None], 1) if last else hidden

    def read_segments(
        self,
        state: MemoryTokens,
        new: Rows,
        whole: bool,
        losses: list[Tensor] | None = None,
        record: WeightRecord | None = None,
    ) -> Tensor:
        """Hidden states (batch, time, width) of new tokens, over as many segments as they take. `whole`: rows that have
        ended begin further segments with the others, which costs less than keeping them apart; their state is void."""
        count, time = new.tokens.shape
        total = [time] * count if new.lengths is None else new.lengths.tolist()
        done = [0] * count
        pieces: list[tuple[list[int], Tensor]] = []
        while not pieces or done != total:
            unread = [end - at for at, end in zip(done, total, strict=True)]
            prefix, begun = self.begin_segments(state, [whole or left > 0 for left in unread])
            at = [0 if row in begun else state.inside(length) for row, length in enumerate(state.lengths)]
            take = [min(left, self.config.segment - n) for left, n in zip(unread, at, strict=True)]
            piece = slice_rows(new, done, take)
            pieces.append((done, self.read(state.layers, prefix, piece, at, losses, record)))
            state.append_tokens(piece.tokens, take)
            if whole:
                state.lengths = [max(state.lengths) for _ in take]
            done = [n + more for n, more in zip(done, take, strict=True)]
        return assemble(pieces, count, time)

    def begin_segments(self, state: MemoryTokens, reads: Sequence[bool]) -> tuple[Tensor | None, set[int]]:
        """Rows with a full segment that read another token write their memory and begin the next segment. Which rows
        did, and, if all did, the memory they still have to read."""
        config, count = self.config, len(reads)
        if state.memory is None:
            memory = self.memory.expand(count, -1, -1)
            state.set_memory(range(count), [0] * count, memory)
            return memory, set(range(count))
        full = [row for row in range(count) if reads[row] and state.inside(state.lengths[row]) == config.segment]
        if not full:
            return None, set()
        segments = [state.segment_of(state.lengths[row]) + 1 for row in full]
        memory = self.write(state, full)
        if config.bptt is not None:
            cut = torch.tensor([segment % config.bptt == 0 for segment in segments], device=memory.device)
            memory = torch.where(cut[:, None, None], memory.detach(), memory)
        fresh = new_layers(self)
        if len(full) < count:
            self.read(fresh, memory, Rows(torch.zeros(len(full), 0, dtype=torch.long, device=memory.device)))
        state.replace_rows(full, fresh)
        state.set_memory(full, segments, memory)
        return (memory if len(full) == count else None), set(full)

    def write(self, state: MemoryTokens, rows: Sequence[int]) -> Tensor:
        """The memory after the full segments of these rows: (len(rows), m, width)."""
        if len(rows) < len(state.lengths):
            state = state.copy()
            state.select(torch.tensor(rows, device=self.memory.device))
        assert state.memory is not None
        begin = self.config.memory + self.config.segment
        layout = TokenLayout(torch.arange(begin, self.config.longest, device=self.memory.device)[None], start=begin)
        return self.forward_stack(state.layers, self.embed.place(state.memory, layout), layout, writes=True)

    def read(
        self,
        layers: Layered,
        prefix: Tensor | None,
        new: Rows,
        at: Sequence[int] = (),
        losses: list[Tensor] | None = None,
        record: WeightRecord | None = None,
    ) -> Tensor:
        """Hidden states of new tokens of a segment, which follow the `prefix`, its memory (rows, m, width), or `at`
        tokens of each row."""
        m = self.config.memory
        layout = TokenLayout.following([m + n for n in at] or [m] * len(new.tokens), replace(new, prompt=None))
        x = self.embed(new, layout)
        if prefix is None:
            return self.forward_stack(layers, x, layout, losses, record)
        places = TokenLayout(torch.arange(m, device=x.device)[None], start=0)
        x = torch.cat((self.embed.place(prefix, places), x), 1)
        lengths = None if new.lengths is None else new.lengths + m
        layout = TokenLayout.following([0] * len(x), Rows(torch.empty(x.shape[:2], device=x.device), lengths))
        return self.forward_stack(layers, x, layout, losses, record)[:, m:]

    def forward_stack(
        self,
        layers: Layered,
        x: Tensor,
        layout: TokenLayout,
        losses: list[Tensor] | None = None,
        record: WeightRecord | None = None,
        writes: bool = False,
    ) -> Tensor:
        """Patterns see both copies of the memory as `prompt`, the second one only where it is written: in other passes
        there may be padding in its place."""
        end = int(layout.positions.max()) + 1 if layout.start is None else layout.start + layout.time
        positions = torch.arange(end, device=x.device)[None]
        is_memory = positions < self.config.memory
        if writes:
            is_memory = is_memory | (positions >= self.config.memory + self.config.segment)
        slots = TokenLayout(positions, start=0, prompt=is_memory.expand(len(x), -1))
        context = Context(layout, slots, None, x, losses=losses, record=record)
        return self.decoder(x, context, list(layers.values()))


def slice_rows(rows: Rows, begins: Sequence[int], counts: Sequence[int]) -> Rows:
    """The next `counts` tokens of each row, from `begins` on, padded on the right."""
    device, time = rows.tokens.device, max(counts, default=0)
    if not any(begins) and time == rows.tokens.shape[1]:
        return rows
    index = torch.tensor(list(begins), device=device)[:, None] + torch.arange(time, device=device)
    index = index.clamp(max=max(0, rows.tokens.shape[1] - 1))
    tokens, types = (None if x is None else x.gather(1, index) for x in (rows.tokens, rows.types))
    assert tokens is not None
    lengths = None if min(counts) == time else torch.tensor(list(counts), device=device)
    return Rows(tokens, lengths, types=types)


def assemble(pieces: Sequence[tuple[Sequence[int], Tensor]], count: int, time: int) -> Tensor:
    """Pieces of hidden states (batch, some, width) and where they begin in each row, as one (batch, time, width)."""
    first = pieces[0][1]
    if len(pieces) == 1 and first.shape[1] == time:
        return first
    index = torch.full((count, time), sum(hidden.shape[1] for _, hidden in pieces), device=first.device)
    passed = 0
    for begins, hidden in pieces:  # later pieces overwrite the padding of earlier ones
        for row, begin in enumerate(begins):
            more = min(hidden.shape[1], time - begin)
            index[row, begin : begin + more] = torch.arange(passed, passed + more, device=first.device)
        passed += hidden.shape[1]
    joined = torch.cat([*(hidden for _, hidden in pieces), first.new_zeros(count, 1, first.shape[2])], 1)
    return joined.take_along_dim(index[..., None], 1)
