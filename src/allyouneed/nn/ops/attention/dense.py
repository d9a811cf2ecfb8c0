"""Dense softmax attention: all scores computed, the pattern's mask applied. The definition that faster paths are tested
against, and what they run on their blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.observe import offer, show
from allyouneed.nn.patterns.core import Full, Pattern, SameSegment

PairBias = Callable[[Tensor, Tensor, Tensor], Tensor]
# (q, scale, causal) -> numbers by query and distance, the farthest one, values by distance (positions/relative.py)
ByQuery = Callable[[Tensor, float, bool], tuple[Tensor, int, Tensor | None]]


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """Modified attention: softmax(cap(score + bias)) v + values.

    `score(q, k, query positions, key positions)` replaces q·k · scale; `bias(q, …, scale)` is added to it; `cap` c maps
    it to c·tanh(score / c); `values(weights, …)` is added to the result. Positions are (batch or 1, time). `static`:
    key of a bias that is independent of q and equal for all layers. `pair_bias(head, query position, key position)`:
    the bias of single pairs, for kernels that compute it where they need it. `distance_bias(time)`: a bias that depends
    on the distance only, (heads, 2 · time − 1), from the distance 1 − time to time − 1. `constant_from`: distances of
    at least this many tokens have the same bias, on each side. `by_query(q, scale, causal)`: all of the bias and the
    values, where they depend on the query and the distance only.
    """

    scale: float
    score: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    bias: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    cap: float | None = None
    values: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    static: Hashable = None
    pair_bias: PairBias | None = None
    distance_bias: Callable[[int], Tensor] | None = None
    constant_from: int | None = None
    by_query: ByQuery | None = None

    @property
    def plain(self) -> bool:
        """softmax(q·k · scale) v, which every kernel computes."""
        return self.bias is None and self.fused

    @property
    def fused(self) -> bool:
        """Whether SDPA can compute it, with the bias as its mask."""
        return self.score is None and self.cap is None and self.values is None


# (q, k, v, dropout, score_mod) -> (batch, heads, queries, head_width); k and v may have fewer heads than q
AttentionFn = Callable[[Tensor, Tensor, Tensor, float, ScoreMod], Tensor]


@dataclass(frozen=True, eq=False)
class DenseAttention:
    """SDPA with the pattern's mask."""

    mask: Tensor  # (batch or 1, 1 or heads, queries or 1, keys)
    queries: Tensor  # positions (batch or 1, queries)
    keys: Tensor
    biases: dict[Hashable, Tensor] = field(default_factory=dict)  # biases shared by all layers

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if not score_mod.fused:
            seen = attention_weights(q, k, self.mask, self.queries, self.keys, score_mod)
            seen = torch.nn.functional.dropout(seen.to(v.dtype), dropout, dropout > 0)
            return weighted_sum(seen, v, self.queries, self.keys, score_mod)
        mask = self.mask if score_mod.bias is None else self._bias_mask(q, score_mod)
        out = sdpa(q, k, v, mask, dropout, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out if score_mod.bias is None else out * self.has_keys

    @cached_property
    def has_keys(self) -> Tensor:
        """Queries with at least one key: SDPA returns zeros for the others with a boolean mask, but NaN with a bias of
        -inf."""
        return self.mask.any(-1, keepdim=True)

    def prepare(self, like: Tensor, score_mod: ScoreMod) -> None:
        """Compute a bias that all layers share, for queries of the dtype and device of `like`."""
        if score_mod.bias is not None and score_mod.static is not None:
            self._bias_mask(like, score_mod)

    def _bias_mask(self, q: Tensor, score_mod: ScoreMod) -> Tensor:
        """The bias where allowed, -inf elsewhere."""
        if score_mod.static is not None and score_mod.static in self.biases:
            return self.biases[score_mod.static]
        assert score_mod.bias is not None
        bias = score_mod.bias(q, self.queries, self.keys, score_mod.scale).to(q.dtype)
        found = torch.where(self.mask | ~self.has_keys, bias, float("-inf"))
        if score_mod.static is not None:
            self.biases[score_mod.static] = found
        return found


def weighted_sum(weights: Tensor, v: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """The values, weighted: (batch, heads, queries, width of v)."""
    out = weights.to(v.dtype) @ repeat_kv(v, weights.shape[1])
    return out if score_mod.values is None else out + score_mod.values(weights, queries, keys).to(out.dtype)


def offer_weights(part: Any, scores: Callable[[], Tensor], mask: Callable[[], Tensor]) -> Tensor | None:
    """Offer scores and weights to a probe; the weights to use, if it changed either."""
    show(part, "mask", mask)
    changed = offer(part, "scores", scores)

    def weights() -> Tensor:
        return (scores() if changed is None else changed).softmax(-1) * mask()

    found = offer(part, "weights", weights)
    return weights() if found is None and changed is not None else found


def attention_weights(q: Tensor, k: Tensor, mask: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """The definition: softmax over the allowed keys, (batch, heads, queries, keys); zeros for a query without keys."""
    return masked_scores(q, k, mask, queries, keys, score_mod).softmax(-1) * mask


def masked_scores(q: Tensor, k: Tensor, mask: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """(batch, heads, queries, keys); the smallest finite number where masked."""
    k = repeat_kv(k, q.shape[1])
    scores = (
        (q @ k.transpose(-1, -2)) * score_mod.scale if score_mod.score is None else score_mod.score(q, k, queries, keys)
    )
    if score_mod.bias is not None:
        scores = scores + score_mod.bias(q, queries, keys, score_mod.scale)
    if score_mod.cap is not None:
        scores = score_mod.cap * torch.tanh(scores / score_mod.cap)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads to match the query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def dense_mask(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> Tensor:
    """The mask: (batch or 1, 1, queries or 1, keys) bool. SDPA returns zeros for a query without keys."""
    query, key = queries.fields(1), keys.fields(2)
    if queries.packed and keys.packed:
        mask = (pattern & SameSegment()).allowed(query, key)
    elif isinstance(pattern, Full):
        mask = key.segment > 0
    else:
        mask = pattern.allowed(query, key) & (key.segment > 0)
    return mask[:, None]
