"""Infini-attention: local attention, and a memory of constant size for all that came before (Munkhdalai et al. 2024,
"Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention")."""

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
from allyouneed.nn.ops.unpack import sentences
from allyouneed.nn.patterns.core import Causal
from allyouneed.nn.patterns.sparse import Block
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative
from allyouneed.nn.positions.rotary import Rotary, RotaryModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import writable_cache
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
LEAST = 1e-30  # weight to divide by: what is less is nothing, and its slope would leave single precision


class Infini(Mixer):
    """A sentence is cut into segments of `segment` tokens. In its own segment a token attends causally (eq. 2); from
    the memory M, z of all segments before it reads A_mem = σ(Q) M / (σ(Q) z) with σ = ELU + 1 (eq. 3). A finished
    segment goes into the memory: `update: linear`, M ← M + σ(K)ᵀ V (eq. 4); `delta`, M ← M + σ(K)ᵀ (V − σ(K) M /
    (σ(K) z)) (eq. 5); z ← z + Σ σ(k). Each head has a gate, A = sigmoid(β) A_mem + (1 − sigmoid(β)) A_dot (eq. 6). An
    empty memory gives zeros.

    Rotary `positions` turn what attends, never what is remembered (3.1). Places are counted from the segment's start:
    distances are the same, and a text without end has no far angles.
    """

    kind: Literal["infini"] = "infini"
    heads: Size
    head_width: Size | None = None
    segment: Size
    update: Literal["linear", "delta"] = "delta"
    positions: Relative = NoRelative()
    bias: bool = True

    @property
    def causal(self) -> bool:
        return True

    @property
    def attention(self) -> Attention:
        """Its local part."""
        pattern = Causal() & Block(size=self.segment)
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
        return total + Cost(state_constant=memory)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if not isinstance(self.positions, Rotary | NoRelative):
            found.append(("positions", "what attends can be turned by its place: rotary or none"))
        elif isinstance(self.positions, Rotary) and self.positions.values:
            found.append(("positions.values", "values are remembered without a place; leave it out"))
        return found


def kept_tokens(segment: int) -> int:
    """The most tokens of which keys and values are kept: of the segment, and of those before that can be taken back."""
    return segment + MAX_TRIM - 1


class InfiniModule(SubLayer):
    def __init__(self, config: Infini, common: Common) -> None:
        super().__init__()
        sizes = config.sizes(common)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.segment, self.update = sizes.head_width, config.segment, config.update
        self.rotary = config.positions.build(sizes, common)
        self.qkv = common.linear.build(common.width, [sizes.inner] * 3, config.bias)
        self.gate = nn.Parameter(torch.empty(sizes.heads))  # β
        self.out = common.linear.build(sizes.inner, common.width, config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gate)  # half of either

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        lines = sentences(context)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (sentences, heads, time, head_width)
            for part in self.qkv(lines.gather(x)).chunk(3, -1)
        )
        if isinstance(state, Compressive):
            near, far = state.append(q, k, v, context)
        else:
            near, far = self.over_segments(q, k, v, lines.real, context)
        gate = self.gate.sigmoid()[:, None, None].to(near.dtype)
        y = gate * far.to(near.dtype) + (1 - gate) * near
        mixed: Tensor = self.out(lines.scatter(y.transpose(1, 2).flatten(2), x))
        return mixed

    def over_segments(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """What sentences find in their segments and in their memories, both (sentences, heads, time, head_width)."""
        time = q.shape[2]
        size = min(self.segment, time)
        q, k, v = (pad(part, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for part in (q, k, v))
        places = torch.arange(size, device=q.device)[None]
        turned = (
            self.turned(q.flatten(1, 2), places, True, context),
            self.turned(k.flatten(1, 2), places, False, context),
        )
        near = sdpa(*turned, v.flatten(1, 2), is_causal=True)  # (sentences, heads * segments, size, head_width)
        memory, found, count = self.empty(q), [], q.shape[2]
        reals = [None] * count if real is None else pad(real, (0, -time % size)).split(size, 1)
        for number in range(count):
            found.append(self.read(memory, q[:, :, number]))
            if number + 1 < count:
                memory = self.absorbed(memory, k[:, :, number], v[:, :, number], reals[number])
        return near.unflatten(1, (self.heads, -1)).flatten(2, 3)[:, :, :time], torch.cat(found, 2)[:, :, :time]

    def turned(self, x: Tensor, places: Tensor, query: bool, context: Context) -> Tensor:
        """By their places in the segment (batch or 1, time)."""
        if not isinstance(self.rotary, RotaryModule):
            return x
        rotary, dtype = self.rotary, torch.promote_types(x.dtype, torch.float32)
        key = ("infini", rotary.config, rotary.width, dtype, id(places))
        _, tables = context.plan(
            key, lambda: (places, rotary.tables(places, dtype))
        )  # kept, so that its id stays its own
        return rotary.turned(x, tables[0] if query else tables[1])

    # --- the memory: M and, as one more column, z: (batch, heads, head_width, head_width + 1) -------------------------

    def empty(self, like: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return like.new_zeros(len(like), self.heads, self.head_width, self.head_width + 1, dtype=dtype)

    def read(self, memory: Tensor, q: Tensor) -> Tensor:
        """eq. 3"""
        with torch.autocast(q.device.type, enabled=False):
            found = (elu(q.to(memory.dtype)) + 1) @ memory
            return found[..., :-1] / found[..., -1:].clamp(min=LEAST)

    def absorbed(self, memory: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The memory and one more segment: eq. 4, 5"""
        with torch.autocast(k.device.type, enabled=False):
            new = v.to(memory.dtype)
            if self.update == "delta":
                new = new - self.read(memory, k)
            keys = elu(k.to(memory.dtype)) + 1
            keys = keys if real is None else keys * real[:, None, :, None]
            return memory + keys.transpose(-1, -2) @ torch.cat((new, torch.ones_like(new[..., :1])), -1)

    def new_state(self) -> State:
        return Compressive(self)


@dataclass(frozen=True, eq=False)
class _Turn:
    """What a piece of a pass, about a segment long, does to the states of all layers that are alike."""

    room: int  # slots in use while it lasts, and one more for what is padding
    into: Tensor  # (batch, time): the slot of each new token
    seen: Tensor  # (batch, 1, time, room): which slots it attends to
    places: Tensor  # (batch, time): its place in its segment
    slots: Tensor  # (1, room): that of each slot
    parts: Tensor  # (batch, 1, time, 1): which of the segments kept it belongs to
    full: Tensor  # (batch, room): slots that hold a token
    drop: Tensor | None  # (batch,): segments that go into the memory for good afterwards
    lengths: Tensor
    since: Tensor


class Compressive(State):
    """The memory of all segments before `since`, and keys and values (batch, heads, kept + 1, head_width) from there.

    A segment goes into the memory for good when its end cannot be taken back any more.
    """

    def __init__(self, module: InfiniModule) -> None:
        self.module, self.kept = module, kept_tokens(module.segment)
        self.memory: Tensor | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None  # (batch,) tokens of each row
        self.since: Tensor | None = None  # (batch,) the first token of which the key is kept: where a segment begins
        self.end = 0  # slots in use in the longest row

    def append(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What new tokens find in their segments and in the memory, both (batch, heads, time, head_width)."""
        assert context.slots is not None
        batch, heads, time, width = k.shape
        if self.memory is None or self.lengths is None or self.since is None:
            self.memory = self.module.empty(k)
            self.keys, self.values = k.new_zeros(2, batch, heads, self.kept + 1, width)
            self.lengths = self.since = torch.zeros(batch, dtype=torch.long, device=k.device)
        found = []
        size = max(
            self.module.segment, MAX_TRIM
        )  # short segments are kept by the dozen: many tokens for one round of them
        for start in range(0, time, size):
            piece = slice(start, min(time, start + size))
            key = ("infini", self.module.segment, start)
            turn = context.plan(key, lambda piece=piece: self.turn(piece, context))  # type: ignore[misc]
            found.append(self.step(q[:, :, piece], k[:, :, piece], v[:, :, piece], turn, context))
        self.end = min(context.slots.time, self.kept)
        near, far = zip(*found, strict=True)
        return torch.cat(near, 2), torch.cat(far, 2)

    def turn(self, piece: slice, context: Context) -> _Turn:
        """Asks the device how many tokens are kept, once for all layers."""
        assert self.lengths is not None and self.since is not None
        segment, count = self.module.segment, self.lengths - self.since
        time, device, real = piece.stop - piece.start, count.device, context.queries.real
        real = None if real is None else real[:, piece]
        most = int(count.max()) + time
        room = max(most, self.kept)
        into = count[:, None] + torch.arange(time, device=device)  # (batch, time)
        slots = torch.arange(most, device=device)[None]
        parts = into // segment
        seen = (slots[:, None] // segment == parts[..., None]) & (slots[:, None] <= into[..., None])
        lengths = self.lengths + (time if real is None else real.sum(1))
        full = slots < (lengths - self.since)[:, None]
        drop = None
        if most > self.kept:
            drop = ((lengths - MAX_TRIM).div(segment, rounding_mode="floor") - self.since // segment).clamp(min=0)
        return _Turn(
            room,
            into if real is None else into.where(real, room),
            seen[:, None],
            into % segment,
            slots % segment,
            parts[:, None, :, None],
            full,
            drop,
            lengths,
            self.since if drop is None else self.since + drop * segment,
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor, turn: _Turn, context: Context) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None and self.memory is not None
        module, more = self.module, turn.room - self.kept
        both = [pad(cache, (0, 0, 0, more)) if more else cache for cache in (self.keys, self.values)]
        rows = torch.arange(len(q), device=q.device)[:, None]
        both = [writable_cache(cache, new) for cache, new in zip(both, (k, v), strict=True)]
        for cache, new in zip(both, (k, v), strict=True):
            cache[rows, :, turn.into] = new.transpose(1, 2)
        keys, values = (cache[:, :, : turn.slots.shape[1]] for cache in both)
        turned = module.turned(q, turn.places, True, context), module.turned(keys, turn.slots, False, context)
        near = sdpa(*turned, values, turn.seen)
        segments = zip(*(part.split(module.segment, 2) for part in (keys, values)), strict=True)
        reals = turn.full.split(module.segment, 1)
        memory, far, settled = self.memory, torch.zeros_like(q, dtype=self.memory.dtype), self.memory
        for number, (some_keys, some_values) in enumerate(segments):
            far = torch.where(turn.parts == number, module.read(memory, q), far)
            if number + 1 < len(reals):
                memory = module.absorbed(memory, some_keys, some_values, reals[number])
                if turn.drop is not None:
                    settled = torch.where((turn.drop == number + 1)[:, None, None, None], memory, settled)
        if turn.drop is not None:
            left = (turn.drop * module.segment)[:, None] + torch.arange(self.kept + 1, device=q.device)
            left = left.clamp(max=turn.room)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
            both = [cache.gather(2, left) for cache in both]
        self.keys, self.values, self.memory = *both, settled
        self.lengths, self.since = turn.lengths, turn.since
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
            raise ValueError(f"a compressive memory can take back {MAX_TRIM} tokens, not more: the others are gone")
        self.lengths, self.end = kept, min(self.end, length)

    @property
    def bytes(self) -> int:
        if self.memory is None or self.keys is None or self.values is None:
            return 0
        parts = (self.memory, self.keys[:, :, : self.end], self.values[:, :, : self.end])
        return sum(part.numel() * part.itemsize for part in parts)
