"""Performer: attention by random features, linear in the length (Choromanski et al. 2021, "Rethinking Attention with
Performers", FAVOR+).

A kernel K(q, k) = E[φ(q)·φ(k)] takes the place of exp(q·k/√head_width), so that sums over keys are made once, for all
queries: Σ_j φ(q)·φ(k_j) v_j = φ(q) Σ_j φ(k_j) v_jᵀ (eq. 4). Whoever may see only what lies before it gets prefix sums
(appendix B.1), here chunk by chunk.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.ops.unpack import Sentences, sentences
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
CHUNK = 64  # tokens that meet pair by pair; before them come sums
LEAST = 1e-30  # weight to divide by: what is less is nothing, and its slope would leave single precision
FLOOR = 1e-3  # added to ReLU features, so that no query is without weight (the authors' code)


class Performer(Mixer):
    """`kernel: softmax` has φ(x)_r = exp(ω_r·x − ‖x‖²/2) with x times head_width^−1/4 (eq. 5-7: positive features),
    `relu` has φ(x)_r = max(0, ω_r·x) (2.2, "generalized attention"). The ω are orthogonal in blocks of head_width and
    as long as if they were drawn one by one (2.4); all heads of a layer share them. They are no weights: they are drawn
    once and kept with the model, or drawn anew after every `redraw` passes of training (4.2).
    """

    crosses: ClassVar[bool] = True

    kind: Literal["performer"] = "performer"
    heads: Size
    head_width: Size | None = None
    features: Size = 256  # m
    kernel: Literal["softmax", "relu"] = "softmax"
    sees: Literal["past", "around"] = "past"  # of the own tokens; a source is always seen as a whole
    redraw: Size | None = None
    bias: bool = True

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "its sums are over all tokens: say sees: past"

    def sizes(self, common: Common) -> Heads:
        return self.attention.sizes(common)

    @property
    def attention(self) -> Attention:
        """What it stands for."""
        return Attention(heads=self.heads, head_width=self.head_width, bias=self.bias)

    def build(self, common: Common) -> SubLayer:
        return PerformerModule(self, common)

    def build_cross(self, common: Common) -> SubLayer:
        return PerformerCross(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, linear = self.sizes(common), common.linear
        inner, sums = sizes.inner, self.heads * self.features * (sizes.head_width + 1)
        total = linear.cost(common.width, inner, self.bias) + linear.cost(inner, common.width, self.bias)
        total += Cost(flops=2 * inner * self.features + 2 * sums)  # φ(q), and what it finds
        keys = linear.cost(common.width, inner, self.bias) * 2
        if cross:
            return total + Cost(keys.parameters, state_constant=sums)
        total += keys + Cost(flops=2 * inner * self.features + 2 * sums)
        return total + recurrent_cost(sums + self.heads, common.width)

    def source_flops(self, common: Common) -> float:
        sizes = self.sizes(common)
        sums = self.heads * self.features * (sizes.head_width + 1)
        each = common.linear.cost(common.width, sizes.inner, False).flops
        return 2 * each + 2 * sizes.inner * self.features + 2 * sums

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


def orthogonal_features(count: int, width: int) -> Tensor:
    """(count, width): blocks of orthogonal directions, each as long as a normal vector is (2.4)."""
    blocks = [torch.linalg.qr(torch.randn(width, width, dtype=torch.float32))[0].T for _ in range(-(-count // width))]
    return torch.cat(blocks)[:count] * torch.randn(count, width, dtype=torch.float32).norm(dim=1, keepdim=True)


class _Features(SubLayer):
    """What self- and cross-attention share: the feature maps and what is made of them."""

    bits: (
        Tensor  # the features as whole numbers, so that neither a half-precision model nor a mean of weights bends them
    )
    passes: Tensor  # of training since the beginning; kept with the model, so that a resumed run redraws when due

    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__()
        sizes = config.sizes(common)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.inner = sizes.head_width, sizes.inner
        self.kernel, self.redraw = config.kernel, config.redraw
        self.register_buffer("bits", orthogonal_features(config.features, sizes.head_width).view(torch.int32))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.out = common.linear.build(self.inner, common.width, config.bias)

    @property
    def features(self) -> Tensor:
        """ω: (m, head_width)"""
        return self.bits.view(torch.float32)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, time, head_width)

    def joined(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)  # (batch, time, heads * head_width)

    @torch.no_grad()
    def count_pass(self, context: Context) -> None:
        if self.redraw is None or not self.training or context.again:
            return
        self.passes += 1
        if int(self.passes) % self.redraw == 0:  # drawn on the CPU: the same features whatever the device
            self.bits.copy_(orthogonal_features(*self.bits.shape).view(torch.int32))

    def exponents(self, x: Tensor) -> Tensor:
        """log φ (batch, heads, time, m) of the softmax kernel, or ω·x of the other; in 32 bits at least."""
        x = _wide(x) * self.head_width**-0.25
        found = x @ self.features.to(x.dtype).T
        return found if self.kernel == "relu" else found - x.square().sum(-1, keepdim=True) / 2

    def queries(self, q: Tensor) -> Tensor:
        found = self.exponents(q)
        if self.kernel == "relu":
            return found.relu() + FLOOR
        return (found - found.detach().amax(-1, keepdim=True)).exp()  # a query's own factor is divided away again

    def keys(self, k: Tensor, real: Tensor | None, top: Tensor) -> tuple[Tensor, Tensor]:
        """φ(k) / exp(top), zero for padding, for the new top: all exponents so far are at most this.

        One factor for all keys is divided away again, since the sum of weights has it too.
        """
        found = self.exponents(k)
        hidden = None if real is None else ~real[:, None, :, None]
        if self.kernel == "relu":
            found = found.relu() + FLOOR
            return found if hidden is None else found.masked_fill(hidden, 0), top
        found = found if hidden is None else found.masked_fill(hidden, float("-inf"))
        top = top.maximum(found.detach().amax((-1, -2), keepdim=True))
        return (found - top).exp(), top

    def summed(self, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Σ φ(k) (v, 1)ᵀ over each row: (batch, heads, m, head_width + 1)."""
        keys, _ = self.keys(k, real, _nothing(k))
        return keys.transpose(-1, -2) @ _with_one(v)

    def begin(self, batch: int, like: Tensor) -> Carry:
        dtype = torch.promote_types(like.dtype, torch.float32)
        sums = like.new_zeros(batch, self.heads, len(self.bits), self.head_width + 1, dtype=dtype)
        return sums, _nothing(sums)


class PerformerModule(_Features):
    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__(config, common)
        self.sees = config.sees
        self.qkv = common.linear.build(common.width, [self.inner] * 3, config.bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        self.count_pass(context)
        lines = sentences(context)
        q, k, v = self.project(lines.gather(x))
        with torch.autocast(x.device.type, enabled=False):
            if self.sees == "around":
                y = _divided(self.queries(q) @ self.summed(k, v, lines.real))
            else:
                old = state.carry(len(x), x) if isinstance(state, Recurrent) else self.begin(len(q), q)
                y, new = self.past(q, k, v, lines.real, old)
                if isinstance(state, Recurrent):
                    state.keep(x, new, context)
        mixed: Tensor = self.out(lines.scatter(self.joined(y.to(v.dtype)), x))
        return mixed

    def past(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, carry: Carry) -> tuple[Tensor, Carry]:
        """What each token finds among those up to itself, after those that the carry knows."""
        sums, old = carry
        keys, top = self.keys(k, real, old)
        found, sums = prefix_sums(self.queries(q), keys, _with_one(v), sums * (old - top).exp())
        return _divided(found), (sums, top)

    def fold(self, carry: Carry, inputs: Tensor, real: Tensor | None) -> Carry:
        _, k, v = self.project(inputs)
        sums, old = carry
        keys, top = self.keys(k, real, old)
        return sums * (old - top).exp() + keys.transpose(-1, -2) @ _with_one(v), top

    def new_state(self) -> State:
        if self.sees == "around":
            raise ValueError("a performer that sees later tokens cannot decode; say sees: past")
        return Recurrent(self.begin, self.fold)


def prefix_sums(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_{j ≤ i} (q_i·k_j) v_j, and the sums `before` (batch, heads, m, width of v) with all of these added.

    Within a chunk pair by pair, across chunks by their sums: no loop over time, and memory linear in it.
    """
    time = q.shape[2]
    size = min(CHUNK, time)
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    each = k.transpose(-1, -2) @ v  # (batch, heads, chunks, m, width of v)
    until = each.cumsum(2) + before[:, :, None]
    found = (q @ k.transpose(-1, -2)).tril() @ v + q @ (until - each)  # (batch, heads, chunks, size, width of v)
    return found.flatten(2, 3)[:, :, :time], until[:, :, -1]


class PerformerCross(_Features):
    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__(config, common)
        self.q = common.linear.build(common.width, self.inner, config.bias)
        self.kv = common.linear.build(common.width, [self.inner] * 2, config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "cross-attention needs an encoder's memory"
        self.count_pass(context)
        here, there = context.queries, memory.layout
        if here.packed != there.packed:
            raise ValueError(
                "one side holds several sentences a row (segments), the other does not: they cannot be matched"
            )
        if here.packed:
            lines, theirs, match, known = context.plan("sources", lambda: _matched(sentences(context), here, there))
            each = self.source(theirs.gather(memory.hidden), theirs.real)
            y = self.find(lines.gather(x), each.index_select(0, match) * known[:, None, None, None])
            return self.finish(lines.scatter(y, x))
        if isinstance(state, SourceSums) and state.sums is not None:
            sums = state.sums
        else:
            sums = self.source(memory.hidden, there.real)
            if isinstance(state, SourceSums):
                state.sums = sums
        # beams of one sentence stand side by side as its queries, so its sums need no copies
        beams = x.unflatten(0, (len(sums), -1)).flatten(1, 2)  # (sources, beams * time, width)
        return self.finish(self.find(beams, sums).unflatten(1, (-1, x.shape[1])).flatten(0, 1))

    def source(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        k, v = map(self.split, self.kv(hidden).chunk(2, -1))
        with torch.autocast(hidden.device.type, enabled=False):
            return self.summed(k, v, real)

    def find(self, x: Tensor, sums: Tensor) -> Tensor:
        q = self.split(self.q(x))
        with torch.autocast(x.device.type, enabled=False):
            return self.joined(_divided(self.queries(q) @ sums).to(q.dtype))

    def finish(self, y: Tensor) -> Tensor:
        found: Tensor = self.out(y)
        return found

    def new_state(self) -> State:
        return SourceSums()


class SourceSums(State):
    """What a source comes to, (sources, heads, m, head_width + 1): computed once, shared by all beams."""

    shared = True

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        self.sums = None if self.sums is None else self.sums.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # the source sentence stays what it is

    @property
    def bytes(self) -> int:
        return 0 if self.sums is None else self.sums.numel() * self.sums.itemsize


def _matched(lines: Sentences, here: TokenLayout, there: TokenLayout) -> tuple[Sentences, Sentences, Tensor, Tensor]:
    """Sentences of both sides; for each of ours the number of its source, and whether it has one."""
    assert here.segments is not None and there.segments is not None
    most = torch.maximum(here.segments.max(), there.segments.max()) + 1
    numbers = []
    for segments in (here.segments, there.segments):
        rows = torch.arange(len(segments), device=segments.device)[:, None] * most
        numbers.append((rows + segments)[segments > 0].unique())  # in the order of Sentences
    ours, theirs = numbers
    match = torch.searchsorted(theirs, ours).clamp(max=len(theirs) - 1)
    return lines, Sentences.of(there), match, theirs[match] == ours


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _with_one(v: Tensor) -> Tensor:
    """Values and a one beside them, which adds up to the sum of weights."""
    v = _wide(v)
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


def _nothing(like: Tensor) -> Tensor:
    """The top of no exponents (batch, heads, 1, 1): finite, so that it can be subtracted from itself."""
    like = _wide(like)
    return torch.full_like(like[:, :, :1, :1], torch.finfo(like.dtype).min)


def _divided(found: Tensor) -> Tensor:
    """By the sum of weights, which stands last; a query that has seen nothing gets zeros."""
    values, weight = found[..., :-1], found[..., -1:]
    return values / weight.clamp(min=LEAST)
