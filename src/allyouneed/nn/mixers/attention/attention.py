"""Multi-head attention ("Attention Is All You Need", 3.2), over the own tokens or over an encoder's.

What can be exchanged in it: how many heads queries share keys and values with (MQA, GQA), who sees whom (pattern), how
a query scores a key (scores), what a score knows of distances (positions).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, WrapValidator
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.scores import ScaledDot, Scores, ScoresModule
from allyouneed.nn.norms import Norm
from allyouneed.nn.ops.attention.dense import Plan, ScoreMod, attention_weights, dense_mask
from allyouneed.nn.ops.attention.select import plan
from allyouneed.nn.patterns.core import Causal, Full, Pattern
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative, RelativeModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache, KVState
from allyouneed.nn.states.window import WindowKVCache, window_slots
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Biases(Config):
    """A bias for each projection, or not."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True


def _all_or_each(value: Any, _: Any) -> bool | Biases:
    return value if isinstance(value, bool) else Biases.model_validate(value)


class Attention(Mixer):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, head_i = softmax(Q_i K_i^T / √head_width) V_i (eq. 1).

    `kv_heads: 1` is multi-query attention (Shazeer 2019, 3), a number between 1 and heads grouped-query attention
    (Ainslie et al. 2023, 2.2). `qk_norm` normalises queries and keys head by head (Henry et al. 2020; Dehghani et al.
    2023, 2). `soft_cap` c turns a score s into c·tanh(s/c) (Gemma 2, 2). `sub_norm` normalises what all heads have seen
    before W^O (Wang et al. 2022, "Foundation Transformers", 2.1: Sub-LN).

    `cache`: decoding remembers keys and values, or the hidden states they are made of, which Transformer-XL projects
    anew in each segment, so that its gradients reach the projections of what it remembers (Dai et al. 2019, 3.2).
    """

    crosses: ClassVar[bool] = True

    kind: Literal["attention"] = "attention"
    heads: Size
    kv_heads: Size | None = None  # as many as heads when not given
    head_width: Size | None = None  # width / heads when not given
    pattern: Pattern = Full()
    positions: Relative = NoRelative()
    scores: Scores = ScaledDot()
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    qk_norm: Norm | None = None
    sub_norm: Norm | None = None
    bias: Annotated[bool | Biases, WrapValidator(_all_or_each)] = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the weights; the paper has none
    cache: Literal["keys", "hidden"] = "keys"

    @property
    def causal(self) -> bool:
        return self.pattern.decodes

    def leak(self) -> str | None:
        return self.pattern.leak()

    @property
    def biases(self) -> Biases:
        on = self.bias
        return on if isinstance(on, Biases) else Biases(q=on, k=on, v=on, out=on)

    def sizes(self, common: Common) -> Heads:
        width = self.head_width or max(1, common.width // self.heads)
        return Heads(self.heads, self.kv_heads or self.heads, width, self.pattern.causal)

    def build(self, common: Common) -> SubLayer:
        return SelfAttention(self, common)

    def build_cross(self, common: Common) -> SubLayer:
        if common.shares_keys:
            from allyouneed.nn.mixers.attention.shared_kv import (
                SharedAttention,  # which is made of what is in this file
            )

            return SharedAttention(self, common)
        return CrossAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, bias, linear = self.sizes(common), self.biases, common.linear
        inner, narrow = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        total = linear.cost(common.width, inner, bias.q) + linear.cost(inner, common.width, bias.out)
        seen = self.pattern.mean_keys(length)
        total += self.scores.cost(sizes, common, seen) + self.positions.cost(sizes, common, seen)
        if self.qk_norm is not None:
            total += self.qk_norm.cost(sizes.head_width) * 2
        if self.sub_norm is not None:
            total += self.sub_norm.cost(inner)
        total += Cost(flops=2 * inner * seen)  # the weighted sum
        keys = linear.cost(common.width, narrow, bias.k) + linear.cost(common.width, narrow, bias.v)
        if cross and common.shares_keys:  # they are the model's, and so is the norm of the keys
            return total if self.qk_norm is None else total + Cost(-self.qk_norm.cost(sizes.head_width).parameters)
        if cross:  # keys and values are made once per source token, not once per target token
            return total + Cost(keys.parameters, state_constant=2 * narrow * length)
        return total + keys + cache_cost(self.pattern, self._remembered(common, sizes), length)

    def _remembered(self, common: Common, sizes: Heads) -> int:
        """Elements of each token that decoding keeps."""
        if self.cache == "hidden":
            return common.width
        return sizes.kv_heads * (2 * sizes.head_width + self.positions.features)

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        return self.positions.shared(self.sizes(common), common)

    def source_flops(self, common: Common) -> float:
        sizes = self.sizes(common)
        narrow = sizes.kv_heads * sizes.head_width
        return 2 * common.linear.cost(common.width, narrow, False).flops

    def problems(self, common: Common) -> list[tuple[str, str]]:
        sizes = self.sizes(common)
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if sizes.heads % sizes.kv_heads:
            text = f"{sizes.heads} heads cannot share {sizes.kv_heads} key-value heads evenly; make it a divisor"
            found.append(("kv_heads", text))
        if self.positions.bilinear and not self.scores.bilinear:
            text = "these change what q·k is, and such scores have no q·k; alibi and buckets go with any scores"
            found.append(("positions", text))
        if self.qk_norm is not None and not self.qk_norm.tokenwise:
            found.append(("qk_norm", "queries and keys are normalised head by head, token by token; this norm is not"))
        if self.sub_norm is not None and not self.sub_norm.tokenwise:
            found.append(("sub_norm", "what is seen is normalised token by token; this norm is not"))
        found += [(f"positions.{key}", text) for key, text in self.positions.problems(sizes, common)]
        found += [(f"scores.{key}", text) for key, text in self.scores.problems(sizes, common)]
        return found

    def cross_problems(self, common: Common) -> list[tuple[str, str]]:
        if not self.positions.crosses and not common.shares_keys:
            return [("positions", "between two sentences there are no distances; leave positions out of a cross")]
        return []


def cache_cost(pattern: Pattern, each: int, length: int) -> Cost:
    """Of remembering so many elements of each token this pattern may still look at; a ring grows until it turns."""
    kept = pattern.kv_window
    if kept is None or length < window_slots(kept):
        return Cost(state_per_token=each)
    return Cost(state_constant=each * window_slots(kept))


class SoftmaxAttention(SubLayer):
    """What every softmax attention does once queries, keys and values are there; weights on request."""

    def __init__(
        self, pattern: Pattern, scores: ScoresModule, relative: RelativeModule, own_score: bool, dropout: float
    ) -> None:
        super().__init__()
        self.pattern, self.scores, self.relative, self.dropout = pattern, scores, relative, dropout
        self.own_score = own_score  # scores that are no q·k
        self.soft_cap: float | None = None
        self.words = str(pattern)  # a pattern itself cannot be looked up inside a compiled block

    def score_mod(self) -> ScoreMod:
        relative = self.relative
        return ScoreMod(
            scale=self.scores.scale * relative.sharpness,
            score=self.scores.score if self.own_score else None,
            bias=relative.bias if relative.adds_bias else None,
            cap=self.soft_cap,
            values=relative.values if relative.adds_values else None,
            static=relative.static,
        )

    def look(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        """(batch, heads, queries, width of v)"""
        queries, score_mod = context.queries, self.score_mod()
        if (
            context.replay is not None
        ):  # what is computed once more cannot share a bias, with its gradients, with others
            score_mod = replace(score_mod, static=None)
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            mask = dense_mask(self.pattern, queries, keys)
            weights = attention_weights(q, k, mask, queries.positions, keys.positions, score_mod)
            wanted.found.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])
        execute = self.planned(context, keys, q.shape[0], score_mod)
        return execute(q, k, v, self.dropout if self.training else 0.0, score_mod)

    def planned(self, context: Context, keys: TokenLayout, rows: int, score_mod: ScoreMod) -> Plan:
        source = None if context.memory is None else context.memory.layout
        whose = "own" if keys is context.queries else "source" if keys is source else id(keys)
        key = (self.words, whose, rows, score_mod.plain)
        return context.plan(key, lambda: plan(self.pattern, context.queries, keys, score_mod))

    def new_state(self) -> State | None:
        if (why := self.pattern.leak()) is not None:
            raise ValueError(f"attention with pattern '{self.pattern}' cannot decode: {why}")
        return self.new_memory()

    def new_memory(self) -> State | None:
        kept = self.pattern.kv_window
        return KVCache() if kept is None else WindowKVCache(kept)


class _Heads(SoftmaxAttention):
    """What self- and cross-attention share: heads apart, heads together."""

    def __init__(self, config: Attention, common: Common) -> None:
        sizes = config.sizes(common)
        scores, relative = config.scores.build(sizes, common), config.positions.build(sizes, common)
        super().__init__(config.pattern, scores, relative, not config.scores.bilinear, config.dropout)
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.inner, self.narrow = sizes.inner, sizes.kv_heads * sizes.head_width
        self.soft_cap = config.soft_cap
        norm = config.qk_norm
        self.q_norm = None if norm is None else norm.build(sizes.head_width)
        self.k_norm = None if norm is None else norm.build(sizes.head_width)
        self.sub_norm = None if config.sub_norm is None else config.sub_norm.build(self.inner)
        self.out = common.linear.build(self.inner, common.width, config.biases.out)

    @property
    def traces(self) -> bool:  # type: ignore[override]  # said by each, not by the class
        return self.score_mod().plain

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, time, head_width)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        return self.outward(self.look(q, k, v, context, keys), context)

    def outward(self, seen: Tensor, context: Context) -> Tensor:
        seen = seen.transpose(1, 2).flatten(2)  # (batch, time, inner)
        return self.project_out(seen if self.sub_norm is None else self.sub_norm(seen, context))

    def project_out(self, mixed: Tensor) -> Tensor:
        out: Tensor = self.out(mixed)
        return out


class SelfAttention(_Heads):
    """Queries, keys and values by one product (`qkv`), or by three where they differ in having a bias."""

    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        bias, build = config.biases, common.linear.build
        self.keeps_hidden = config.cache == "hidden"
        self.qkv: nn.Module | None = None
        if bias.q == bias.k == bias.v:
            self.qkv = build(common.width, (self.inner, self.narrow, self.narrow), bias.q)
        else:
            self.q = build(common.width, self.inner, bias.q)
            self.k = build(common.width, self.narrow, bias.k)
            self.v = build(common.width, self.narrow, bias.v)

    def prepare(self, context: Context, rows: int) -> None:
        self.relative.prepare(context)
        self.planned(context, context.queries, rows, self.score_mod())

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of these tokens, head by head, ready to meet."""
        q, k, v = self.split_qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, context), self.k_norm(k, context)
        return self.relative.turn(self.scores.prepare(q), k, v, context)

    def split_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (batch, heads, time, head_width)."""
        if self.qkv is None:
            return tuple(map(self.split, (self.q(x), self.k(x), self.v(x))))
        return tuple(map(self.split, self.qkv(x).split([self.inner, self.narrow, self.narrow], -1)))

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = self.project(x, context)
        keys = context.queries
        self.scores.check(keys)
        if state is not None:
            assert isinstance(state, KVState)
            kept = context.kept
            count = kept.queries.time
            if self.keeps_hidden:
                k, v, keys = self.recalled(x[:, :count], kept, state)
            elif (
                self.sees_all(context)
                and (seen := state.attend_new_token(q, k, v, context, self.score_mod().scale)) is not None
            ):
                return self.outward(seen, context)
            else:
                k, v, keys = state.append(k[:, :, :count], v[:, :, :count], kept)
        return self.mixed(q, k, v, context, keys)

    def sees_all(self, context: Context) -> bool:
        """Whether a new token looks at all there is by plain scores, and nobody watches."""
        return (
            isinstance(self.pattern, Causal)
            and self.score_mod().plain
            and context.record is None
            and context.said is None
        )

    def recalled(self, x: Tensor, context: Context, state: KVState) -> tuple[Tensor, Tensor, TokenLayout]:
        """Keys and values of everything that may be seen, made of the hidden states that are remembered. To the cache
        these are keys of one head, whose values have no features."""
        hidden, _, keys = state.append(x[:, None], x[:, None, :, :0], context)
        there = context.plan(("recalled", id(keys)), lambda: Context(keys))
        _, k, v = self.project(hidden[:, 0], there)
        return k, v, keys


class CrossAttention(_Heads):
    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        bias, build = config.biases, common.linear.build
        self.q = build(common.width, self.inner, bias.q)
        self.kv: nn.Module | None = None
        if bias.k == bias.v:
            self.kv = build(common.width, (self.narrow, self.narrow), bias.k)
        else:
            self.k = build(common.width, self.narrow, bias.k)
            self.v = build(common.width, self.narrow, bias.v)

    def prepare(self, context: Context, rows: int) -> None:
        assert context.memory is not None, "cross-attention needs an encoder's memory"
        self.planned(context, context.memory.layout, rows, self.score_mod())

    def source(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        both = self.kv(hidden).chunk(2, -1) if self.kv is not None else (self.k(hidden), self.v(hidden))
        k, v = map(self.split, both)
        return (k if self.k_norm is None else self.k_norm(k, context)), v

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "cross-attention needs an encoder's memory"
        self.scores.check(memory.layout)
        if isinstance(state, CrossKVCache) and state.keys is not None and state.values is not None:
            k, v = state.keys, state.values
        else:
            k, v = self.source(memory.hidden, context)
            if isinstance(state, CrossKVCache):
                state.keys, state.values, state.end = k, v, k.shape[2]
        q = self.split(self.q(x))
        q = self.scores.prepare(q if self.q_norm is None else self.q_norm(q, context))
        beams = q.shape[0] // k.shape[0]
        if beams == 1:
            return self.mixed(q, k, v, context, memory.layout)
        if not isinstance(self.pattern, Full) or not self.score_mod().plain:
            # who sees what depends on the beam's own position
            copies = torch.arange(len(k), device=k.device).repeat_interleave(beams)
            layout = context.plan(("beams", beams), lambda: memory.layout.select(copies))
            return self.mixed(q, k.index_select(0, copies), v.index_select(0, copies), context, layout)
        # beams of one sentence stand side by side as its queries, so its keys need no copies
        rows, heads, time, head_width = q.shape
        q = q.view(-1, beams, heads, time, head_width).transpose(1, 2).flatten(2, 3)
        seen = self.mixed(q, k, v, context, memory.layout)  # (sources, beams * time, width)
        return seen.view(rows, time, -1)

    def new_state(self) -> State:
        return CrossKVCache()

    def new_memory(self) -> State:
        return CrossKVCache()
