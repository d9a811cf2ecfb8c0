"""Chunked cross-attention: each chunk of a text looks at what was retrieved for the chunk before it.

Borgeaud et al. 2022, "Improving language models by retrieving from trillions of tokens" (RETRO), section 2.4 and figure
2. A text is cut into chunks of m tokens. What was retrieved for chunk u may be seen once u has been read: by its last
token and by the first m − 1 of the next chunk ("attending chunk"), so nothing leaks. The first m − 1 tokens of a text
see nothing and pass as they are.

Here memory says by its positions which chunk it belongs to: what stands at places u·m … u·m + m − 1 belongs to chunk u.
A model of kind `retro` puts encoded neighbours there; in a model that translates, the source itself stands there, and
its chunks lag as the neighbours' do. The paper adds relative positions to these scores; here the encoder's say where a
neighbour's tokens stand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, CrossAttention, Size
from allyouneed.nn.norms import Norm
from allyouneed.nn.ops.attention.dense import Dense, Plan, ScoreMod, attention_weights
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache
from allyouneed.nn.sublayer import Mixer, SubLayer


@dataclass(frozen=True, eq=False)
class Retrieved(Memory):
    """Memory in blocks of one size, one block a chunk: hidden (batch, chunks · block, width)."""

    chunks: int = 0

    @property
    def real(self) -> Tensor:
        """(batch, chunks · block): 1 for a token, 0 for padding."""
        assert self.layout.segments is not None
        return self.layout.segments

    def select(self, rows: Tensor) -> Retrieved:
        return Retrieved(self.hidden.index_select(0, rows), self.layout.select(rows), chunks=self.chunks)


def retrieved(hidden: Tensor, real: Tensor, chunks: int, chunk: int) -> Retrieved:
    """Blocks one after another, each where its chunk begins."""
    places = (torch.arange(chunks, device=hidden.device) * chunk).repeat_interleave(hidden.shape[1] // chunks)
    return Retrieved(hidden, TokenLayout(places.expand(len(hidden), -1), real), chunks=chunks)


class ChunkedCross(Mixer):
    """CCA(H, E): token i of chunk u, counted from 1, sees E_{u−1}, the last one E_u (2.4); softmax over all neighbours
    of the chunk and all their tokens at once."""

    crosses: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    kind: Literal["chunked-cross"] = "chunked-cross"
    heads: Size
    kv_heads: Size | None = None  # as in `attention`
    head_width: Size | None = None
    chunk: Size  # m
    qk_norm: Norm | None = None
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def causal(self) -> bool:
        return True

    @property
    def attention(self) -> Attention:
        """The same with all memory in sight."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_width": self.head_width}
        return Attention(qk_norm=self.qk_norm, bias=self.bias, dropout=self.dropout, **sizes)

    def build(self, common: Common) -> SubLayer:
        raise TypeError("chunked cross-attention looks at what was retrieved, not at its own tokens")

    def build_cross(self, common: Common) -> SubLayer:
        return ChunkedCrossAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """As the cross of a model that translates: a chunk of the source is seen."""
        seen = self.attention.cost(common, min(self.chunk, length), cross=True)
        return replace(seen, state_constant=self.attention.cost(common, length, cross=True).state_constant)

    def retrieving(self, common: Common, block: int) -> Cost:
        """Where so many tokens are retrieved for each chunk; keys and values are made of them, and kept."""
        seen = self.attention.cost(common, block, cross=True)
        flops = seen.flops + self.source_flops(common) * block / self.chunk
        return Cost(seen.parameters, flops, state_per_token=seen.state_constant / self.chunk)

    def source_flops(self, common: Common) -> float:
        return self.attention.source_flops(common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


class MemoryKeyValues(CrossKVCache):
    """Keys and values of memory that may grow while decoding: the first `end` are up to date. `asked`: what all tokens
    were when they came here, where memory is made of that."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: KVCache | None = None

    def keep(self, x: Tensor, context: Context) -> Tensor:
        """Remember what comes; all there is, each token where it stands (batch, end, width)."""
        self.asked = self.asked or KVCache()
        return self.asked.append(x[:, None], x[:, None, :, :0], context)[0][:, 0]

    def forget(self, length: int) -> None:
        """What memory says from here on has changed."""
        self.end = min(self.end, length)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.asked is not None:
            self.asked.select(rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.asked is not None:
            self.asked.trim(length, each)

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self.asked is None else self.asked.bytes)


class ChunkedCrossAttention(CrossAttention):
    def __init__(self, config: ChunkedCross, common: Common) -> None:
        super().__init__(config.attention, common)
        self.chunk = config.chunk

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        asks, memory = context.asks, context.memory
        if asks is not None:
            memory = context.plan("asked", lambda: asks(x, context, state))
        if memory is None:  # nothing was ever retrieved
            return torch.zeros_like(x)
        k, v = self.keys_and_values(memory, context, state)
        q = self.split(self.q(x))
        q = self.scores.prepare(q if self.q_norm is None else self.q_norm(q, context))
        beams, shown = len(q) // len(k), memory
        if beams > 1:
            copies = torch.arange(len(k), device=k.device).repeat_interleave(beams)
            k, v = k.index_select(0, copies), v.index_select(0, copies)
            shown = context.plan(("beams of memory", beams), lambda: memory.select(copies))
        score_mod = self.score_mod()
        self.watch(q, k, context, shown, score_mod)
        key = "chunked-cross", self.chunk, id(shown)
        execute = context.plan(key, lambda: plan(self.chunk, context.queries, shown))
        seeing = context.plan((*key, "sees"), lambda: sees(self.chunk, context.queries, shown))
        said = execute(q, k, v, self.dropout if self.training else 0.0, score_mod)
        found: Tensor = self.out(said.transpose(1, 2).flatten(2))
        return found * seeing[..., None].to(found.dtype)  # a bias of `out` is no message from nobody

    def keys_and_values(self, memory: Memory, context: Context, state: State | None) -> tuple[Tensor, Tensor]:
        if not isinstance(state, MemoryKeyValues):
            return self.source(memory.hidden, context)
        if state.keys is None or state.values is None:
            state.keys, state.values = self.source(memory.hidden, context)
        elif state.end < memory.hidden.shape[1]:
            k, v = self.source(memory.hidden[:, state.end :], context)
            state.keys = torch.cat((state.keys[:, :, : state.end], k), 2)
            state.values = torch.cat((state.values[:, :, : state.end], v), 2)
        state.end = memory.hidden.shape[1]
        return state.keys, state.values

    def watch(self, q: Tensor, k: Tensor, context: Context, memory: Memory, score_mod: ScoreMod) -> None:
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            places = context.queries.positions, memory.layout.positions
            weights = attention_weights(q, k, mask(self.chunk, context.queries, memory.layout), *places, score_mod)
            wanted.found.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])

    def new_state(self) -> State:
        return MemoryKeyValues()


def last_read(chunk: int, queries: TokenLayout) -> Tensor:
    """(batch or 1, time): the number of the last chunk each token knows in full, itself included; −1: none yet."""
    return (queries.positions + 1) // chunk - 1


def mask(chunk: int, queries: TokenLayout, keys: TokenLayout) -> Tensor:
    """The definition: who sees what, (batch or 1, 1, queries, keys) bool."""
    if queries.packed != keys.packed:
        raise ValueError(
            "one side holds several sentences a row (segments), the other does not: they cannot be matched"
        )
    allowed = last_read(chunk, queries)[:, :, None] == (keys.positions // chunk)[:, None, :]
    if keys.segments is not None:
        allowed = allowed & (keys.segments > 0)[:, None, :]
    if queries.packed and queries.segments is not None and keys.segments is not None:
        allowed = allowed & (queries.segments[:, :, None] == keys.segments[:, None, :])
    return allowed[:, None]


def plan(chunk: int, queries: TokenLayout, memory: Memory) -> Plan:
    """Every chunk with its own block where memory comes in blocks and all rows stand at the same place."""
    if isinstance(memory, Retrieved) and queries.start is not None and not queries.packed:
        return Blocks(chunk, queries.start, memory)
    return Dense(mask(chunk, queries, memory.layout), queries.positions, memory.layout.positions)


def sees(chunk: int, queries: TokenLayout, memory: Memory) -> Tensor:
    """(batch or 1, time) bool: tokens that see anything."""
    if not isinstance(memory, Retrieved):
        return mask(chunk, queries, memory.layout).any(-1)[:, 0]
    filled = pad(memory.real.unflatten(1, (memory.chunks, -1)).amax(-1), (1, 0)) > 0  # (batch, 1 + chunks)
    place = last_read(chunk, queries).expand(len(filled), -1) + 1
    return filled.gather(1, place.clamp(max=memory.chunks)) & (place <= memory.chunks)


class Blocks:
    """Chunk u's block beside the tokens that see it: as many scores as there are tokens times the size of a block."""

    def __init__(self, chunk: int, start: int, memory: Retrieved) -> None:
        self.chunk, self.start, self.memory = chunk, start, memory

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        batch, heads, time, _ = q.shape
        m, total = self.chunk, self.memory.chunks
        blind = min(time, max(0, m - 1 - self.start))  # tokens that see nothing yet
        place = self.start + blind - (m - 1)  # of the first that sees, counted from the first of the text that does
        first, ahead = divmod(max(place, 0), m)
        count = min(-(-(ahead + time - blind) // m), total - first)  # attending chunks that have a block
        if blind == time or count < 1:
            return q.new_zeros(batch, heads, time, v.shape[-1])
        end = min(time, blind + count * m - ahead)
        if count == 1:  # no chunk to fill up: a single token asks alone
            ahead, m = 0, end - blind
        behind = count * m - ahead - (end - blind)
        asked = pad(q[:, :, blind:end], (0, 0, ahead, behind))  # (batch, heads, count · m, head_width)
        k, v = (x.unflatten(2, (total, -1))[:, :, first : first + count] for x in (k, v))
        asked, k, v = (
            x.transpose(1, 2).flatten(0, 1) for x in (asked.unflatten(2, (count, m)), k, v)
        )  # (batch · count, heads, m or block, head_width)
        real = self.memory.real.unflatten(1, (total, -1))[:, first : first + count] > 0
        said = sdpa(
            asked,
            k,
            v,
            real.flatten(0, 1)[:, None, None],
            dropout,
            scale=score_mod.scale,
            enable_gqa=heads != k.shape[1],
        )
        said = said.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)  # (batch, heads, count · m, head_width)
        return pad(said[:, :, ahead : ahead + end - blind], (0, 0, blind, time - end))
