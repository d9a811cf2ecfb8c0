"""Softmax attention written out: every score computed, the pattern's mask laid over them. The truth that every faster
path (select.py) is held to, and what those paths run on the pieces they cut."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.patterns.core import Full, Pattern, SameSegment


@dataclass(frozen=True, eq=False)
class ScoreMod:
    """How scores are made where it is not just q·k: softmax(cap(score + bias)) v + values.

    `score(q, k, query positions, key positions)` replaces q·k · scale; `bias(q, …, scale)` is added to it; `cap` c
    makes it c·tanh(score / c); `values(weights, …)` is added to the result. Positions are (batch or 1, time).
    `static`: a key under which a bias that does not depend on q is the same for all layers.
    """

    scale: float
    score: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    bias: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    cap: float | None = None
    values: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    static: Hashable = None

    @property
    def plain(self) -> bool:
        """softmax(q·k · scale) v: what every kernel computes."""
        return self.bias is None and self.fused

    @property
    def fused(self) -> bool:
        """SDPA computes it, with the bias as a mask."""
        return self.score is None and self.cap is None and self.values is None


# (q, k, v, dropout, manner) -> (batch, heads, queries, head_width); k and v may have fewer heads than q
Plan = Callable[[Tensor, Tensor, Tensor, float, ScoreMod], Tensor]


@dataclass(frozen=True, eq=False)
class Dense:
    """The pattern's mask, every score computed."""

    mask: Tensor  # (batch or 1, 1 or heads, queries or 1, keys)
    queries: Tensor  # positions (batch or 1, queries)
    keys: Tensor
    biases: dict[Hashable, Tensor] = field(default_factory=dict)  # of manners whose bias is the same for all layers

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if not score_mod.fused:
            seen = attention_weights(q, k, self.mask, self.queries, self.keys, score_mod)
            seen = torch.nn.functional.dropout(seen.to(v.dtype), dropout, dropout > 0)
            out = seen @ repeated(v, q.shape[1])
            return (
                out if score_mod.values is None else out + score_mod.values(seen, self.queries, self.keys).to(out.dtype)
            )
        mask = self.mask if score_mod.bias is None else self._biased(q, score_mod)
        out = sdpa(q, k, v, mask, dropout, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out if score_mod.bias is None else out * self.seeing

    @cached_property
    def seeing(self) -> Tensor:
        """Queries that see something: SDPA gives the others zeros for a boolean mask, but NaN for a bias of -inf."""
        return self.mask.any(-1, keepdim=True)

    def _biased(self, q: Tensor, score_mod: ScoreMod) -> Tensor:
        """The bias where one may look, -inf where not."""
        if score_mod.static is not None and score_mod.static in self.biases:
            return self.biases[score_mod.static]
        assert score_mod.bias is not None
        bias = score_mod.bias(q, self.queries, self.keys, score_mod.scale).to(q.dtype)
        found = torch.where(self.mask | ~self.seeing, bias, float("-inf"))
        if score_mod.static is not None:
            self.biases[score_mod.static] = found
        return found


def attention_weights(q: Tensor, k: Tensor, mask: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """The definition, written out: softmax over the keys that may be seen, (batch, heads, queries, keys); zeros for a
    query that sees nothing."""
    return masked_scores(q, k, mask, queries, keys, score_mod).softmax(-1) * mask


def masked_scores(q: Tensor, k: Tensor, mask: Tensor, queries: Tensor, keys: Tensor, score_mod: ScoreMod) -> Tensor:
    """(batch, heads, queries, keys); the least number there is, which is finite, where one may not look."""
    k = repeated(k, q.shape[1])
    scores = (
        (q @ k.transpose(-1, -2)) * score_mod.scale if score_mod.score is None else score_mod.score(q, k, queries, keys)
    )
    if score_mod.bias is not None:
        scores = scores + score_mod.bias(q, queries, keys, score_mod.scale)
    if score_mod.cap is not None:
        scores = score_mod.cap * torch.tanh(scores / score_mod.cap)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Each of fewer key-value heads as often as queries share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def dense_mask(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> Tensor:
    """The truth: (batch or 1, 1, queries or 1, keys) bool. SDPA answers a query that sees nothing with zeros."""
    query, key = queries.place(1), keys.place(2)
    if queries.packed and keys.packed:
        mask = (pattern & SameSegment()).allowed(query, key)
    elif isinstance(pattern, Full):
        mask = key.segment > 0
    else:
        mask = pattern.allowed(query, key) & (key.segment > 0)
    return mask[:, None]
