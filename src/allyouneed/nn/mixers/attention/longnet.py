"""LongNet's dilated attention (Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens").

A branch (w, r) cuts the sentence into segments of w and lets every r-th token of a segment attend to every r-th; head j
begins at token j mod r, so that all tokens take part in some head ("multi-head dilated attention"). Branches are joined
by α_i = s_i / Σ s_j, s_i the denominator of branch i's softmax ("dilated attention", the last equation). That is one
softmax over all branches' keys, in which a key counts as often as there are branches that see it.

The authors' code takes gradients around α; here they go through it, as the equation says. The last segment may be
shorter than w: it is not filled up with keys of nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, SelfAttention, Size
from allyouneed.nn.ops.attention.block_mask import Tiling
from allyouneed.nn.ops.attention.block_sparse import Tiled
from allyouneed.nn.ops.attention.dense import Dense, Plan, ScoreMod, attention_weights, dense_mask
from allyouneed.nn.ops.attention.select import BLOCK, WORTH_TILES, grouped
from allyouneed.nn.patterns.core import Causal, Pattern
from allyouneed.nn.patterns.sparse import Block, SegmentDilated
from allyouneed.nn.positions.relative import NoRelative, Relative
from allyouneed.nn.sublayer import Mixer, SubLayer


class LongNet(Mixer):
    """`segments` and `dilations` are w and r of the branches, as many of one as of the other.

    The paper's are 2048, 4096, 8192, 16384, 32768 and 1, 2, 4, 6, 12. Without a dilation of 1, a token that some head
    leaves out gets zeros from it. `sees: past` makes it causal; then decoding keeps no more than the longest segment.
    """

    kind: Literal["longnet"] = "longnet"
    heads: Size
    head_width: Size | None = None
    segments: Annotated[tuple[Size, ...], Field(min_length=1)]
    dilations: Annotated[tuple[Size, ...], Field(min_length=1)]
    sees: Literal["past", "around"] = "past"
    positions: Relative = NoRelative()
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "a segment's tokens see all of it: say sees: past"

    @property
    def attention(self) -> Attention:
        """The same with one undilated branch of the longest segment: all that any branch can see lies in it."""
        longest = Block(size=max(self.segments))
        pattern = Causal() & longest if self.causal else longest
        sizes = {"heads": self.heads, "head_width": self.head_width}
        return Attention(pattern=pattern, positions=self.positions, bias=self.bias, dropout=self.dropout, **sizes)

    def branches(self, head: int) -> tuple[Pattern, ...]:
        found = [
            SegmentDilated(segment=w, dilation=r, offset=head % r)
            for w, r in zip(self.segments, self.dilations, strict=True)
        ]
        return tuple(Causal() & one if self.causal else one for one in found)

    def build(self, common: Common) -> SubLayer:
        return LongNetAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        attention, sizes = self.attention, self.attention.sizes(common)
        heads = [self.branches(head) for head in range(self.heads)]
        means = {one: one.mean_keys(length) for branches in set(heads) for one in branches}
        seen = sum(means[one] for branches in heads for one in branches) / self.heads
        assumed = attention.pattern.mean_keys(length)
        return attention.cost(common, length) + Cost(flops=4 * sizes.inner * (seen - assumed))

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        return self.attention.shared(common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if len(self.segments) != len(self.dilations):
            text = f"{len(self.segments)} segments, {len(self.dilations)} dilations: a branch has one of each"
            found.append(("dilations", text))
        return found


class LongNetAttention(SelfAttention):
    def __init__(self, config: LongNet, common: Common) -> None:
        super().__init__(config.attention, common)
        by_branches: dict[tuple[Pattern, ...], list[int]] = {}
        for head in range(self.heads):
            by_branches.setdefault(config.branches(head), []).append(head)
        self.groups = list(by_branches.items())  # heads that see the same

    def look(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        queries, score_mod = context.queries, self.score_mod()
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            counts = self.counts(queries, keys)
            counting = _counting(score_mod, counts)
            weights = attention_weights(q, k, counts > 0, queries.positions, keys.positions, counting)
            wanted.found.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])
        key = (tuple(branches for branches, _ in self.groups), id(keys), q.shape[0])
        execute = context.plan(key, lambda: self.plan(queries, keys))
        return execute(q, k, v, self.dropout if self.training else 0.0, score_mod)

    def plan(self, queries: TokenLayout, keys: TokenLayout) -> Plan:
        if queries.packed and queries.device.type == "cpu":
            return grouped(self.plan, queries, keys)
        if queries.time * keys.time < WORTH_TILES:
            return self.dense(queries, keys)
        found: list[tuple[list[int], Plan]] = []
        for branches, heads in self.groups:
            parts = [Tiling(one, queries, keys, BLOCK) for one in branches]
            if sum(part.area for part in parts) > 0.6 * queries.time * keys.time:
                return self.dense(queries, keys)
            found.append((heads, Tiled(parts)))
        return ByHeads(found)

    def counts(self, queries: TokenLayout, keys: TokenLayout) -> Tensor:
        """By how many branches a head's query sees a key: (batch or 1, heads, queries, keys)."""
        counts: list[Tensor | None] = [None] * self.heads
        for branches, heads in self.groups:
            masks = [dense_mask(one, queries, keys).int() for one in branches]
            for head in heads:
                counts[head] = torch.stack(torch.broadcast_tensors(*masks)).sum(0)
        return torch.cat([one for one in counts if one is not None], 1)

    def dense(self, queries: TokenLayout, keys: TokenLayout) -> Plan:
        counts = self.counts(queries, keys)
        dense = Dense(counts > 0, queries.positions, keys.positions)

        def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
            return dense(q, k, v, dropout, _counting(score_mod, counts))

        return attend


def _counting(score_mod: ScoreMod, counts: Tensor) -> ScoreMod:
    """Scores as they are, plus the logarithm of how often a key counts."""
    often = counts.clamp(min=1).double().log()

    def bias(q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        return (
            often.to(q.dtype) if score_mod.bias is None else score_mod.bias(q, queries, keys, scale) + often.to(q.dtype)
        )

    return replace(score_mod, bias=bias, static=None)


class ByHeads:
    """A plan of several, each for some heads."""

    def __init__(self, groups: list[tuple[list[int], Plan]]) -> None:
        self.groups = groups
        order = [head for heads, _ in groups for head in heads]
        self.back = [order.index(head) for head in range(len(order))]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        found = []
        for heads, execute in self.groups:
            if score_mod.plain:
                found.append(execute(q[:, heads], k[:, heads], v[:, heads], dropout, score_mod))
            else:  # a bias knows its heads by their number
                found.append(execute(q, k, v, dropout, score_mod)[:, heads])
        return torch.cat(found, 1)[:, self.back]
