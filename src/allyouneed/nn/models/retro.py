"""A decoder that reads what was retrieved for each chunk of its text: RETRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.nn.batch import Batch, Neighbours, Rows
from allyouneed.nn.context import Asks, Context, Memory, Record, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.attention.chunked_cross import ChunkedCross, MemoryKeyValues, Retrieved, retrieved
from allyouneed.nn.models.base import (
    Layers,
    ModelModule,
    Problem,
    Size,
    Writer,
    advance,
    count_layers,
    outer_problems,
    stack_problems,
    watched,
    weights_of,
)
from allyouneed.nn.models.stack import Stack, stack_cost
from allyouneed.nn.states.base import States
from allyouneed.nn.wiring.residual import Depth
from allyouneed.nn.wiring.reversible import Reversible

# the tokens of some full chunks, each by itself -> for each the tokens of its neighbours, nearest first
Search = Callable[[list[list[int]]], Sequence[Sequence[Sequence[int]]]]


class Retro(Writer):
    """Borgeaud et al. 2022, 2.4 and algorithm 1: the encoder reads each neighbour (a chunk and what followed it) by
    itself; layers of the decoder that have a `cross` of kind `chunked-cross` look at them. Layers of the encoder that
    have a `cross` look at the chunk that asked, as the decoder's first retrieving layer reads it: E = ENCODER(RET(C_u),
    H_u). Without neighbours it is a decoder.
    """

    kind: Literal["retro"] = "retro"
    neighbours: Size = 2  # of each chunk
    encoder: Layers
    decoder: Layers

    @property
    def chunk(self) -> int:
        """How many tokens neighbours are retrieved for; a neighbour has as many and as many that followed."""
        return min(layer.cross.chunk for layer in self.decoder if isinstance(layer.cross, ChunkedCross))

    @property
    def length(self) -> int:
        """Of a neighbour."""
        return 2 * self.chunk

    @property
    def conditioned(self) -> bool:
        """The encoder looks at the chunk that asked."""
        return any(layer.cross is not None for layer in self.encoder)

    def build(self) -> RetroModel:
        return RetroModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs of a token of the text and of its share of the neighbours."""
        total = self.embed.cost(self, self.vocab) + stack_cost(self.decoder, self, length)
        each = self.neighbours * self.length  # tokens retrieved for a chunk
        encoder = stack_cost(self.encoder, self, self.length)
        total += Cost(encoder.parameters, encoder.flops * each / self.chunk)  # it keeps nothing
        for layer in self.encoder:
            if layer.cross is not None:  # its keys are those of the chunk that asked
                seen, counted = (layer.cross.cost(self, size, cross=True).flops for size in (self.chunk, self.length))
                flops = (seen - counted) * each / self.chunk + layer.cross.source_flops(self)
                total += Cost(flops=flops * layer.repeat)
        if self.conditioned:
            total += Cost(state_per_token=self.width)  # what chunks will ask with
        for layer in self.decoder:
            if isinstance(layer.cross, ChunkedCross):
                found, assumed = layer.cross.retrieving(self, each), layer.cross.cost(self, length, cross=True)
                kept = Cost(0, 0, found.state_per_token, -assumed.state_constant)
                total += (Cost(flops=found.flops - assumed.flops) + kept) * layer.repeat
        return total + self.head.cost(self, self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("encoder", self.encoder, self, crosses=True, decodes=False)
        for number, layer in enumerate(self.encoder):
            if layer.cross is not None and not isinstance(layer.cross, Attention):
                yield ("encoder", number, "cross", "kind"), "looks at the chunk that asked; use attention"
        if self.conditioned:
            for number, layer in enumerate(self.decoder):
                if isinstance(layer.wiring, Reversible):
                    text = "computes layers once more, and the encoder that looks at the chunk with them; take another"
                    yield ("decoder", number, "wiring"), text
        yield from stack_problems("decoder", self.decoder, self, crosses=True, decodes=True)
        chunks = set()
        for number, layer in enumerate(self.decoder):
            if isinstance(layer.cross, ChunkedCross):
                chunks.add(layer.cross.chunk)
            elif layer.cross is not None:
                yield ("decoder", number, "cross", "kind"), "would see what is retrieved later; use chunked-cross"
        if len(chunks) != 1:
            said = f"chunks of {' and '.join(map(str, sorted(chunks)))}" if chunks else "no layer with a chunked-cross"
            yield ("decoder",), f"{said}: neighbours are retrieved for chunks of one size"
        yield from outer_problems(self.embed, self.head, self, self.vocab)
        if self.embed.reads is not Rows:
            yield ("embed", "kind"), "what is written is text; its embedding must be 'tokens'"


class RetroModel(ModelModule):
    """The whole text at once with the neighbours of all its chunks (`Batch.source`), or tokens as they come: then
    neighbours are given beforehand, or `search` finds those of each chunk as soon as it is full."""

    config: Retro

    def __init__(self, config: Retro) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        depths = count_layers(config.encoder), count_layers(config.decoder)
        self.encoder = Stack(config.encoder, config, Depth(*depths, "encoder"))
        self.decoder = Stack(config.decoder, config, Depth(*depths, "decoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(config, config.vocab, tied)
        config.init.apply(self, config.width)

    def encode(
        self,
        found: Neighbours,
        record: Record | None = None,
        losses: list[Tensor] | None = None,
        asked: Tensor | None = None,
    ) -> Retrieved:
        """Each neighbour by itself; then those of a chunk side by side, where its tokens stand. `asked`: the chunks
        they were found for (batch, chunks, chunk, width), if the encoder looks at them."""
        batch, chunks, count, length = found.tokens.shape
        lengths = found.lengths.flatten().clamp(min=1)  # an encoder reads no empty text
        rows = Rows(found.tokens.flatten(0, 2), lengths)
        layout: TokenLayout = self.embed.layout(rows)
        x = self.embed(rows, layout)
        chunk = None  # seen by all its neighbours
        if asked is not None:
            places = torch.arange(self.config.chunk, device=asked.device)[None]
            chunk = Memory(asked.flatten(0, 1), TokenLayout(places, start=0))
        hidden: Tensor = self.encoder(x, Context(layout, memory=chunk, inputs=x, record=record, losses=losses))
        real = torch.arange(length, device=lengths.device) < found.lengths[..., None]  # (batch, chunks, count, length)
        memory = hidden.view(batch, chunks * count * length, -1)
        return retrieved(memory, real.flatten(1).long(), chunks, self.config.chunk)

    def decode(
        self,
        target: Rows,
        memory: Retrieved | Asks | None,
        record: Record | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        if layout.packed and memory is not None:
            raise ValueError("neighbours belong to the chunks of one text a row; do not pack several into it")
        x = self.embed(target, layout)
        there = {"memory": memory} if isinstance(memory, Retrieved) else {"asks": memory}
        hidden: Tensor = self.decoder(x, Context(layout, inputs=x, record=record, losses=losses, **there))
        return hidden

    def remember(
        self, given: object, record: Record | None = None, losses: list[Tensor] | None = None
    ) -> Retrieved | Asks | None:
        """What was retrieved, encoded; or, where the encoder looks at the chunks that ask, what will encode it."""
        assert given is None or isinstance(given, Neighbours), "the source of a model that retrieves is its neighbours"
        if given is None or not given.tokens.numel():
            return None
        if not self.config.conditioned:
            return self.encode(given, record, losses)
        chunks = given.tokens.shape[1]

        def asks(x: Tensor, context: Context, _: object) -> Retrieved:
            asked = in_place(x, context.queries, chunks * self.config.chunk)
            return self.encode(given, context.record, context.losses, asked.unflatten(1, (chunks, -1)))

        return asks

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        memory = self.remember(batch.source, losses=losses)
        return self.decode(batch.rows, memory, losses=losses), self.embed.layout(batch.rows)

    def attention(
        self,
        batch: Batch,
        where: Literal["encoder", "decoder", "cross"] = "cross",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys); keys of a cross are all neighbours in a row."""
        stack, part = (self.encoder if where == "encoder" else self.decoder), ("cross" if where == "cross" else "mixer")
        modules, record = watched(stack, part, layers, heads)
        self.decode(batch.rows, self.remember(batch.source, record), record)
        return weights_of(stack, part, modules, record)

    def start(self, given: int | Neighbours, search: Search | None = None) -> RetroStates:
        """Ready to write so many texts: with neighbours known beforehand, with a `search`, or without any."""
        if isinstance(given, int):
            return RetroStates(self, given, search=search)
        assert search is None, "neighbours are given, or searched for"
        if self.config.conditioned:
            return RetroStates(self, len(given.tokens), given=given)
        memory = self.remember(given)
        assert memory is None or isinstance(memory, Retrieved)
        return RetroStates(self, len(given.tokens), memory)

    def advance(self, new: Rows, states: RetroStates, last: bool = False) -> Tensor:
        """Take in the next tokens of every row (one or many, unequal lengths padded right); hidden states of them, or
        of each row's `last` one only (batch, 1, width).

        The last token of a chunk already sees its neighbours, so they are looked up first.
        """
        if states.search is None and states.given is None:
            return advance(self.embed, self.decoder, new, states, last)
        places, found = self._found(new, states)
        if not self.config.conditioned:
            if places:
                states.learn(places, self.encode(found))
            return advance(self.embed, self.decoder, new, states, last)

        def asks(x: Tensor, context: Context, state: object) -> Retrieved | None:
            assert isinstance(state, MemoryKeyValues)
            read, size = state.keep(x, context), self.config.chunk
            if places:
                asked = torch.stack([read[row, u * size : (u + 1) * size] for row, u in places])[:, None]
                states.learn(places, self.encode(found, asked=asked))
            return states.memory

        return advance(self.embed, self.decoder, new, states, last, asks=asks)

    def _found(self, new: Rows, states: RetroStates) -> tuple[list[tuple[int, int]], Neighbours]:
        """(row, number) of the chunks that new tokens complete, and their neighbours, one chunk a row."""
        full, device = states.read(new), new.tokens.device
        if states.given is not None:
            places = [(row, u) for row, u, _ in full if u < states.given.tokens.shape[1]]
            at = torch.tensor(places, dtype=torch.long, device=device).view(-1, 2).unbind(1)
            return places, states.given.each(lambda tensor: tensor[at][:, None])
        assert states.search is not None
        found = [[near] for near in states.search([tokens for _, _, tokens in full])] if full else []
        given = Neighbours.of(found, self.config.neighbours, self.config.length)
        return [(row, u) for row, u, _ in full], given.to(device)


def in_place(x: Tensor, queries: TokenLayout, end: int) -> Tensor:
    """Tokens of whole texts where they stand, wherever padding is: (batch, end, width), zeros where there are none."""
    if queries.start == 0:
        return pad(x[:, :end], (0, 0, 0, max(0, end - x.shape[1])))
    there = queries.positions < end if queries.real is None else queries.real & (queries.positions < end)
    places = torch.where(there, queries.positions, end).expand(len(x), -1)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x.new_zeros(len(x), end + 1, x.shape[-1]).index_put((rows, places), x)[:, :end]


class RetroStates(States):
    """States of texts that each have neighbours of their own: beams too, for each may have written another chunk.
    Neighbours are in `memory` from the start, or are `given` or searched for when their chunk has been read."""

    memory: Retrieved | None
    joins = False  # each text has as many chunks as it has, and all of them look at blocks of one memory

    def __init__(
        self,
        model: RetroModel,
        rows: int,
        memory: Retrieved | None = None,
        search: Search | None = None,
        given: Neighbours | None = None,
    ) -> None:
        super().__init__(model.decoder.new_states(), rows, next(model.parameters()).device, memory)
        self.chunk, self.search, self.given = model.config.chunk, search, given
        self.tokens: list[list[int]] = [[] for _ in range(rows)]  # all read so far, where neighbours come later

    def read(self, new: Rows) -> list[tuple[int, int, list[int]]]:
        """Take note of new tokens; (row, number, tokens) of the chunks they complete."""
        counts = [new.tokens.shape[1]] * len(self.tokens) if new.lengths is None else new.lengths.tolist()
        full, size = [], self.chunk
        for row, (tokens, count) in enumerate(zip(new.tokens.tolist(), counts, strict=True)):
            known = self.tokens[row]
            done = len(known) // size
            known += tokens[:count]
            full += [(row, u, known[u * size : (u + 1) * size]) for u in range(done, len(known) // size)]
        return full

    def learn(self, places: list[tuple[int, int]], found: Retrieved) -> None:
        """Put each block found (one a row of `found`) where it belongs: (row, chunk)."""
        block, old = found.hidden.shape[1], self.memory
        known = 0 if old is None else old.chunks
        chunks = max(known, 1 + max(chunk for _, chunk in places))
        hidden = found.hidden.new_zeros(len(self.lengths), chunks, *found.hidden.shape[1:])
        real = torch.zeros(hidden.shape[:3], dtype=torch.long, device=hidden.device)  # (rows, chunks, block)
        if old is not None:
            hidden[:, :known], real[:, :known] = (x.unflatten(1, (known, block)) for x in (old.hidden, old.real))
        at = torch.tensor(places, device=hidden.device).unbind(1)
        hidden[at], real[at] = found.hidden, found.real
        self.memory = retrieved(hidden.flatten(1, 2), real.flatten(1), chunks, self.chunk)
        for layer in self.layers:
            for state in layer.values():
                if isinstance(state, MemoryKeyValues):
                    state.forget(min(chunk for _, chunk in places) * block)

    def trim(self, length: int | Sequence[int]) -> None:
        """What was found for a chunk that is no longer full stays until other tokens fill it: nobody sees it before."""
        super().trim(length)
        self.tokens = [tokens[:left] for tokens, left in zip(self.tokens, self.lengths, strict=True)]

    def _select(self, rows: list[int], sources: list[int] | None) -> None:
        super()._select(rows, sources=rows)
        self.tokens = [list(self.tokens[row]) for row in rows]
        if self.given is not None:
            kept = torch.tensor(rows, dtype=torch.long, device=self.given.tokens.device)
            self.given = self.given.each(lambda tensor: tensor.index_select(0, kept))
