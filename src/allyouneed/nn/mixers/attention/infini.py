"""Infini-attention: local attention plus a compressive memory of constant size (Munkhdalai et al. 2024, "Leave No
Context Behind: Efficient Infinite Context Transformers with Infini-attention")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import elu, pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.attention.dense import AttentionFn, ScoreMod
from allyouneed.nn.ops.attention.select import select_attention
from allyouneed.nn.ops.pieces import Pieces
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.patterns.core import Causal
from allyouneed.nn.patterns.sparse import BlockDiagonal
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative
from allyouneed.nn.positions.rotary import Rotary, RotaryModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import writable_cache
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
MIN_WEIGHT = 1e-30  # smallest divisor: below it the gradient would overflow single precision


class Infini(Mixer):
    """A sentence is cut into segments of `segment` tokens. A token attends causally within its segment (eq. 2) and
    reads A_mem = σ(Q) M / (σ(Q) z), σ = ELU + 1, from the memory M, z of all earlier segments (eq. 3). A complete
    segment updates the memory: `update: linear`, M ← M + σ(K)ᵀ V (eq. 4); `delta`, M ← M + σ(K)ᵀ (V − σ(K) M / (σ(K)
    z)) (eq. 5); z ← z + Σ σ(k). Each head has a gate, A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot (eq. 6). An
    empty memory returns zeros; `first: local` leaves the gate out there, A = A_dot, as the public code does
    (infini-transformer-pytorch, which returns local attention where there are no past memories).

    Rotary `positions` apply to local attention, not to the memory (3.1). Positions are counted from the start of the
    segment: distances are unchanged and angles stay small in a text of any length.
    """

    kind: Literal["infini"] = "infini"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    segment: Size
    """Tokens of a segment."""
    update: Literal["linear", "delta"] = "delta"
    """Memory update: eq. 4 (`linear`) or eq. 5 (`delta`)."""
    first: Literal["gated", "local"] = "gated"
    """The first segment, whose memory is empty: gated like the others, or local attention alone."""
    positions: Relative = NoRelative()
    """Relative positions of the local attention; they do not apply to the memory (3.1)."""
    bias: bool = True
    """Whether the linear maps have a bias."""

    @property
    def attention(self) -> Attention:
        """Local attention within a segment."""
        pattern = Causal() & BlockDiagonal(size=self.segment)
        sizes = {"heads": self.heads, "head_width": self.head_width}
        return Attention(pattern=pattern, positions=self.positions, bias=self.bias, **sizes)

    def sizes(self, common: Common) -> Heads:
        return Heads(self.heads, self.heads, self.attention.sizes(common).head_width, causal=True)

    def build(self, common: Common) -> SubLayer:
        return InfiniModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, linear = self.sizes(common), common.linear
        inner, memory = sizes.inner, sizes.inner * (sizes.head_width + 1)
        total = linear.cost(common.width, inner, self.bias) * 3 + linear.cost(inner, common.width, self.bias)
        near = self.attention.pattern.mean_keys(length)
        total += Cost(parameters=self.heads, flops=2 * 2 * inner * near)
        total += Cost(flops=2 * memory * (3 if self.update == "delta" else 2))
        kept = kept_tokens(self.segment)
        total += Cost(state_per_token=2 * inner) if length < kept else Cost(state_constant=2 * inner * kept)
        total += Cost(trim=2 * inner * max(0, min(length, kept) - self.segment))
        # a captured step also keeps the memory with the segment so far
        return total + Cost(state_constant=memory, wide_constant=memory, trim=-memory, trim_wide=-memory)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if not isinstance(self.positions, Rotary | NoRelative):
            found.append(("positions", "must be rotary or none"))
        elif isinstance(self.positions, Rotary) and self.positions.values:
            found.append(("positions.values", "the memory stores values without positions; remove it"))
        return found


def kept_tokens(segment: int) -> int:
    """Most keys and values cached: those of one segment, and those before it that `trim` may restore."""
    return segment + MAX_TRIM - 1


class InfiniModule(SubLayer):
    traceable = unpacks = True

    def __init__(self, config: Infini, common: Common) -> None:
        super().__init__()
        sizes = config.sizes(common)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.segment, self.update = sizes.head_width, config.segment, config.update
        self.first = config.first
        self.rotary = config.positions.build(sizes, common)
        self.qkv = common.linear.build(common.width, [sizes.inner] * 3, config.bias)
        self.gate = nn.Parameter(torch.empty(sizes.heads))  # β
        self.out = common.linear.build(sizes.inner, common.width, config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)  # both parts weigh one half

    def prepare(self, context: Context, rows: int) -> None:
        unpacked = unpack_rows(context, restarts=True)
        if unpacked.starts is not None:
            pieces = self.pieces(unpacked.starts, context)
            self.local_attention(pieces, context)
            self.local_tables(self.segment, context, pieces)
            return
        real = unpacked.real
        self.local_tables(min(self.segment, context.queries.time if real is None else real.shape[1]), context)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        unpacked = unpack_rows(context, restarts=True)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (sentences, heads, time, head_width)
            for part in self.qkv(unpacked.gather(x)).chunk(3, -1)
        )
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        if isinstance(state, CompressiveMemory):
            near, far = state.append(q, k, v, context)
        elif unpacked.starts is not None:
            near, far = self.over_packed(q, k, v, self.pieces(unpacked.starts, context), context)
        else:
            near, far = self.over_segments(q, k, v, unpacked.real, context)
        gate = self.gate.sigmoid()[:, None, None].to(near.dtype)  # (heads, 1, 1)
        if self.first == "local":
            positions = unpacked.gather(context.queries.positions.expand(len(x), -1)[..., None])
            gate = gate * (positions >= self.segment)[:, None].to(gate.dtype)  # (sentences, heads, time, 1)
        y = observe(self, "heads", gate * far.to(near.dtype) + (1 - gate) * near)
        return self.out(unpacked.scatter(y.transpose(1, 2).flatten(2), x))

    def over_segments(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Local and memory attention of whole sentences, both (sentences, heads, time, head_width)."""
        time = q.shape[2]
        size = min(self.segment, time)
        q, k, v = (pad(part, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for part in (q, k, v))
        near_q, near_k = q.flatten(1, 2), k.flatten(1, 2)
        if (tables := self.local_tables(size, context)) is not None:
            assert isinstance(self.rotary, RotaryModule)
            near_q, near_k = self.rotary.rotate(near_q, tables[0]), self.rotary.rotate(near_k, tables[1])
        near = sdpa(near_q, near_k, v.flatten(1, 2), is_causal=True)  # (sentences, heads * segments, size, head_width)
        memory, count = self.initial_memory(q), q.shape[2]
        found = [torch.zeros_like(q[:, :, 0], dtype=memory.dtype)]  # of an empty memory
        reals = [None] * count if real is None else pad(real, (0, -time % size)).split(size, 1)
        # unbind: the gradient of each slice would have the size of the whole
        segments = zip(q.unbind(2)[1:], k.unbind(2), v.unbind(2), reals, strict=False)
        for some_q, some_k, some_v, some_real in segments:
            memory = self.update_memory(memory, some_k, some_v, some_real)
            found.append(self.read(memory, some_q))
        return near.unflatten(1, (self.heads, -1)).flatten(2, 3)[:, :, :time], torch.cat(found, 2)[:, :, :time]

    def pieces(self, starts: Tensor, context: Context) -> Pieces:
        """Segments of the sentences of packed rows."""
        return context.memoize(Pieces, self.segment, lambda: Pieces.of(starts, self.segment, context.queries))

    def local_attention(self, pieces: Pieces, context: Context) -> AttentionFn:
        """Within the segments of packed rows."""
        return context.memoize(
            InfiniModule,
            ("local", self.segment),
            lambda: select_attention(Causal(), pieces.layout, pieces.layout, ScoreMod(1.0)),
        )

    def over_packed(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, context: Context) -> tuple[Tensor, Tensor]:
        """`over_segments` of packed rows, whose sentences begin anywhere: (batch, heads, time, head_width)."""
        near_q, near_k = q, k
        if (tables := self.local_tables(self.segment, context, pieces)) is not None:
            assert isinstance(self.rotary, RotaryModule)
            near_q, near_k = self.rotary.rotate(q, tables[0]), self.rotary.rotate(k, tables[1])
        near = self.local_attention(pieces, context)(near_q, near_k, v, 0.0, ScoreMod(self.head_width**-0.5))
        memory, found = self.initial_memory(q), []
        for some_k, some_v, some_q, real, goes_on in zip(
            *(pieces.gather(part, pieces.tokens).unbind(2) for part in (k, v)),
            pieces.gather(q, pieces.readers).unbind(2),
            pieces.real.unbind(1),
            pieces.goes_on.unbind(1),
            strict=True,
        ):
            memory = self.update_memory(memory * goes_on[:, None, None, None], some_k, some_v, real)
            found.append(self.read(memory, some_q))
        far = pieces.scatter(torch.cat(found, 2), q.shape[2]) if found else torch.zeros_like(q, dtype=memory.dtype)
        return near, far

    def local_tables(self, size: int, context: Context, pieces: Pieces | None = None) -> tuple[Tensor, Tensor] | None:
        """Rotary tables of a segment of this size, or of packed rows, for queries and keys; None without rotary
        positions."""
        if not isinstance(rotary := self.rotary, RotaryModule):
            return None

        def make() -> tuple[Tensor, Tensor]:
            local = torch.arange(size, device=context.queries.device)[None]
            positions = local if pieces is None else pieces.layout.positions
            return rotary.tables(positions, torch.promote_types(self.gate.dtype, torch.float32))

        return context.memoize(InfiniModule, (rotary.key, size, pieces is None), make)

    def rotate(self, x: Tensor, positions: Tensor, query: bool, context: Context) -> Tensor:
        """Apply rotary positions within the segment (batch or 1, time)."""
        if not isinstance(self.rotary, RotaryModule):
            return x
        rotary, dtype = self.rotary, torch.promote_types(x.dtype, torch.float32)
        key = (rotary.key, dtype, id(positions))
        # keeps the positions alive, so that their id stays unique
        _, tables = context.memoize(InfiniModule, key, lambda: (positions, rotary.tables(positions, dtype)))
        return rotary.rotate(x, tables[0] if query else tables[1])

    # --- the memory: M, and z as one more column: (batch, heads, head_width, head_width + 1)

    def initial_memory(self, like: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(len(like), self.heads, self.head_width, self.head_width + 1, dtype=dtype)

    def read(self, memory: Tensor, q: Tensor) -> Tensor:
        """eq. 3"""
        with torch.autocast(q.device.type, enabled=False):
            found = (elu(q.to(memory.dtype)) + 1) @ memory
            return found[..., :-1] / found[..., -1:].clamp(min=MIN_WEIGHT)

    def update_memory(self, memory: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The memory updated by one segment: eq. 4, 5"""
        return memory + self.added(memory, k, v, real)

    def added(self, memory: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """What tokens of the segment after `memory` add to it."""
        with torch.autocast(k.device.type, enabled=False):
            new = v.to(memory.dtype)
            if self.update == "delta":
                new = new - self.read(memory, k)
            keys = elu(k.to(memory.dtype)) + 1
            keys = keys if real is None else keys * real[:, None, :, None]
            return keys.transpose(-1, -2) @ torch.cat((new, torch.ones_like(new[..., :1])), -1)

    def new_state(self) -> State:
        return CompressiveMemory(self)


@dataclass(frozen=True, eq=False)
class _SegmentStep:
    """Indices of one step of about a segment, shared by all layers of this kind."""

    capacity: int  # slots used in this step; one more receives padding
    target_slots: Tensor  # (batch, time): slot of each new token
    mask: Tensor  # (batch, 1, time, capacity): slots it attends to
    positions: Tensor  # (batch, time): position in its segment
    slot_positions: Tensor  # (1, capacity): position of each slot in its segment
    segments: Tensor  # (batch, 1, time, 1): index of its segment among the cached ones
    filled: Tensor  # (batch, capacity): slots that hold a token
    drop: Tensor | None  # (batch,): segments to move into the memory after this step
    lengths: Tensor
    since: Tensor


class CompressiveMemory(State):
    """The memory of all segments before `since`, and keys and values (batch, heads, kept + 1, head_width) from there
    on.

    A segment moves into the memory once `trim` can no longer reach its end.
    """

    def __init__(self, module: InfiniModule) -> None:
        self.module, self.kept = module, kept_tokens(module.segment)
        self.memory: Tensor | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None  # (batch,) row lengths
        self.since: Tensor | None = None  # (batch,) position of the first cached key, a segment start
        self.end = 0  # slots used by the longest row

    def append(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Local and memory attention of new tokens, both (batch, heads, time, head_width)."""
        assert context.slots is not None
        batch, heads, time, width = k.shape
        if self.memory is None or self.lengths is None or self.since is None:
            self.memory = self.module.initial_memory(k)
            self.keys, self.values = k.new_zeros(2, batch, heads, self.kept + 1, width)
            self.lengths = self.since = torch.zeros(batch, dtype=torch.long, device=k.device)
        found = []
        size = max(self.module.segment, MAX_TRIM)  # process many short segments per step
        for start in range(0, time, size):
            piece = slice(start, min(time, start + size))
            indices = context.memoize(
                CompressiveMemory,
                (self.module.segment, start),
                lambda piece=piece: self.step_indices(piece, context),  # type: ignore[misc]
            )
            found.append(self.step(q[:, :, piece], k[:, :, piece], v[:, :, piece], indices, context))
        self.end = min(context.slots.time, self.kept)
        near, far = zip(*found, strict=True)
        return torch.cat(near, 2), torch.cat(far, 2)

    def step_indices(self, piece: slice, context: Context) -> _SegmentStep:
        """Synchronizes with the device once for all layers to read the row lengths."""
        assert self.lengths is not None and self.since is not None
        segment, count = self.module.segment, self.lengths - self.since
        time, device, real = piece.stop - piece.start, count.device, context.queries.real
        real = None if real is None else real[:, piece]
        most = int(count.max()) + time
        capacity = max(most, self.kept)
        target_slots = count[:, None] + torch.arange(time, device=device)  # (batch, time)
        slots = torch.arange(most, device=device)[None]
        segments = target_slots // segment
        mask = (slots[:, None] // segment == segments[..., None]) & (slots[:, None] <= target_slots[..., None])
        lengths = self.lengths + (time if real is None else real.sum(1))
        filled = slots < (lengths - self.since)[:, None]
        drop = None
        if most > self.kept:
            drop = ((lengths - MAX_TRIM).div(segment, rounding_mode="floor") - self.since // segment).clamp(min=0)
        return _SegmentStep(
            capacity,
            target_slots if real is None else target_slots.where(real, capacity),
            mask[:, None],
            target_slots % segment,
            slots % segment,
            segments[:, None, :, None],
            filled,
            drop,
            lengths,
            self.since if drop is None else self.since + drop * segment,
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor, indices: _SegmentStep, context: Context) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None and self.memory is not None
        module, more = self.module, indices.capacity - self.kept
        both = [pad(cache, (0, 0, 0, more)) if more else cache for cache in (self.keys, self.values)]
        rows = torch.arange(len(q), device=q.device)[:, None]
        both = [writable_cache(cache, new) for cache, new in zip(both, (k, v), strict=True)]
        for cache, new in zip(both, (k, v), strict=True):
            cache[rows, :, indices.target_slots] = new.transpose(1, 2)
        keys, values = (cache[:, :, : indices.slot_positions.shape[1]] for cache in both)
        rotated = (
            module.rotate(q, indices.positions, True, context),
            module.rotate(keys, indices.slot_positions, False, context),
        )
        near = sdpa(*rotated, values, indices.mask)
        segments = zip(*(part.split(module.segment, 2) for part in (keys, values)), strict=True)
        reals = indices.filled.split(module.segment, 1)
        memory, far, updated = self.memory, torch.zeros_like(q, dtype=self.memory.dtype), self.memory
        for number, (some_keys, some_values) in enumerate(segments):
            far = torch.where(indices.segments == number, module.read(memory, q), far)
            if number + 1 < len(reals):
                memory = module.update_memory(memory, some_keys, some_values, reals[number])
                if indices.drop is not None:
                    updated = torch.where((indices.drop == number + 1)[:, None, None, None], memory, updated)
        if indices.drop is not None:
            left = (indices.drop * module.segment)[:, None] + torch.arange(self.kept + 1, device=q.device)
            left = left.clamp(max=indices.capacity)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            both = [cache.gather(2, left) for cache in both]
        self.keys, self.values, self.memory = *both, updated
        self.lengths, self.since = indices.lengths, indices.since
        return near, far

    def select(self, rows: Tensor) -> None:
        names = ("memory", "keys", "values", "lengths", "since")
        for name in names if self.memory is not None else ():
            setattr(self, name, getattr(self, name).index_select(0, rows))

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.lengths is None or self.since is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        if bool((kept < self.since).any()):
            raise ValueError(f"a compressive memory can trim at most {MAX_TRIM} tokens")
        self.lengths, self.end = kept, min(self.end, length)

    @property
    def bytes(self) -> int:
        if self.memory is None or self.keys is None or self.values is None:
            return 0
        parts = (self.memory, self.keys[:, :, : self.end], self.values[:, :, : self.end])
        return sum(part.numel() * part.itemsize for part in parts)
