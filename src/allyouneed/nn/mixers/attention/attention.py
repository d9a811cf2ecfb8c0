"""Multi-head attention ("Attention Is All You Need", 3.2): self-attention and cross-attention.

Exchangeable inside it: the number of key-value heads (MQA, GQA), the pattern, the score function and the relative
positions.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field, WrapValidator
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.long_memory import LongMemory
from allyouneed.nn.mixers.attention.scores import ScaledDot, Scores, ScoresModule
from allyouneed.nn.norms import Norm
from allyouneed.nn.observe import is_observed, observe
from allyouneed.nn.ops.attention.dense import (
    AttentionFn,
    DenseAttention,
    ScoreMod,
    attention_weights,
    dense_mask,
    masked_scores,
    offer_weights,
    weighted_sum,
)
from allyouneed.nn.ops.attention.select import select_attention
from allyouneed.nn.patterns.core import Causal, Full, KVWindow, Pattern
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative, RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache, KVState
from allyouneed.nn.states.window import WindowKVCache, window_slots
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Biases(Config):
    """Which projections have a bias."""

    q: bool = True
    """The projection of queries has a bias."""
    k: bool = True
    """The projection of keys has a bias."""
    v: bool = True
    """The projection of values has a bias."""
    out: bool = True
    """The output projection has a bias."""


def _all_or_each(value: Any, _: Any) -> bool | Biases:
    return value if isinstance(value, bool) else Biases.model_validate(value)


class Attention(AttendsByPattern, Mixer):
    """MultiHead = Concat(head_1, …, head_h) W^O (3.2.2), head_i = softmax(Q_i K_i^T / √head_width) V_i (eq. 1).

    `kv_heads: 1` is multi-query attention (Shazeer 2019, 3); a value between 1 and heads is grouped-query attention
    (Ainslie et al. 2023, 2.2). `qk_norm` normalises queries and keys per head (Henry et al. 2020; Dehghani et al. 2023,
    2). `soft_cap` c maps a score s to c·tanh(s/c) (Gemma 2, 2). `sub_norm` normalises the concatenated heads before W^O
    (Wang et al. 2022, "Foundation Transformers", 2.1: Sub-LN).

    `cache` selects what decoding caches: keys and values, or the hidden states, which are projected again in every
    segment so that gradients reach the projections (Transformer-XL: Dai et al. 2019, 3.2).
    """

    supports_cross: ClassVar[bool] = True

    kind: Literal["attention"] = "attention"
    heads: Size
    """Number of attention heads."""
    kv_heads: Size | None = None
    """Number of key and value heads: 1 is multi-query, a divisor of `heads` grouped-query attention; default:
    `heads`."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    pattern: Pattern = Full()
    """Which keys each query may attend to, as text: `causal & window(256)`."""
    positions: Relative = NoRelative()
    """Relative positions inside attention: rotary, biases, …"""
    scores: Scores = ScaledDot()
    """Score function of queries and keys."""
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    """Map a score s to c·tanh(s / c) (Gemma 2, 2); default: no cap."""
    qk_norm: Norm | None = None
    """Norm of queries and keys, per head (Henry et al. 2020); default: none."""
    sub_norm: Norm | None = None
    """Norm of the concatenated heads before the output projection (Sub-LN); default: none."""
    bias: Annotated[bool | Biases, WrapValidator(_all_or_each)] = True
    """Whether the projections have a bias: all, or `{q: …, k: …, v: …, out: …}`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights; none in the paper."""
    cache: Literal["keys", "hidden"] = "keys"
    """What decoding caches: keys and values, or hidden states, projected again in every segment (Transformer-XL)."""

    @property
    def biases(self) -> Biases:
        on = self.bias
        return on if isinstance(on, Biases) else Biases(q=on, k=on, v=on, out=on)

    def sizes(self, common: Common) -> Heads:
        width = self.head_width or max(1, common.width // self.heads)
        return Heads(self.heads, self.kv_heads or self.heads, width, self.pattern.causal)

    @property
    def longest(self) -> int | None:
        return self.scores.longest

    def build(self, common: Common) -> SubLayer:
        return SelfAttention(self, common)

    def build_cross(self, common: Common) -> SubLayer:
        if common.shares_keys:
            from allyouneed.nn.mixers.attention.shared_kv import (
                SharedAttention,  # a circular import at module level
            )

            return SharedAttention(self, common)
        return CrossAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, bias, linear = self.sizes(common), self.biases, common.linear
        inner, kv_width = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        total = linear.cost(common.width, inner, bias.q) + linear.cost(inner, common.width, bias.out)
        seen = self.pattern.mean_keys(length)
        total += self.scores.cost(sizes, common, seen) + self.positions.cost(sizes, common, seen)
        if self.qk_norm is not None:
            total += self.qk_norm.cost(sizes.head_width) * 2
        if self.sub_norm is not None:
            total += self.sub_norm.cost(inner)
        total += Cost(flops=2 * inner * seen)  # the weighted sum
        keys = linear.cost(common.width, kv_width, bias.k) + linear.cost(common.width, kv_width, bias.v)
        if cross and common.shares_keys:  # keys, values and the norm of the keys belong to the model
            return total if self.qk_norm is None else total + Cost(-self.qk_norm.cost(sizes.head_width).parameters)
        if cross:  # projected once per source token, not per target token
            return total + Cost(keys.parameters, state_constant=2 * kv_width * length)
        return total + keys + cache_cost(self.pattern, self._cached_width(common, sizes), length, self.positions.reach)

    def _cached_width(self, common: Common, sizes: Heads) -> int:
        """Cached elements per token."""
        if self.cache == "hidden":
            return common.width
        return sizes.kv_heads * (2 * sizes.head_width + self.positions.features)

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        return self.positions.shared(self.sizes(common), common)

    def source_flops(self, common: Common) -> float:
        sizes = self.sizes(common)
        kv_width = sizes.kv_heads * sizes.head_width
        return 2 * common.linear.cost(common.width, kv_width, False).flops

    def problems(self, common: Common) -> list[tuple[str, str]]:
        sizes = self.sizes(common)
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if sizes.heads % sizes.kv_heads:
            text = f"{sizes.heads} heads not divisible by {sizes.kv_heads} kv_heads; set a divisor"
            found.append(("kv_heads", text))
        if self.positions.bilinear and not self.scores.bilinear:
            text = "these positions modify q·k, which these scores do not compute; use alibi or buckets"
            found.append(("positions", text))
        if self.qk_norm is not None and not self.qk_norm.tokenwise:
            found.append(("qk_norm", "needs a norm over one token's features; this norm uses other tokens"))
        if self.sub_norm is not None and not self.sub_norm.tokenwise:
            found.append(("sub_norm", "needs a norm over one token's features; this norm uses other tokens"))
        found += [(f"positions.{key}", text) for key, text in self.positions.problems(sizes, common)]
        found += [(f"scores.{key}", text) for key, text in self.scores.problems(sizes, common)]
        return found

    def cross_problems(self, common: Common) -> list[tuple[str, str]]:
        if not self.positions.supports_cross and not common.shares_keys:
            return [("positions", "distances between source and target are undefined; remove positions from a cross")]
        return []


def cache_cost(pattern: Pattern, per_token: int, length: int, reach: int | None = None) -> Cost:
    """KV cache of `per_token` elements for each key the pattern can reach; a ring buffer grows to its fixed size."""
    kept = kv_window(pattern, reach)
    if kept is None:
        return Cost(state_per_token=per_token)
    slots = min(length, window_slots(kept))
    trim = per_token * max(0, slots - kept.first - max(1, kept.recent))
    if slots == length and length < window_slots(kept):
        return Cost(state_per_token=per_token, trim=trim)
    return Cost(state_constant=per_token * slots, trim=trim)


def kv_window(pattern: Pattern, reach: int | None) -> KVWindow | None:
    """Keys that decoding must cache: those the pattern allows, at distances below `reach`."""
    kept = pattern.kv_window
    if reach is None:
        return kept
    return KVWindow(0, reach) if kept is None else KVWindow(kept.first, min(reach, kept.recent))


class SoftmaxAttention(SubLayer):
    """Softmax attention over given queries, keys and values; records the weights on request."""

    def __init__(
        self, pattern: Pattern, scores: ScoresModule, relative: RelativeModule, own_score: bool, dropout: float
    ) -> None:
        super().__init__()
        self.pattern, self.scores, self.relative, self.dropout = pattern, scores, relative, dropout
        self.own_score = own_score  # scores other than q·k
        self.soft_cap: float | None = None
        self.pattern_text = str(pattern)  # a string key: torch.compile cannot hash a Pattern
        self.leak = pattern.leak()

    def score_mod(self) -> ScoreMod:
        relative, score = self.relative, self.scores.score if self.own_score else None
        return ScoreMod(
            scale=self.scores.scale * relative.score_scale,
            score=self.score_with_key_bias if relative.adds_key_bias else score,
            bias=relative.bias if relative.adds_bias else None,
            cap=self.soft_cap,
            values=relative.values if relative.adds_values else None,
            static=relative.static,
            pair_bias=relative.pair_bias if relative.adds_bias else None,
            distance_bias=relative.distance_bias if relative.bias_by_distance else None,
            constant_from=relative.constant_from,
            by_query=relative.query_bias if self.is_by_query else None,
        )

    @property
    def is_by_query(self) -> bool:
        """Whether kernels may add all that depends on positions by query and distance."""
        plain = not self.own_score and self.soft_cap is None
        return self.relative.bias_by_query and plain and not self.relative.adds_key_bias

    def score_with_key_bias(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """q·k and what the relative positions add to it from the keys, scaled: (batch, heads, queries, keys)."""
        scale = self.scores.scale * self.relative.score_scale
        return (q @ k.transpose(-1, -2)) * scale + self.relative.key_bias(k, queries, keys, scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        """(batch, heads, queries, width of v)"""
        if observed := is_observed():
            q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        score_mod = self.score_mod()
        if context.replay is not None:  # a recomputed layer cannot share a bias: its gradient would be shared too
            score_mod = replace(score_mod, static=None)
        if context.record is not None or observed:
            weights = self.show_weights(q, k, context, keys, score_mod)
            if weights is not None:
                seen = weighted_sum(weights, v, context.queries.positions, keys.positions, score_mod)
                return cast(Tensor, observe(self, "heads", seen))
        execute = self.attention_fn(context, keys, q.shape[0], score_mod)
        return cast(Tensor, observe(self, "heads", execute(q, k, v, self.dropout if self.training else 0.0, score_mod)))

    def show_weights(
        self, q: Tensor, k: Tensor, context: Context, keys: TokenLayout, score_mod: ScoreMod
    ) -> Tensor | None:
        """Record the weights if they are wanted and offer them to a probe; the weights to use, if it changed them."""
        queries = context.queries

        def mask() -> Tensor:
            return self.dense_scores(queries, keys, score_mod)[0]

        def scores() -> Tensor:
            seen, mod = self.dense_scores(queries, keys, score_mod)
            return masked_scores(q, k, seen, queries.positions, keys.positions, mod)

        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            seen, mod = self.dense_scores(queries, keys, score_mod)
            weights = attention_weights(q, k, seen, queries.positions, keys.positions, mod)
            wanted.weights.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])
        return offer_weights(self, scores, mask)

    def dense_scores(self, queries: TokenLayout, keys: TokenLayout, score_mod: ScoreMod) -> tuple[Tensor, ScoreMod]:
        """The mask and the scores of the definition."""
        return dense_mask(self.pattern, queries, keys), score_mod

    def attention_fn(self, context: Context, keys: TokenLayout, rows: int, score_mod: ScoreMod) -> AttentionFn:
        source = None if context.memory is None else context.memory.layout
        key_side = "own" if keys is context.queries else "source" if keys is source else keys
        mod = score_mod
        biases = mod.pair_bias is None, mod.distance_bias is None, mod.by_query is None, mod.constant_from
        key = (self.pattern_text, key_side, rows, mod.plain, *biases)
        return context.memoize(
            SoftmaxAttention, key, lambda: select_attention(self.pattern, context.queries, keys, mod, context.static)
        )

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        """Its bias, if it has one, is computed ahead or inside the kernel."""
        mod = self.score_mod()
        ahead = mod.fused and mod.static is not None and self.relative.traceable
        return mod.plain or ahead or self.is_by_query

    def prepare_attention(self, context: Context, keys: TokenLayout, rows: int) -> None:
        """Select the kernel and compute what all layers share: positions and biases."""
        self.relative.prepare(context)
        mod = self.score_mod()
        execute = self.attention_fn(context, keys, rows, mod)
        if isinstance(execute, DenseAttention) and self.traceable:
            like = next(self.parameters())
            kind = like.device.type
            execute.prepare(like.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else like, mod)

    def new_state(self) -> State | None:
        if self.leak is not None:
            raise ValueError(f"attention with pattern '{self.pattern}' cannot decode: {self.leak}")
        return self.new_segment_state()

    def new_segment_state(self) -> State | None:
        kept = kv_window(self.pattern, self.relative.visible())
        return KVCache() if kept is None else WindowKVCache(kept)


class MultiHeadAttention(SoftmaxAttention):
    """Heads, norms and output projection shared by self- and cross-attention."""

    def __init__(self, config: Attention, common: Common) -> None:
        sizes = config.sizes(common)
        scores, relative = config.scores.build(sizes, common), config.positions.build(sizes, common)
        super().__init__(config.pattern, scores, relative, not config.scores.bilinear, config.dropout)
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.inner, self.kv_width = sizes.inner, sizes.kv_heads * sizes.head_width
        self.soft_cap = config.soft_cap
        norm = config.qk_norm
        self.q_norm = None if norm is None else norm.build(sizes.head_width)
        self.k_norm = None if norm is None else norm.build(sizes.head_width)
        self.sub_norm = None if config.sub_norm is None else config.sub_norm.build(self.inner)
        self.out = common.linear.build(self.inner, common.width, config.biases.out)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, time, head_width)

    def merge_heads(self, seen: Tensor, context: Context) -> Tensor:
        seen = seen.transpose(1, 2).flatten(2)  # (batch, time, inner)
        return self.project_out(seen if self.sub_norm is None else self.sub_norm(seen, context))

    def project_out(self, mixed: Tensor) -> Tensor:
        return self.out(mixed)


class SelfAttention(MultiHeadAttention):
    """Projects q, k and v in one matmul (`qkv`), or in three when only some of them have a bias."""

    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        bias, build = config.biases, common.linear.build
        self.caches_hidden = config.cache == "hidden"
        self.qkv: nn.Module | None = None
        if bias.q == bias.k == bias.v:
            self.qkv = build(common.width, (self.inner, self.kv_width, self.kv_width), bias.q)
        else:
            self.q = build(common.width, self.inner, bias.q)
            self.k = build(common.width, self.kv_width, bias.k)
            self.v = build(common.width, self.kv_width, bias.v)

    def prepare(self, context: Context, rows: int) -> None:
        self.prepare_attention(context, context.queries, rows)

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of these tokens, (batch, heads, time, head_width), with norms and positions applied."""
        q, k, v = self.split_qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, context), self.k_norm(k, context)
        return self.relative.apply_positions(self.scores.prepare(q), k, v, context)

    def split_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, heads, time, head_width)."""
        if self.qkv is None:
            return tuple(map(self.split, (self.q(x), self.k(x), self.v(x))))
        return tuple(map(self.split, self.qkv(x).split([self.inner, self.kv_width, self.kv_width], -1)))

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = self.project(x, context)
        keys = context.queries
        if not context.static:
            self.scores.check(keys)
        if state is not None:
            assert isinstance(state, KVState)
            kept = context.content_context
            count = kept.queries.time
            if self.caches_hidden:
                k, v, keys = self.project_cached_hidden(x[:, :count], kept, state)
            elif (
                count == 1
                and self.attends_to_whole_cache(context)
                and (seen := state.attend_new_token(q, k, v, context, self.score_mod().scale)) is not None
            ):
                return self.merge_heads(seen, context)
            else:
                k, v, keys = state.append(k[:, :, :count], v[:, :, :count], kept)
        return self.merge_heads(self.attend(q, k, v, context, keys), context)

    def attends_to_whole_cache(self, context: Context) -> bool:
        """Whether the newest token attends to the whole cache with plain scores and no weights are recorded."""
        return (
            isinstance(self.pattern, Causal)
            and self.score_mod().plain
            and context.record is None
            and context.content is None
        )

    def project_cached_hidden(self, x: Tensor, context: Context, state: KVState) -> tuple[Tensor, Tensor, TokenLayout]:
        """Keys and values projected from the cached hidden states, which the cache stores as keys of one head with
        empty values."""
        hidden, _, keys = state.append(x[:, None], x[:, None, :, :0], context)
        there = context.memoize(SelfAttention, ("recalled", keys), lambda: Context(keys))
        _, k, v = self.project(hidden[:, 0], there)
        return k, v, keys


class CrossAttention(MultiHeadAttention):
    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        bias, build = config.biases, common.linear.build
        self.q = build(common.width, self.inner, bias.q)
        self.kv: nn.Module | None = None
        if bias.k == bias.v:
            self.kv = build(common.width, (self.kv_width, self.kv_width), bias.k)
        else:
            self.k = build(common.width, self.kv_width, bias.k)
            self.v = build(common.width, self.kv_width, bias.v)

    def prepare(self, context: Context, rows: int) -> None:
        assert context.memory is not None, "cross-attention needs encoder memory"
        self.prepare_attention(context, context.memory.layout, rows)

    def source(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        both = self.kv(hidden).chunk(2, -1) if self.kv is not None else (self.k(hidden), self.v(hidden))
        k, v = map(self.split, both)
        return (k if self.k_norm is None else self.k_norm(k, context)), v

    def rotate(self, x: Tensor, positions: Tensor, side: int) -> Tensor:
        """Queries (side 0) or keys (1), rotated by their positions if this attention has rotary ones (RETRO)."""
        if not isinstance(self.relative, RotaryModule):
            return x
        tables = self.relative.tables(positions, torch.promote_types(x.dtype, torch.float32))
        return self.relative.rotate(x, tables[side])

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "cross-attention needs encoder memory"
        if not context.static:
            self.scores.check(memory.layout)
        if isinstance(memory, LongMemory):
            return memory.attend(self, x, context, state)
        return self.read(x, *self.cached_source(memory, context, state), memory, context)

    def cached_source(self, memory: Memory, context: Context, state: State | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, projected once."""
        if isinstance(state, CrossKVCache) and state.keys is not None and state.values is not None:
            return state.keys, state.values
        k, v = self.source(memory.hidden, context)
        k = self.rotate(k, memory.layout.positions, 1)
        if isinstance(state, CrossKVCache):
            state.keys, state.values, state.end = k, v, k.shape[2]
        return k, v

    def read(self, x: Tensor, k: Tensor, v: Tensor, memory: Memory, context: Context) -> Tensor:
        """Attend to these keys and values; rows of x may be several beams of each."""
        q = self.split(self.q(x))
        q = self.scores.prepare(q if self.q_norm is None else self.q_norm(q, context))
        q = self.rotate(q, context.queries.positions, 0)
        rows, heads, time, head_width = q.shape
        beams, layout = rows // max(1, len(k)), memory.layout
        if beams > 1 and isinstance(self.pattern, Full) and self.score_mod().plain:
            # beams of one source become its queries, so its keys are not copied
            q = q.view(-1, beams, heads, time, head_width).transpose(1, 2).flatten(2, 3)
        elif beams > 1:  # the mask depends on the position of each beam
            copies = torch.arange(len(k), device=k.device).repeat_interleave(beams)
            layout = context.memoize(CrossAttention, ("beams", beams), lambda: memory.layout.select(copies))
            k, v = k.index_select(0, copies), v.index_select(0, copies)
        seen = self.merge_heads(self.attend(q, k, v, context, layout), context)
        return seen.view(rows, time, -1) if beams > 1 else seen

    def new_state(self) -> State:
        return CrossKVCache()

    def new_segment_state(self) -> State:
        return CrossKVCache()
