"""LongNet's dilated attention (Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens").

A branch (w, r) cuts the sentence into segments of w; within a segment every r-th token attends to every r-th token.
Head j starts at token j mod r, so all tokens take part in some head ("multi-head dilated attention"); with `offsets:
blocks` at token j // ⌈heads / r⌉, as in the authors' code (torchscale, dilated_attention.py). Branches are combined by
α_i = s_i / Σ s_j, s_i the denominator of branch i's softmax ("dilated attention", last equation). This equals one
softmax over the keys of all branches, each key counted once per branch that reaches it.

The authors' code stops gradients at α; here they flow through it, as in the equation. The last segment may be shorter
than w and is not padded with keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, SelfAttention, Size
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.block_sparse import BlockSparse
from allyouneed.nn.ops.attention.dense import AttentionFn, DenseAttention, HasFallback, PairBias, ScoreMod, dense_mask
from allyouneed.nn.ops.attention.dilated import DilatedAttention, DilatedSegments
from allyouneed.nn.ops.attention.flex import FLEX_BLOCK, Flex, can_flex
from allyouneed.nn.ops.attention.packed import attend_packed
from allyouneed.nn.ops.attention.select import BLOCK, MIN_BLOCK_SPARSE_SCORES, flex
from allyouneed.nn.patterns.core import Causal, Full, Pattern, TokenFields
from allyouneed.nn.patterns.sparse import BlockDiagonal, SegmentDilated
from allyouneed.nn.positions.relative import NoRelative, Relative
from allyouneed.nn.sublayer import Mixer, SubLayer


class LongNet(Mixer):
    """`segments` and `dilations` are w and r of the branches, of equal length.

    The paper uses 2048, 4096, 8192, 16384, 32768 and 1, 2, 4, 6, 12. Without a dilation of 1, a head returns zeros for
    the tokens it skips. `sees: past` makes it causal; decoding then caches at most the longest segment.
    """

    kind: Literal["longnet"] = "longnet"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    segments: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Segment length w of each branch."""
    dilations: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Dilation r of each branch; as many as `segments`."""
    offsets: Literal["modulo", "blocks"] = "modulo"
    """The first token of head j in a segment: j mod r (the paper), or j // ⌈heads / r⌉ (the authors' code)."""
    sees: Literal["past", "around"] = "past"
    """`past`: causal; `around`: bidirectional."""
    positions: Relative = NoRelative()
    """Relative positions inside attention: rotary, biases, …"""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "tokens attend to their whole segment; set sees: past"

    def visible(self, tokens: TokenFields) -> Tensor:
        query, key = tokens.along(1), tokens.along(0)
        branches = {branch for head in range(self.heads) for branch in self.branches(head)}
        return torch.stack([branch.allowed(query, key) for branch in branches]).any(0)

    @property
    def attention(self) -> Attention:
        """Undilated branches that cover all keys of every branch: the longest segment, and those that do not divide
        it."""
        longest = max(self.segments)
        pattern: Pattern = BlockDiagonal(size=longest)
        for size in sorted({size for size in self.segments if longest % size}):
            pattern = pattern | BlockDiagonal(size=size)
        pattern = Causal() & pattern if self.causal else pattern
        sizes = {"heads": self.heads, "head_width": self.head_width}
        return Attention(pattern=pattern, positions=self.positions, bias=self.bias, dropout=self.dropout, **sizes)

    def offset(self, head: int, dilation: int) -> int:
        return head % dilation if self.offsets == "modulo" else head // -(-self.heads // dilation)

    def branches(self, head: int) -> tuple[Pattern, ...]:
        found = [
            SegmentDilated(segment=w, dilation=r, offset=self.offset(head, r))
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
            text = f"{len(self.segments)} segments but {len(self.dilations)} dilations; set one of each per branch"
            found.append(("dilations", text))
        return found


class LongNetAttention(SelfAttention):
    def __init__(self, config: LongNet, common: Common) -> None:
        super().__init__(config.attention, common)
        by_branches: dict[tuple[Pattern, ...], list[int]] = {}
        for head in range(self.heads):
            by_branches.setdefault(config.branches(head), []).append(head)
        self.groups = list(by_branches.items())  # heads with equal branches
        self.config = config
        self.plan_key = repr(config)  # a string: torch.compile cannot hash a config

    def prepare(self, context: Context, rows: int) -> None:
        self.relative.prepare(context)
        self.attention_fn(context, context.queries, rows, self.score_mod())

    def attention_fn(self, context: Context, keys: TokenLayout, rows: int, score_mod: ScoreMod) -> AttentionFn:
        key = (self.plan_key, "own" if keys is context.queries else keys)
        return context.memoize(LongNetAttention, key, lambda: self.select(context.queries, keys))

    def dense_scores(self, queries: TokenLayout, keys: TokenLayout, score_mod: ScoreMod) -> tuple[Tensor, ScoreMod]:
        counts = self.counts(queries, keys)
        return counts > 0, _with_counts(score_mod, counts)

    @property
    def is_by_query(self) -> bool:
        return False  # its branches have plans of their own

    def select(self, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
        if queries.packed and queries.device.type == "cpu":
            return attend_packed(self.select, queries, keys)
        if queries.device.type == "cuda":
            found = self.counted(queries, keys) if queries.packed else self.dilated(queries, keys)
            if found is not None:
                return found
        return self.gathered(queries, keys)

    def counted(self, queries: TokenLayout, keys: TokenLayout) -> CountedFlex | None:
        """FlexAttention over the longest segments of packed rows, in which a key counts as often as branches reach it:
        positions begin anew in each sentence, so that no branch is a strided view. None where a head skips tokens."""
        config = self.config
        if keys is not queries or queries.time < FLEX_BLOCK or 1 not in config.dilations:
            return None
        return CountedFlex(
            flex(config.attention.pattern, queries, keys), self.log_count, lambda: self.gathered(queries, keys)
        )

    def log_count(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The logarithm of the number of branches in which a head's query attends to a key, by their positions."""
        config, count = self.config, (query != query).float()
        for w, r in zip(config.segments, config.dilations, strict=True):
            offset = head % r if config.offsets == "modulo" else head // -(-self.heads // r)
            taken = (query % w % r == offset) & (key % w % r == offset)
            count = count + (taken & (query // w == key // w)).float()
        return count.log()

    def dilated(self, queries: TokenLayout, keys: TokenLayout) -> DilatedAttention | None:
        """Each branch as dense attention over its dilated segments; None unless rows are whole sentences."""
        if keys is not queries or queries.start != 0 or queries.segments is not None:
            return None
        config, time = self.config, queries.time
        pairs = zip(config.segments, config.dilations, strict=True)
        branches = [DilatedSegments(time, self.heads, min(w, time), r, config.offsets == "modulo") for w, r in pairs]
        if not config.causal and any(one.padded for one in branches):  # padding would be attended to
            return None
        pattern = Causal() if config.causal else Full()
        layouts = [TokenLayout(torch.arange(one.kept, device=queries.device)[None], start=0) for one in branches]
        kernels = [flex(pattern, layout, layout) for layout in layouts]
        return DilatedAttention(branches, kernels, queries.device, lambda: self.gathered(queries, keys))

    def gathered(self, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
        if queries.time * keys.time < MIN_BLOCK_SPARSE_SCORES:
            return self.dense(queries, keys)
        groups: list[tuple[list[int], AttentionFn]] = []
        for branches, heads in self.groups:
            parts = [BlockLayout(one, queries, keys, BLOCK) for one in branches]
            if sum(part.area for part in parts) > 0.6 * queries.time * keys.time:
                return self.dense(queries, keys)
            groups.append((heads, BlockSparse(parts)))
        return PerHeadGroups(groups)

    def counts(self, queries: TokenLayout, keys: TokenLayout) -> Tensor:
        """Number of branches in which a query attends to a key: (batch or 1, heads, queries, keys)."""
        counts: list[Tensor | None] = [None] * self.heads
        for branches, heads in self.groups:
            masks = [dense_mask(one, queries, keys).int() for one in branches]
            for head in heads:
                counts[head] = torch.stack(torch.broadcast_tensors(*masks)).sum(0)
        return torch.cat([one for one in counts if one is not None], 1)

    def dense(self, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
        counts = self.counts(queries, keys)
        dense = DenseAttention(counts > 0, queries.positions, keys.positions)

        def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
            return dense(q, k, v, dropout, _with_counts(score_mod, counts))

        return attend


def _with_counts(score_mod: ScoreMod, counts: Tensor) -> ScoreMod:
    """Adds the logarithm of the key counts to the scores."""
    log_counts = counts.clamp(min=1).double().log()

    def bias(q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        return (
            log_counts.to(q.dtype)
            if score_mod.bias is None
            else score_mod.bias(q, queries, keys, scale) + log_counts.to(q.dtype)
        )

    return replace(score_mod, bias=bias, static=None)


class CountedFlex(HasFallback):
    """FlexAttention with the logarithm of key counts as a bias inside the kernel; `make_fallback` as in `Flex`."""

    def __init__(self, kernel: Flex, log_count: PairBias, make_fallback: Callable[[], AttentionFn]) -> None:
        self.kernel, self.log_count, self.make_fallback = kernel, log_count, make_fallback

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if dropout or not score_mod.plain or not can_flex(q, v):
            return self.fallback(q, k, v, dropout, score_mod)
        return self.kernel(q, k, v, dropout, ScoreMod(score_mod.scale, pair_bias=self.log_count))


class PerHeadGroups:
    """One attention function per group of heads."""

    def __init__(self, groups: list[tuple[list[int], AttentionFn]]) -> None:
        self.groups = groups
        order = [head for heads, _ in groups for head in heads]
        self.inverse = [order.index(head) for head in range(len(order))]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        found = []
        for heads, execute in self.groups:
            if score_mod.plain:
                found.append(execute(q[:, heads], k[:, heads], v[:, heads], dropout, score_mod))
            else:  # a bias is indexed by head
                found.append(execute(q, k, v, dropout, score_mod)[:, heads])
        return torch.cat(found, 1)[:, self.inverse]
