"""Multi-head attention ("Attention Is All You Need", 3.2), over the own tokens or over an encoder's."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.attend import dense_mask, plan
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Facts
from allyouneed.nn.cost import Cost
from allyouneed.nn.patterns import Full, Pattern
from allyouneed.nn.state import KeyValues, SourceKeyValues, State
from allyouneed.nn.sublayer import Mixer, SubLayer


class Attention(Mixer):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, head_i = softmax(Q_i K_i^T / √head_width) V_i (eq. 1)."""

    crosses: ClassVar[bool] = True

    kind: Literal["attention"] = "attention"
    heads: Annotated[int, Field(gt=0)]
    head_width: Annotated[int, Field(gt=0)] | None = None  # width / heads when not given
    pattern: Pattern = Full()
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the weights; the paper has none

    @property
    def causal(self) -> bool:
        return self.pattern.causal

    def inner(self, common: Common) -> int:
        return self.heads * (self.head_width or common.width // self.heads)

    def build(self, common: Common) -> SubLayer:
        return SelfAttention(self, common)

    def build_cross(self, common: Common) -> SubLayer:
        return CrossAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        inner = self.inner(common)
        one = common.linear.cost(common.width, inner, self.bias)
        out = common.linear.cost(inner, common.width, self.bias)
        looking = Cost(flops=4 * inner * self.pattern.mean_keys(length))  # scores, then the weighted sum
        if cross:  # keys and values are made once per source token, not once per target token
            return one + out + looking + Cost(one.parameters * 2, state_constant=2 * inner * length)
        return one * 3 + out + looking + Cost(state_per_token=2 * inner)

    def source_flops(self, common: Common) -> float:
        return 2 * common.linear.cost(common.width, self.inner(common), self.bias).flops

    def problems(self, common: Common) -> list[tuple[str, str]]:
        if self.head_width is None and common.width % self.heads:
            return [
                ("heads", f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one")
            ]
        return []


class _Heads(SubLayer):
    """What self- and cross-attention share: heads apart, heads together, and weights on request."""

    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__()
        self.heads, self.pattern, self.dropout = config.heads, config.pattern, config.dropout
        self.out = common.linear.build(config.inner(common), common.width, config.bias)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, time, head_width)

    def look(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: Facts) -> Tensor:
        queries = context.queries
        if context.record is not None and self in context.record:
            heads = context.record[self]
            wanted = slice(None) if heads is None else torch.tensor(heads, device=q.device)
            context.record[self] = self.weights(q[:, wanted], k[:, wanted], queries, keys)
        execute = context.plan((self.pattern, id(keys), q.shape[0]), lambda: plan(self.pattern, queries, keys))
        return self.out(execute(q, k, v, self.dropout if self.training else 0.0).transpose(1, 2).flatten(2))

    def weights(self, q: Tensor, k: Tensor, queries: Facts, keys: Facts) -> Tensor:
        """softmax(QK^T / √head_width), written out: (batch, heads, queries, keys). Recomputed only for who asks."""
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        mask = dense_mask(self.pattern, queries, keys)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask


class SelfAttention(_Heads):
    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        self.qkv = common.linear.build(common.width, 3 * config.inner(common), config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        keys = context.queries
        if state is not None:
            assert isinstance(state, KeyValues)
            k, v, keys = state.append(k, v, context)
        return self.look(q, k, v, context, keys)

    def new_state(self) -> State:
        if not self.pattern.causal:
            raise ValueError(f"attention with pattern '{self.pattern}' sees later tokens: it cannot decode")
        return KeyValues()


class CrossAttention(_Heads):
    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        self.q = common.linear.build(common.width, config.inner(common), config.bias)
        self.kv = common.linear.build(common.width, 2 * config.inner(common), config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "cross-attention needs an encoder's memory"
        if isinstance(state, SourceKeyValues) and state.keys is not None and state.values is not None:
            k, v = state.keys, state.values
        else:
            k, v = (self.split(part) for part in self.kv(memory.hidden).chunk(2, -1))
            if isinstance(state, SourceKeyValues):
                state.keys, state.values, state.end = k, v, k.shape[2]
        q = self.split(self.q(x))
        beams = q.shape[0] // k.shape[0]
        if beams == 1:
            return self.look(q, k, v, context, memory.facts)
        if not isinstance(self.pattern, Full):  # who sees what depends on the beam's own position
            copies = torch.arange(len(k), device=k.device).repeat_interleave(beams)
            facts = context.plan(("beams", beams), lambda: memory.facts.select(copies))
            return self.look(q, k.index_select(0, copies), v.index_select(0, copies), context, facts)
        # beams of one sentence stand side by side as its queries, so its keys need no copies
        rows, heads, time, head_width = q.shape
        q = q.view(-1, beams, heads, time, head_width).transpose(1, 2).flatten(2, 3)
        seen = self.look(q, k, v, context, memory.facts)  # (sources, beams * time, width)
        return seen.view(rows, time, -1)

    def new_state(self) -> State:
        return SourceKeyValues()
