"""Performer: attention by random features, linear in the length (Choromanski et al. 2021, "Rethinking Attention with
Performers", FAVOR+).

A kernel K(q, k) = E[φ(q)·φ(k)] replaces exp(q·k/√head_width), so that the sums over keys are computed once for all
queries: Σ_j φ(q)·φ(k_j) v_j = φ(q) Σ_j φ(k_j) v_jᵀ (eq. 4). Causal attention uses prefix sums (appendix B.1), computed
chunk by chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.deferred import Recent, begin_recent, deferred_step, recent_cost
from allyouneed.nn.ops.linear_attention import prefix_sums
from allyouneed.nn.ops.unpack import UnpackedRows, flip_starts, sentence_max, unpack_rows
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0, le=1 << 20)]
WIDEST = 128  # head width that fits in a program of the GPU kernel
MIN_WEIGHT = 1e-30  # smallest divisor: below it the gradient would overflow single precision
RELU_FLOOR = 1e-3  # added to ReLU features so that the weights of a query never sum to 0 (the authors' code)


class Performer(Mixer):
    """`kernel: softmax` uses φ(x)_r = exp(ω_r·x − ‖x‖²/2) with x scaled by head_width^−1/4 (eq. 5-7: positive
    features), `relu` uses φ(x)_r = max(0, ω_r·x) (2.2, "generalized attention"). The ω are orthogonal in blocks of
    head_width with the norms of Gaussian vectors (2.4) and shared by all heads of a layer. They are not trained:
    they are drawn once and stored with the model, or redrawn after every `redraw` training passes (4.2).

    `eps` is added to every feature of the softmax kernel, as in the public code (performer-pytorch, `softmax_kernel`,
    1e-4), so that weights trained there give the same numbers: exp(ω·x − ‖x‖²/2 − max ω·x) + eps, where the maximum is
    over the features of a query, and over the features of all keys. It needs all keys, so `sees: around`."""

    supports_cross: ClassVar[bool] = True

    kind: Literal["performer"] = "performer"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    features: Size = 256
    """Number of random features (m); more approximate softmax better."""
    kernel: Literal["softmax", "relu"] = "softmax"
    """Positive features of the softmax kernel, or ReLU features."""
    sees: Literal["past", "around"] = "past"
    """`past`: causal; `around`: bidirectional. A source is always seen as a whole."""
    eps: Annotated[float, Field(ge=0)] = 0.0
    """Added to each feature of the softmax kernel, as in the public code (1e-4); needs `sees: around`."""
    redraw: Size | None = None
    """Redraw the random features after this many training passes; default: never."""
    bias: bool = True
    """Whether the linear maps have a bias."""

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "its sums cover all tokens; set sees: past"

    def sizes(self, common: Common) -> Heads:
        return self.attention.sizes(common)

    @property
    def attention(self) -> Attention:
        """The attention it approximates."""
        return Attention(heads=self.heads, head_width=self.head_width, bias=self.bias)

    def build(self, common: Common) -> SubLayer:
        return PerformerModule(self, common)

    def build_cross(self, common: Common) -> SubLayer:
        return PerformerCross(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, linear = self.sizes(common), common.linear
        inner, sums = sizes.inner, self.heads * self.features * (sizes.head_width + 1)
        total = linear.cost(common.width, inner, self.bias) + linear.cost(inner, common.width, self.bias)
        total += Cost(flops=2 * inner * self.features + 2 * sums)  # φ(q) and its product with the sums
        keys = linear.cost(common.width, inner, self.bias) * 2
        if cross:
            return total + Cost(keys.parameters, state_constant=sums, wide_constant=sums)
        total += keys + Cost(flops=2 * inner * self.features + 2 * sums)
        total += recent_cost(self.heads, self.heads, self.features, sizes.head_width)
        return total + recurrent_cost(sums + self.heads, common.width, wide=sums + self.heads)

    def source_flops(self, common: Common) -> float:
        sizes = self.sizes(common)
        sums = self.heads * self.features * (sizes.head_width + 1)
        each = common.linear.cost(common.width, sizes.inner, False).flops
        return 2 * each + 2 * sizes.inner * self.features + 2 * sums

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if self.eps and (self.sees != "around" or self.kernel != "softmax"):
            found.append(("eps", "needs sees: around and kernel: softmax; a running maximum would change its weight"))
        return found


def orthogonal_features(count: int, width: int) -> Tensor:
    """(count, width): blocks of orthogonal directions with the norms of Gaussian vectors (2.4)."""
    if torch.get_default_device().type == "meta":  # a model whose weights are assigned later
        return torch.empty(count, width, dtype=torch.float32)
    blocks = [torch.linalg.qr(torch.randn(width, width, dtype=torch.float32))[0].T for _ in range(-(-count // width))]
    return torch.cat(blocks)[:count] * torch.randn(count, width, dtype=torch.float32).norm(dim=1, keepdim=True)


class _Features(SubLayer):
    """Feature maps shared by self- and cross-attention."""

    bits: Tensor  # ω as int32 bits: immune to casting the model and to averaging weights
    passes: Tensor  # training passes so far; stored, so that a resumed run redraws on schedule

    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__()
        sizes = config.sizes(common)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.inner = sizes.head_width, sizes.inner
        self.kernel, self.redraw, self.eps = config.kernel, config.redraw, config.eps
        self.register_buffer("bits", orthogonal_features(config.features, sizes.head_width).view(torch.int32))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.out = common.linear.build(self.inner, common.width, config.bias)

    @property
    def features(self) -> Tensor:
        """ω: (m, head_width)"""
        return self.bits.view(torch.float32)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, time, head_width)

    def merge_heads(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)  # (batch, time, heads * head_width)

    @torch.no_grad()
    def count_pass(self, context: Context) -> None:
        if self.redraw is None or not self.training or context.is_recomputing:
            return
        self.passes += 1
        if int(self.passes) % self.redraw == 0:  # drawn on CPU for reproducibility across devices
            self.bits.copy_(orthogonal_features(*self.bits.shape).view(torch.int32))

    def exponents(self, x: Tensor) -> Tensor:
        """log φ (batch, heads, time, m) of the softmax kernel, or ω·x of the relu kernel; at least fp32."""
        found, norm = self.products(x)
        return found if self.kernel == "relu" else found - norm

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ω·x (batch, heads, time, m) and ‖x‖²/2 (batch, heads, time, 1), x scaled."""
        x = _to_fp32(x) * self.head_width**-0.25
        return x @ self.features.to(x.dtype).T, x.square().sum(-1, keepdim=True) / 2

    def queries(self, q: Tensor) -> Tensor:
        if self.eps:  # the maximum is that of ω·x, since a factor no longer cancels
            found, norm = self.products(q)
            return (found - norm - found.detach().amax(-1, keepdim=True)).exp() + self.eps
        found = self.exponents(q)
        if self.kernel == "relu":
            return found.relu() + RELU_FLOOR
        return (found - found.detach().amax(-1, keepdim=True)).exp()  # a factor per query cancels in the normalisation

    def keys(self, k: Tensor, real: Tensor | None, top: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """φ(k) / exp(top), zero for padding, and the new top: the maximum exponent so far; of packed rows (`starts`),
        that of each sentence.

        A common factor of all keys cancels in the normalisation.
        """

        def largest(found: Tensor) -> Tensor:
            if starts is None:
                return found.amax((-1, -2), keepdim=True)
            return sentence_max(found.amax(-1), starts)[..., None]

        hidden = None if real is None else ~real[:, None, :, None]
        if self.eps:
            found, norm = self.products(k)
            shown = found.detach() if hidden is None else found.detach().masked_fill(hidden, float("-inf"))
            features = (found - norm - largest(shown)).exp() + self.eps
            return features if hidden is None else features.masked_fill(hidden, 0), top
        found = self.exponents(k)
        if self.kernel == "relu":
            found = found.relu() + RELU_FLOOR
            return found if hidden is None else found.masked_fill(hidden, 0), top
        found = found if hidden is None else found.masked_fill(hidden, float("-inf"))
        top = top.maximum(largest(found.detach()))
        return (found - top).exp(), top

    def sum_features(self, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Σ φ(k) (v, 1)ᵀ over each row: (batch, heads, m, head_width + 1)."""
        keys, _ = self.keys(k, real, _initial_max(k))
        return keys.transpose(-1, -2) @ _append_ones(v)

    def begin(self, batch: int, like: Tensor) -> Carry:
        dtype = torch.promote_types(like.dtype, torch.float32)
        sums = like.new_zeros(batch, self.heads, len(self.bits), self.head_width + 1, dtype=dtype)
        return sums, _initial_max(sums)


class PerformerModule(_Features):
    unpacks = True

    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__(config, common)
        self.sees = config.sees
        self.qkv = common.linear.build(common.width, [self.inner] * 3, config.bias)

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        return self.redraw is None

    def prepare(self, context: Context, rows: int) -> None:
        unpack_rows(context, restarts=True)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        self.count_pass(context)
        if isinstance(state, Recurrent):
            y = state.advance(self.run, x, context)
        else:
            unpacked = unpack_rows(context, restarts=True)
            rows = unpacked.gather(x)
            y, _ = self.run(rows, (), unpacked.real, unpacked.starts)
            y = unpacked.scatter(y, x)
        return self.out(y)

    def run(self, x: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        """Attention of each token (batch, time, inner), and the carry after it if it is causal; none after packed
        rows. An empty carry: the text begins here, and nothing follows."""
        dtype = self.product_dtype(x)
        q, k, v = self.project(x)
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        with without_autocast(x):
            if self.sees == "past" and not carry and self.fits_kernel(v, dtype):
                y = self.attend_fused(q, k, v, real, dtype or v.dtype, starts)
            elif starts is not None:
                y = self.attend_packed(q, k, v, starts, self.begin(len(x), x)[0], dtype)
            elif self.sees == "around":
                y = _normalise(self.queries(q) @ self.sum_features(k, v, real))
            else:
                y, carry = self.attend_causal(q, k, v, real, carry or self.begin(len(x), x), dtype)
        return self.merge_heads(observe(self, "heads", y.to(v.dtype))), carry

    def product_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype of products of features: half precision on a GPU that trains in it; None: that of the features.
        Exponents are always in single precision."""
        return torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else None

    def fits_kernel(self, v: Tensor, dtype: torch.dtype | None) -> bool:
        """Whether the GPU kernel computes it: fp16 cannot hold the gradients of weights before their division."""
        return usable(v) and dtype is not torch.float16 and v.dtype is not torch.float16 and self.head_width <= WIDEST

    def attend_fused(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, dtype: torch.dtype, starts: Tensor | None
    ) -> Tensor:
        from allyouneed.kernels.triton.training.performer import performer

        how = (self.head_width**-0.25, self.kernel == "relu", RELU_FLOOR, MIN_WEIGHT, dtype)
        return performer(q, k, v, self.features, real, *how, starts)

    def attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, carry: Carry, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Carry]:
        """Causal attention of each token, continuing from the carry."""
        sums, old = carry
        keys, top = self.keys(k, real, old)
        found, sums = prefix_sums(self.queries(q), keys, _append_ones(v), sums * (old - top).exp(), dtype)
        return _normalise(found), (sums, top)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, zeros: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        """Attention of each token within its sentence. Bidirectional: sums from both ends, the token itself once."""
        keys, _ = self.keys(k, None, _initial_max(k), starts)
        given = self.queries(q), keys, _append_ones(v)
        if self.sees == "past":
            return _normalise(prefix_sums(*given, zeros, dtype, starts)[0])
        until, _ = prefix_sums(*given, zeros, None, starts)
        q, k, v = (x.flip(2) for x in given)
        after, _ = prefix_sums(q, k, v, zeros, None, flip_starts(starts), inclusive=False)
        return _normalise(until + after.flip(2))

    def fold(self, carry: Carry, inputs: Tensor, real: Tensor | None) -> Carry:
        _, k, v = self.project(inputs)
        sums, old = carry
        keys, top = self.keys(k, real, old)
        return sums * (old - top).exp() + keys.transpose(-1, -2) @ _append_ones(v), top

    def step(self, x: Tensor, carry: Carry, recent: Recent, positions: Tensor) -> Tensor:
        """`run` over one token (batch, 1, width) at these positions (batch,); all states change in place. The sums of
        values are deferred; the last column, of weights, is up to date."""
        q, k, v = self.project(x)
        (sums, old), found = carry, self.queries(q)
        keys, top = self.keys(k, None, old)
        weights = sums[..., -1:]  # (batch, heads, m, 1)
        weights.copy_(weights * (old - top).exp() + keys.mT)
        found = found / (found @ weights).clamp(min=MIN_WEIGHT)
        q, k, v = found[:, :, 0], keys[:, :, 0], v[:, :, 0]
        y = deferred_step(q, k, v, (old - top)[:, :, 0, 0], sums[..., :-1], recent, positions)
        old.copy_(top)
        return self.merge_heads(y[:, :, None].to(v.dtype))

    def begin_recent(self, carry: Carry) -> Recent:
        return begin_recent(carry[0][..., :-1], self.heads)

    def new_state(self) -> State:
        if self.sees == "around":
            raise ValueError("a performer that sees later tokens cannot decode; set sees: past")
        return Recurrent(self.begin, self.fold)


class PerformerCross(_Features):
    def __init__(self, config: Performer, common: Common) -> None:
        super().__init__(config, common)
        self.q = common.linear.build(common.width, self.inner, config.bias)
        self.kv = common.linear.build(common.width, [self.inner] * 2, config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "cross-attention needs encoder memory"
        self.count_pass(context)
        here, there = context.queries, memory.layout
        if here.packed != there.packed:
            raise ValueError("one side is packed (segments), the other is not; pack both or neither")
        if here.packed:
            unpacked, theirs, match, known = context.memoize(
                PerformerCross, "sources", lambda: _match_sources(unpack_rows(context), here, there)
            )
            each = self.source(theirs.gather(memory.hidden), theirs.real)
            y = self.attend(unpacked.gather(x), each.index_select(0, match) * known[:, None, None, None])
            return self.project_out(unpacked.scatter(y, x))
        if isinstance(state, SourceFeatureSums) and state.sums is not None:
            sums = state.sums
        else:
            sums = self.source(memory.hidden, there.real)
            if isinstance(state, SourceFeatureSums):
                state.sums = sums
        # beams of one source become its queries, so its sums are not copied
        beams = x.unflatten(0, (len(sums), -1)).flatten(1, 2)  # (sources, beams * time, width)
        return self.project_out(self.attend(beams, sums).unflatten(1, (-1, x.shape[1])).flatten(0, 1))

    def source(self, hidden: Tensor, real: Tensor | None) -> Tensor:
        k, v = map(self.split, self.kv(hidden).chunk(2, -1))
        k, v = observe(self, "k", k), observe(self, "v", v)
        with without_autocast(hidden):
            return self.sum_features(k, v, real)

    def attend(self, x: Tensor, sums: Tensor) -> Tensor:
        q = observe(self, "q", self.split(self.q(x)))
        with without_autocast(x):
            return self.merge_heads(observe(self, "heads", _normalise(self.queries(q) @ sums).to(q.dtype)))

    def project_out(self, y: Tensor) -> Tensor:
        return self.out(y)

    def new_state(self) -> State:
        return SourceFeatureSums()


class SourceFeatureSums(State):
    """Feature sums of a source, (sources, heads, m, head_width + 1): computed once, shared by all beams."""

    shared = True

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        self.sums = None if self.sums is None else self.sums.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # the source is constant

    @property
    def bytes(self) -> int:
        return 0 if self.sums is None else self.sums.numel() * self.sums.itemsize


def _match_sources(
    unpacked: UnpackedRows, here: TokenLayout, there: TokenLayout
) -> tuple[UnpackedRows, UnpackedRows, Tensor, Tensor]:
    """Unpacked rows of both sides; for each target sentence the index of its source, and whether it exists."""
    assert here.segments is not None and there.segments is not None
    most = torch.maximum(here.segments.max(), there.segments.max()) + 1
    numbers = []
    for segments in (here.segments, there.segments):
        rows = torch.arange(len(segments), device=segments.device)[:, None] * most
        numbers.append((rows + segments)[segments > 0].unique())  # in the order of UnpackedRows
    targets, sources = numbers
    match = torch.searchsorted(sources, targets).clamp(max=len(sources) - 1)
    return unpacked, UnpackedRows.of(there), match, sources[match] == targets


def _to_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _append_ones(v: Tensor) -> Tensor:
    """Values with an extra column of ones, which sums up to the weights."""
    v = _to_fp32(v)
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


def _initial_max(like: Tensor) -> Tensor:
    """Initial maximum exponent (batch, heads, 1, 1): finite, so that differences are defined."""
    like = _to_fp32(like)
    return torch.full_like(like[:, :, :1, :1], torch.finfo(like.dtype).min)


def _normalise(found: Tensor) -> Tensor:
    """Divide by the sum of weights in the last column; zeros for a query without keys."""
    values, weight = found[..., :-1], found[..., -1:]
    return values / weight.clamp(min=MIN_WEIGHT)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Torch has no autocast for the meta device, on which a model is described."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
