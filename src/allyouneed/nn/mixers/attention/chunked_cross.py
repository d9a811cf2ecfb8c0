"""Chunked cross-attention: each chunk of a text attends to the neighbours retrieved for the previous chunk.

Borgeaud et al. 2022, "Improving language models by retrieving from trillions of tokens" (RETRO), section 2.4 and figure
2. A text is cut into chunks of m tokens. Neighbours of chunk u are visible to its last token and to the first m − 1
tokens of the next chunk ("attending chunk"), so nothing leaks. The first m − 1 tokens of a text attend to nothing and
get zeros.

The positions of the memory select the chunk: positions u·m … u·m + m − 1 belong to chunk u. A model of kind `retro`
stores encoded neighbours there; in a translation model the memory is the source itself, with the same lag.

The paper adds relative positions to these scores (appendix B.1.2): a neighbour begins where its chunk begins, so that
token i' of a neighbour of chunk u stands at position u·m + i'. `positions: rotary` rotates queries and keys by these
positions; without it, only the encoder knows positions within a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, CrossAttention, Size
from allyouneed.nn.norms import Norm
from allyouneed.nn.observe import observe, show
from allyouneed.nn.ops.attention.dense import AttentionFn, DenseAttention, ScoreMod, attention_weights
from allyouneed.nn.positions.relative import NoRelative, Relative
from allyouneed.nn.positions.rotary import Rotary
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache
from allyouneed.nn.sublayer import Mixer, SubLayer


@dataclass(frozen=True, eq=False)
class Retrieved(Memory):
    """Memory in blocks of equal size, one block per chunk: hidden (batch, chunks · block, width). The neighbours in a
    block have `length` tokens each, padding included."""

    chunks: int = 0
    length: int = 1

    @property
    def real(self) -> Tensor:
        """(batch, chunks · block): 1 for a token, 0 for padding."""
        assert self.layout.segments is not None
        return self.layout.segments

    def select(self, rows: Tensor) -> Retrieved:
        return Retrieved(
            self.hidden.index_select(0, rows), self.layout.select(rows), chunks=self.chunks, length=self.length
        )


def neighbour_memory(hidden: Tensor, real: Tensor, chunks: int, chunk: int, length: int) -> Retrieved:
    """Consecutive blocks of neighbours of this length, each positioned at the start of its chunk."""
    positions = (torch.arange(chunks, device=hidden.device) * chunk).repeat_interleave(hidden.shape[1] // chunks)
    return Retrieved(hidden, TokenLayout(positions.expand(len(hidden), -1), real), chunks=chunks, length=length)


class ChunkedCross(Mixer):
    """CCA(H, E): token i of chunk u (counted from 1) attends to E_{u−1}, the last token to E_u (2.4); one softmax over
    all tokens of all neighbours of the chunk.

    `null` adds a learned key and value that every token after the first complete chunk may attend to, also where
    nothing was retrieved for its chunk, as in the public code (RETRO-pytorch, `null_kv`). Without any retrieval the
    layer is left out."""

    supports_cross: ClassVar[bool] = True
    supports_self: ClassVar[bool] = False

    kind: Literal["chunked-cross"] = "chunked-cross"
    heads: Size
    """Number of attention heads."""
    kv_heads: Size | None = None
    """Number of key and value heads: 1 is multi-query, a divisor of `heads` grouped-query attention; default:
    `heads`."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    chunk: Size
    """Tokens of a chunk (m)."""
    positions: Relative = NoRelative()
    """Positions of the text and of neighbours, which begin where their chunk begins: `rotary`, or none."""
    qk_norm: Norm | None = None
    """Norm of queries and keys, per head; default: none."""
    null: bool = False
    """Add a learned key and value, to attend to nothing that was retrieved (the public code)."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def attention(self) -> Attention:
        """Attention of the same sizes over the whole memory."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_width": self.head_width}
        return Attention(positions=self.positions, qk_norm=self.qk_norm, bias=self.bias, dropout=self.dropout, **sizes)

    def build(self, common: Common) -> SubLayer:
        raise TypeError("chunked cross-attention needs retrieved memory; use it as a cross")

    def build_cross(self, common: Common) -> SubLayer:
        return ChunkedCrossAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """The cost in a translation model: each token attends to one source chunk."""
        seen = self.attention.cost(common, min(self.chunk, length), cross=True)
        kept = replace(seen, state_constant=self.attention.cost(common, length, cross=True).state_constant)
        return kept + self.null_cost(common)

    def null_cost(self, common: Common) -> Cost:
        sizes = self.attention.sizes(common)
        size = 2 * sizes.kv_heads * sizes.head_width
        return Cost(parameters=size, flops=4 * sizes.inner) if self.null else Cost()

    def retrieval_cost(self, common: Common, block: int) -> Cost:
        """The cost with `block` tokens retrieved per chunk, whose keys and values are projected and cached."""
        seen = self.attention.cost(common, block, cross=True) + self.null_cost(common)
        flops = seen.flops + self.source_flops(common) * block / self.chunk
        return Cost(seen.parameters, flops, state_per_token=seen.state_constant / self.chunk)

    def source_flops(self, common: Common) -> float:
        return self.attention.source_flops(common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        if not isinstance(self.positions, NoRelative | Rotary):
            return [("positions", "supports rotary only; use it or remove positions")]
        return self.attention.problems(common)


class RetrievedKeyValues(CrossKVCache):
    """Keys and values of memory that grows while decoding: the first `end` are valid. `inputs` caches the layer inputs
    when the memory is built from them."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: KVCache | None = None

    def append_inputs(self, x: Tensor, context: Context) -> Tensor:
        """Append x; all cached inputs by position (batch, end, width)."""
        self.inputs = self.inputs or KVCache()
        return self.inputs.append(x[:, None], x[:, None, :, :0], context)[0][:, 0]

    def invalidate(self, length: int) -> None:
        """Memory from this position on has changed."""
        self.end = min(self.end, length)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.inputs is not None:
            self.inputs.select(rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.inputs is not None:
            self.inputs.trim(length, each)

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self.inputs is None else self.inputs.bytes)


class ChunkedCrossAttention(CrossAttention):
    def __init__(self, config: ChunkedCross, common: Common) -> None:
        super().__init__(config.attention, common)
        self.chunk = config.chunk
        shape = (2, self.kv_heads, 1, self.head_width)
        self.null = nn.Parameter(torch.empty(shape)) if config.null else None  # a key and a value per head
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.null is not None:
            nn.init.normal_(self.null)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        build, memory = context.memory_builder, context.memory
        if build is not None:
            memory = context.memoize(ChunkedCrossAttention, "memory", lambda: build(x, context, state))
        if memory is None:  # nothing retrieved, or nothing yet
            return torch.zeros_like(x)
        q = self.split(self.q(x))
        q = self.scores.prepare(q if self.q_norm is None else self.q_norm(q, context))
        q = self.rotate(q, context.queries.positions, 0)
        k, v = self.keys_and_values(memory, context, state)
        beams, repeated = len(q) // max(1, len(k)), memory
        if beams > 1:
            copies = torch.arange(len(k), device=k.device).repeat_interleave(beams)
            k, v = k.index_select(0, copies), v.index_select(0, copies)
            repeated = context.memoize(ChunkedCrossAttention, ("beams", beams), lambda: memory.select(copies))
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        if self.null is not None:
            return self.with_null(q, k, v, repeated, context)
        score_mod = self.score_mod()
        self.record_weights(q, k, context, repeated, score_mod)
        show(self, "mask", lambda: mask(self.chunk, context.queries, repeated.layout))
        show(self, "weights", lambda: self.weights(q, k, context, repeated, score_mod))
        key = self.chunk, repeated
        execute = context.memoize(
            ChunkedCrossAttention, key, lambda: select_attention(self.chunk, context.queries, repeated)
        )
        has_keys = context.memoize(
            ChunkedCrossAttention, (*key, "sees"), lambda: sees_anything(self.chunk, context.queries, repeated)
        )
        attended = observe(self, "heads", execute(q, k, v, self.dropout if self.training else 0.0, score_mod))
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out * has_keys[..., None].to(out.dtype)  # without keys the bias of `out` must not leak through

    def with_null(self, q: Tensor, k: Tensor, v: Tensor, memory: Memory, context: Context) -> Tensor:
        """Attention to the retrieved keys of the chunk and to the null key, with a dense mask."""
        assert self.null is not None
        queries, before = context.queries, memory.layout.positions
        null_k, null_v = self.null.to(q.dtype).expand(len(q), -1, -1, -1, -1).unbind(1)
        allowed = (last_complete_chunk(self.chunk, queries) >= 0)[:, None, :, None]  # (batch or 1, 1, time, 1)
        found = mask(self.chunk, queries, memory.layout)
        rows = max(len(found), len(allowed))
        seen = torch.cat((allowed.expand(rows, -1, -1, -1), found.expand(rows, -1, -1, -1)), -1)
        keys, values = torch.cat((null_k, k), 2), torch.cat((null_v, v), 2)
        places = torch.cat((torch.zeros_like(before[:, :1]), before), 1)
        request = None if context.record is None else context.record.get(self)
        if request is not None:  # of the retrieved keys; what is missing to 1 goes to the null key
            weights = attention_weights(q, keys, seen, queries.positions, places, self.score_mod())[..., 1:]
            request.weights.append(weights if request.heads is None else weights[:, list(request.heads)])
        attend = DenseAttention(seen, queries.positions, places)
        attended = attend(q, keys, values, self.dropout if self.training else 0.0, self.score_mod())
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out * allowed[:, 0].to(out.dtype)

    def keys_and_values(self, memory: Memory, context: Context, state: State | None) -> tuple[Tensor, Tensor]:
        if not isinstance(state, RetrievedKeyValues):
            return self.project_memory(memory, 0, context)
        if state.keys is None or state.values is None:
            state.keys, state.values = self.project_memory(memory, 0, context)
        elif state.end < memory.hidden.shape[1]:
            k, v = self.project_memory(memory, state.end, context)
            state.keys = torch.cat((state.keys[:, :, : state.end], k), 2)
            state.values = torch.cat((state.values[:, :, : state.end], v), 2)
        state.end = memory.hidden.shape[1]
        return state.keys, state.values

    def project_memory(self, memory: Memory, start: int, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory from `start` on."""
        k, v = self.source(memory.hidden[:, start:], context)
        positions = memory.layout.positions
        if isinstance(memory, Retrieved):  # those of the chunk
            positions = positions + torch.arange(positions.shape[1], device=positions.device) % memory.length
        return self.rotate(k, positions[:, start:], 1), v

    def record_weights(self, q: Tensor, k: Tensor, context: Context, memory: Memory, score_mod: ScoreMod) -> None:
        request = None if context.record is None else context.record.get(self)
        if request is not None:
            weights = self.weights(q, k, context, memory, score_mod)
            request.weights.append(weights if request.heads is None else weights[:, list(request.heads)])

    def weights(self, q: Tensor, k: Tensor, context: Context, memory: Memory, score_mod: ScoreMod) -> Tensor:
        """(batch, heads, queries, keys)"""
        positions = context.queries.positions, memory.layout.positions
        return attention_weights(q, k, mask(self.chunk, context.queries, memory.layout), *positions, score_mod)

    def new_state(self) -> State:
        return RetrievedKeyValues()


def last_complete_chunk(chunk: int, queries: TokenLayout) -> Tensor:
    """(batch or 1, time): index of the last chunk completed at each token, the token included; −1: none."""
    return (queries.positions + 1) // chunk - 1


def mask(chunk: int, queries: TokenLayout, keys: TokenLayout) -> Tensor:
    """The definition: allowed pairs, (batch or 1, 1, queries, keys) bool."""
    if queries.packed != keys.packed:
        raise ValueError("one side is packed (segments), the other is not; pack both or neither")
    allowed = last_complete_chunk(chunk, queries)[:, :, None] == (keys.positions // chunk)[:, None, :]
    if keys.segments is not None:
        allowed = allowed & (keys.segments > 0)[:, None, :]
    if queries.packed and queries.segments is not None and keys.segments is not None:
        allowed = allowed & (queries.segments[:, :, None] == keys.segments[:, None, :])
    return allowed[:, None]


def select_attention(chunk: int, queries: TokenLayout, memory: Memory) -> AttentionFn:
    """Chunk-wise blocks when the memory is blocked and all rows start at one position; otherwise a dense mask."""
    if isinstance(memory, Retrieved) and queries.start is not None and not queries.packed:
        return ChunkBlocks(chunk, queries.start, memory)
    return DenseAttention(mask(chunk, queries, memory.layout), queries.positions, memory.layout.positions)


def sees_anything(chunk: int, queries: TokenLayout, memory: Memory) -> Tensor:
    """(batch or 1, time) bool: tokens that attend to at least one key."""
    if not isinstance(memory, Retrieved):
        return mask(chunk, queries, memory.layout).any(-1)[:, 0]
    filled = pad(memory.real.unflatten(1, (memory.chunks, -1)).amax(-1), (1, 0)) > 0  # (batch, 1 + chunks)
    index = last_complete_chunk(chunk, queries).expand(len(filled), -1) + 1
    return filled.gather(1, index.clamp(max=memory.chunks)) & (index <= memory.chunks)


class ChunkBlocks:
    """Pairs each block with the tokens that attend to it: tokens · block scores in total."""

    def __init__(self, chunk: int, start: int, memory: Retrieved) -> None:
        self.chunk, self.start, self.memory = chunk, start, memory

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        batch, heads, time, _ = q.shape
        m, total = self.chunk, self.memory.chunks
        skipped = min(time, max(0, m - 1 - self.start))  # tokens before the first complete chunk
        # of the first attending token, relative to that of the text
        offset = self.start + skipped - (m - 1)
        first, ahead = divmod(max(offset, 0), m)
        count = min(-(-(ahead + time - skipped) // m), total - first)  # attending chunks that have a block
        if skipped == time or count < 1:
            return q.new_zeros(batch, heads, time, v.shape[-1])
        end = min(time, skipped + count * m - ahead)
        if count == 1:  # a single chunk needs no padding
            ahead, m = 0, end - skipped
        behind = count * m - ahead - (end - skipped)
        padded = pad(q[:, :, skipped:end], (0, 0, ahead, behind))  # (batch, heads, count · m, head_width)
        k, v = (x.unflatten(2, (total, -1))[:, :, first : first + count] for x in (k, v))
        # (batch · count, heads, m or block, head_width)
        padded, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (padded.unflatten(2, (count, m)), k, v))
        real = self.memory.real.unflatten(1, (total, -1))[:, first : first + count] > 0
        out = sdpa(
            padded,
            k,
            v,
            real.flatten(0, 1)[:, None, None],
            dropout,
            scale=score_mod.scale,
            enable_gqa=heads != k.shape[1],
        )
        out = out.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)  # (batch, heads, count · m, head_width)
        return pad(out[:, :, ahead : ahead + end - skipped], (0, 0, skipped, time - end))
