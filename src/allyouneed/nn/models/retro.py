"""A decoder with retrieval for each chunk of its text: RETRO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.nn.batch import Batch, Neighbours, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, MemoryBuilder, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.attention.chunked_cross import ChunkedCross, Retrieved, RetrievedKeyValues, neighbour_memory
from allyouneed.nn.models.base import (
    GenerativeModel,
    Layers,
    ModelModule,
    Problem,
    Size,
    advance,
    count_layers,
    outer_problems,
    recorded_weights,
    request_weights,
    stack_problems,
)
from allyouneed.nn.models.block import Block
from allyouneed.nn.models.stack import Stack, stack_cost
from allyouneed.nn.observe import rename
from allyouneed.nn.positions.rotary import Rotary
from allyouneed.nn.states.base import State, States
from allyouneed.nn.wiring.residual import PreNorm, Sandwich
from allyouneed.nn.wiring.reversible import Reversible

# tokens of some complete chunks -> for each the tokens of its neighbours, nearest first
Search = Callable[[list[list[int]]], Sequence[Sequence[Sequence[int]]]]


class Retro(GenerativeModel):
    """Borgeaud et al. 2022, 2.4 and algorithm 1: the encoder runs on each neighbour (a chunk and its continuation)
    separately; decoder layers with a `cross` of kind `chunked-cross` attend to them. Encoder layers with a `cross`
    attend to the querying chunk, as it enters the decoder's first retrieval layer: E = ENCODER(RET(C_u), H_u).
    Without neighbours it is a plain decoder.

    `encoder_width`, `querying: embedding`, `neighbour_positions: false` and rotary positions in all attentions are what
    the public code does (RETRO-pytorch): one matrix of token vectors of the encoder's width, which a linear map takes
    to the decoder's, as another one takes the encoded neighbours."""

    kind: Literal["retro"] = "retro"
    neighbours: Size = 2
    """Retrieved neighbours per chunk."""
    encoder_width: Size | None = None
    """Width of the neighbour encoder: that of the token vectors, `embed.inner`; default: the model's."""
    querying: Literal["normed", "hidden", "embedding"] = "normed"
    """What the encoder reads of the querying chunk: the input of the first retrieving attention, the same before its
    norm (algorithm 1), or the chunk's embeddings (RETRO-pytorch)."""
    neighbour_positions: bool = True
    """Add the absolute positions of `embed` to neighbours too; false: to the text alone (RETRO-pytorch)."""
    encoder: Layers
    """The neighbour encoder's layers: a list of layers, or text over the names defined under `layers`."""
    decoder: Layers
    """The decoder's layers: a list of layers, or text over the names defined under `layers`."""

    @property
    def chunk(self) -> int:
        """Tokens per chunk; a neighbour has twice as many (chunk and continuation)."""
        return min(layer.cross.chunk for layer in self.decoder if isinstance(layer.cross, ChunkedCross))

    @property
    def length(self) -> int:
        """Tokens per neighbour."""
        return 2 * self.chunk

    @property
    def conditioned(self) -> bool:
        """Whether the encoder attends to the querying chunk."""
        return any(layer.cross is not None for layer in self.encoder)

    @property
    def encoder_common(self) -> Common:
        """What the parts of the encoder have in common."""
        return self if self.encoder_width is None else self.model_copy(update={"width": self.encoder_width})

    def build(self) -> RetroModel:
        return RetroModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs of a token of the text, including its share of the neighbours."""
        total = self.embed.cost(self, self.vocab) + stack_cost(self.decoder, self, length)
        each = self.neighbours * self.length  # tokens retrieved per chunk
        inside = self.encoder_common
        encoder = stack_cost(self.encoder, inside, self.length)
        if self.encoder_width is not None:
            encoder += self.linear.cost(self.encoder_width, self.width, True)
            if self.conditioned and self.querying != "embedding":
                total += self.linear.cost(self.width, self.encoder_width, True)
        total += Cost(encoder.parameters, encoder.flops * each / self.chunk)  # an encoder has no decoding state
        for layer in self.encoder:
            if layer.cross is not None:  # its keys are those of the querying chunk
                seen, counted = (layer.cross.cost(inside, size, cross=True).flops for size in (self.chunk, self.length))
                flops = (seen - counted) * each / self.chunk + layer.cross.source_flops(inside)
                total += Cost(flops=flops * layer.repeat)
        if self.conditioned:
            cached = inside.width if self.querying == "embedding" else self.width
            total += Cost(state_per_token=cached)  # inputs of querying chunks
        for layer in self.decoder:
            if isinstance(layer.cross, ChunkedCross):
                found, assumed = layer.cross.retrieval_cost(self, each), layer.cross.cost(self, length, cross=True)
                kept = Cost(0, 0, found.state_per_token, -assumed.state_constant)
                total += (Cost(flops=found.flops - assumed.flops) + kept) * layer.repeat
        return total + self.head.cost(self, self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        for path, text in stack_problems("encoder", self.encoder, self.encoder_common, has_source=True, decodes=False):
            part = self.encoder[int(path[1])].cross if path[2:] == ("cross", "positions") else None
            if not isinstance(getattr(part, "positions", None), Rotary):  # a chunk and a neighbour both begin at 0
                yield path, text
        if self.encoder_width not in (None, self.embed.vector(self)):
            text = f"must be the width of the token vectors, {self.embed.vector(self)}; set embed.inner to another one"
            yield ("encoder_width",), text
        yield from self._querying_problems()
        for number, layer in enumerate(self.encoder):
            if layer.cross is not None and not isinstance(layer.cross, Attention):
                yield ("encoder", number, "cross", "kind"), "must be attention (to the querying chunk)"
        if self.conditioned:
            for number, layer in enumerate(self.decoder):
                if isinstance(layer.wiring, Reversible):
                    text = "recomputes layers, which a conditioned encoder does not support; use another wiring"
                    yield ("decoder", number, "wiring"), text
        yield from stack_problems("decoder", self.decoder, self, has_source=True, decodes=True)
        chunks = set()
        for number, layer in enumerate(self.decoder):
            if isinstance(layer.cross, ChunkedCross):
                chunks.add(layer.cross.chunk)
            elif layer.cross is not None:
                yield ("decoder", number, "cross", "kind"), "would attend to later neighbours; use chunked-cross"
        if len(chunks) != 1:
            sizes = f"chunks of {' and '.join(map(str, sorted(chunks)))}" if chunks else "no layer with a chunked-cross"
            yield ("decoder",), f"{sizes}; all layers need chunked-cross of one chunk size"
        yield from outer_problems(self.embed, self.head, self, self.vocab, writes=True)

    def _querying_problems(self) -> Iterator[Problem]:
        if self.querying != "normed" and not self.conditioned:
            yield ("querying",), "no encoder layer reads the querying chunk; give one a cross, or remove it"
        elif self.querying == "hidden":
            first = next((layer for layer in self.decoder if layer.cross is not None), None)
            if first is not None and not isinstance(first.wiring, PreNorm | Sandwich):
                text = "the first retrieving layer has no norm before its attention; use wiring: pre-norm"
                yield ("querying",), text


class RetroModel(ModelModule):
    """Runs whole texts with the neighbours of all chunks (`Batch.source`), or new tokens over states: then neighbours
    are given in advance, or `search` retrieves those of each chunk once it is complete."""

    config: Retro
    may_skip_parameters = True  # texts without neighbours do not use the encoder of neighbours

    def __init__(self, config: Retro) -> None:
        super().__init__()
        self.config = config
        self.embed: Any = config.embed.build(config, config.vocab)
        depths = count_layers(config.encoder), count_layers(config.decoder)
        self.encoder = Stack(config.encoder, config.encoder_common, Depth(*depths, "encoder"))
        inner, build = config.encoder_width, config.linear.build
        narrows = inner is not None and config.conditioned and config.querying != "embedding"
        self.widen = None if inner is None else build(inner, config.width, True)  # encoded neighbours
        self.narrow = build(config.width, inner, True) if narrows and inner is not None else None  # querying chunks
        self.decoder = Stack(config.decoder, config, Depth(*depths, "decoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(config, config.vocab, tied)
        config.init.start(self, config.width)

    def encode(
        self,
        found: Neighbours,
        record: WeightRecord | None = None,
        losses: list[Tensor] | None = None,
        querying: Tensor | None = None,
    ) -> Retrieved:
        """Encode each neighbour separately, then concatenate those of a chunk. `querying`: the querying chunks (batch,
        chunks, chunk, width), if the encoder attends to them."""
        batch, chunks, count, length = found.tokens.shape
        lengths = found.lengths.flatten().clamp(min=1)  # the encoder needs at least one token
        rows = Rows(found.tokens.flatten(0, 2), lengths)
        layout: TokenLayout = self.embed.layout(rows)
        rename(self.embed, "neighbour_embed")
        x = self.embed.vectors(rows, layout, self.config.neighbour_positions)
        x = self.embed.project(x) if self.config.encoder_width is None else x
        chunk = None  # shared by all neighbours of the chunk
        if querying is not None:
            chunks_done = torch.arange(self.config.chunk, device=querying.device)[None]
            querying = querying if self.narrow is None else self.narrow(querying)
            chunk = Memory(querying.flatten(0, 1), TokenLayout(chunks_done, start=0))
        hidden: Tensor = self.encoder(x, Context(layout, memory=chunk, inputs=x, record=record, losses=losses))
        real = torch.arange(length, device=lengths.device) < found.lengths[..., None]  # (batch, chunks, count, length)
        hidden = hidden if self.widen is None else self.widen(hidden)
        memory = hidden.view(batch, chunks * count * length, -1)
        return neighbour_memory(memory, real.flatten(1).long(), chunks, self.config.chunk, length)

    def decode(
        self,
        target: Rows,
        memory: Retrieved | MemoryBuilder | None,
        record: WeightRecord | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        if layout.packed and memory is not None:
            raise ValueError("retrieval does not support packed rows; use one text per row")
        x, vectors = self._embed_text(target, layout)
        given: dict[str, Any] = {"memory": memory} if isinstance(memory, Retrieved) else {"memory_builder": memory}
        given |= {"skips": "cross"} if memory is None else {}
        return self.decoder(x, Context(layout, inputs=vectors, record=record, losses=losses, **given))

    def _embed_text(self, target: Rows, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """The decoder's input, and the embeddings that an encoder may read, of its width."""
        vectors = self.embed.vectors(target, layout)
        x = self.embed.project(vectors)
        return x, x if self.config.encoder_width is None else vectors

    def _querying(self, x: Tensor, context: Context, vectors: Tensor | None) -> Tensor:
        """What the encoder reads of the tokens whose first retrieving attention has the input x."""
        if self.config.querying == "normed":
            return x
        read = context.memo[Block, "stream"] if self.config.querying == "hidden" else vectors
        assert isinstance(read, Tensor)
        return read

    def encode_source(
        self, given: object, record: WeightRecord | None = None, losses: list[Tensor] | None = None
    ) -> Retrieved | MemoryBuilder | None:
        """Encoded neighbours; or, with a conditioned encoder, a function that encodes them during decoding."""
        assert given is None or isinstance(given, Neighbours), "the source of a RETRO model must be Neighbours"
        if given is None or not given.tokens.numel():
            return None
        if not self.config.conditioned:
            return self.encode(given, record, losses)
        chunks = given.tokens.shape[1]

        def build_memory(x: Tensor, context: Context, _: object) -> Retrieved:
            read = self._querying(x, context, context.inputs)
            querying = scatter_by_position(read, context.queries, chunks * self.config.chunk)
            return self.encode(given, context.record, context.losses, querying.unflatten(1, (chunks, -1)))

        return build_memory

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        memory = self.encode_source(batch.source, losses=losses)
        return self.decode(batch.rows, memory, losses=losses), self.embed.layout(batch.rows)

    def attention(
        self,
        batch: Batch,
        where: Literal["encoder", "decoder", "cross"] = "cross",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys); keys of a cross are all neighbours."""
        stack, part = (self.encoder if where == "encoder" else self.decoder), ("cross" if where == "cross" else "mixer")
        modules, record = request_weights(stack, part, layers, heads)
        self.decode(batch.rows, self.encode_source(batch.source, record), record)
        return recorded_weights(stack, part, modules, record)

    def start(self, given: int | Neighbours, search: Search | None = None) -> RetroStates:
        """Empty states for `given` texts: with known neighbours, with a `search`, or without retrieval."""
        if isinstance(given, int):
            return RetroStates(self, given, search=search)
        assert search is None, "neighbours and search are exclusive"
        if self.config.conditioned:
            return RetroStates(self, len(given.tokens), given=given)
        memory = self.encode_source(given)
        assert memory is None or isinstance(memory, Retrieved)
        return RetroStates(self, len(given.tokens), memory)

    def advance(self, new: Rows, states: RetroStates, last: bool = False) -> Tensor:
        """Prefill or decode the next tokens of every row: see `base.advance`.

        Neighbours are retrieved first, since the last token of a chunk already attends to them.
        """
        if states.search is None and states.given is None:
            run = self.decoder if states.memory is not None else self._plain
            return advance(self.embed, run, new, states, last)
        chunks_done, found = self._retrieve(new, states)
        if not self.config.conditioned:
            if chunks_done:
                states.add_neighbours(chunks_done, self.encode(found))
            return advance(self.embed, self.decoder, new, states, last)

        text: list[Tensor] = []

        def embed(rows: Rows, layout: TokenLayout) -> Tensor:
            x, vectors = self._embed_text(rows, layout)
            text.append(vectors)
            return x

        def build_memory(x: Tensor, context: Context, state: object) -> Retrieved | None:
            assert isinstance(state, RetrievedKeyValues)
            read, size = state.append_inputs(self._querying(x, context, text[0]), context), self.config.chunk
            if chunks_done:
                querying = torch.stack([read[row, u * size : (u + 1) * size] for row, u in chunks_done])[:, None]
                states.add_neighbours(chunks_done, self.encode(found, querying=querying))
            return states.memory

        return advance(embed, self.decoder, new, states, last, memory_builder=build_memory)

    def _plain(self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None) -> Tensor:
        """The decoder without retrieval."""
        context.skips = "cross"
        return self.decoder(x, context, states)

    def _retrieve(self, new: Rows, states: RetroStates) -> tuple[list[tuple[int, int]], Neighbours]:
        """(row, chunk) of the chunks that new tokens complete, and their neighbours, one chunk per row."""
        full, device = states.append_tokens(new), new.tokens.device
        if states.given is not None:
            chunks_done = [(row, u) for row, u, _ in full if u < states.given.tokens.shape[1]]
            at = torch.tensor(chunks_done, dtype=torch.long, device=device).view(-1, 2).unbind(1)
            return chunks_done, states.given.each(lambda tensor: tensor[at][:, None])
        assert states.search is not None
        found = [[near] for near in states.search([tokens for _, _, tokens in full])] if full else []
        given = Neighbours.of(found, self.config.neighbours, self.config.length)
        return [(row, u) for row, u, _ in full], given.to(device)


def scatter_by_position(x: Tensor, queries: TokenLayout, end: int) -> Tensor:
    """Tokens by position: (batch, end, width), zeros where inside are none."""
    if queries.start == 0:
        return pad(x[:, :end], (0, 0, 0, max(0, end - x.shape[1])))
    inside = queries.positions < end if queries.real is None else queries.real & (queries.positions < end)
    index = torch.where(inside, queries.positions, end).expand(len(x), -1)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x.new_zeros(len(x), end + 1, x.shape[-1]).index_put((rows, index), x)[:, :end]


class RetroStates(States):
    """States with separate neighbours per row, beams included, which may have written different chunks. Neighbours are
    in `memory` from the start, `given` in advance, or retrieved when a chunk is complete."""

    memory: Retrieved | None
    joins = False  # rows may differ in their number of chunks

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
        self.tokens: list[list[int]] = [[] for _ in range(rows)]  # tokens so far, when neighbours come later

    def append_tokens(self, new: Rows) -> list[tuple[int, int, list[int]]]:
        """Append new tokens; (row, chunk, tokens) of the chunks they complete."""
        counts = [new.tokens.shape[1]] * len(self.tokens) if new.lengths is None else new.lengths.tolist()
        full, size = [], self.chunk
        for row, (tokens, count) in enumerate(zip(new.tokens.tolist(), counts, strict=True)):
            known = self.tokens[row]
            done = len(known) // size
            known += tokens[:count]
            full += [(row, u, known[u * size : (u + 1) * size]) for u in range(done, len(known) // size)]
        return full

    def add_neighbours(self, chunks_done: list[tuple[int, int]], found: Retrieved) -> None:
        """Store each encoded block (one per row of `found`) at its (row, chunk)."""
        block, old = found.hidden.shape[1], self.memory
        known = 0 if old is None else old.chunks
        chunks = max(known, 1 + max(chunk for _, chunk in chunks_done))
        hidden = found.hidden.new_zeros(len(self.lengths), chunks, *found.hidden.shape[1:])
        real = torch.zeros(hidden.shape[:3], dtype=torch.long, device=hidden.device)  # (rows, chunks, block)
        if old is not None:
            hidden[:, :known], real[:, :known] = (x.unflatten(1, (known, block)) for x in (old.hidden, old.real))
        at = torch.tensor(chunks_done, device=hidden.device).unbind(1)
        hidden[at], real[at] = found.hidden, found.real
        self.memory = neighbour_memory(hidden.flatten(1, 2), real.flatten(1), chunks, self.chunk, found.length)
        for layer in self.layers:
            for state in layer.values():
                if isinstance(state, RetrievedKeyValues):
                    state.invalidate(min(chunk for _, chunk in chunks_done) * block)

    def trim(self, length: int | Sequence[int]) -> None:
        """Neighbours of a chunk that is no longer complete stay until it is complete again; no token attends to them
        before."""
        super().trim(length)
        self.tokens = [tokens[:left] for tokens, left in zip(self.tokens, self.lengths, strict=True)]

    def _select(self, rows: list[int], sources: list[int] | None) -> None:
        super()._select(rows, sources=rows)
        self.tokens = [list(self.tokens[row]) for row in rows]
        if self.given is not None:
            kept = torch.tensor(rows, dtype=torch.long, device=self.given.tokens.device)
            self.given = self.given.each(lambda tensor: tensor.index_select(0, kept))
