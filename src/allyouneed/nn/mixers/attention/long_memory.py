"""Cross-attention to the nearest tokens of a source of any length: Unlimiformer (Bertsch et al. 2023, "Unlimiformer:
Long-Range Transformers with Unlimited Length Input", 2.2-2.3).

Every head of every layer attends to its own top-k keys. Since q·k = (x W_q)·(h W_k) = (x W_q W_kᵀ)·h, one store of the
encoder's hidden states h serves all of them: queries are projected by W_kᵀ, not states by W_k. Values need no
projection per key either: Σ_j a_j (h_j W_v) = (Σ_j a_j h_j) W_v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from allyouneed.nn.context import Context, Memory
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.ops.attention.dense import masked_scores, repeat_kv

Projections = tuple[Tensor, Tensor, Tensor | None]  # W_k, W_v (kv_heads, head_width, width), b_v (kv_heads, head_width)


@dataclass(frozen=True, eq=False)
class LongMemory(Memory):
    """Hidden states of sources of any length; every head attends to `keys` of them. `indexes`: a faiss index of each
    source's real tokens, in place of the exact search."""

    keys: int = 1
    indexes: Sequence[Any] | None = None

    def select(self, rows: Tensor) -> LongMemory:
        found = Memory.select(self, rows)  # a plain Memory
        indexes = None if self.indexes is None else [self.indexes[row] for row in rows.tolist()]
        return LongMemory(**vars(found), keys=self.keys, indexes=indexes)

    def join(self, other: Memory) -> LongMemory:
        found = Memory.join(self, other)
        theirs = other.indexes if isinstance(other, LongMemory) else None
        indexes = None if self.indexes is None or theirs is None else [*self.indexes, *theirs]
        return LongMemory(**vars(found), keys=self.keys, indexes=indexes)

    def attend(self, cross: Any, x: Tensor, context: Context, state: Any) -> Tensor:
        """What `CrossAttention` computes for x (rows, time, width), over the nearest keys. Rows are the beams of the
        sources, in groups."""
        q = cross.split(cross.q(x))  # (rows, heads, time, head_width)
        q = cross.scores.prepare(q if cross.q_norm is None else cross.q_norm(q, context))
        (rows, heads, time, width), sources = q.shape, len(self.hidden)
        q = q.view(sources, -1, heads, time, width).transpose(1, 2).flatten(2, 3)  # (sources, heads, queries, …)
        projections = linear_projections(cross)
        if projections is None:
            seen = self.attend_keys(cross, q, context, state)
        else:
            seen = self.attend_hidden(q, *projections, cross.score_mod().scale)
        seen = seen.unflatten(2, (-1, time)).transpose(1, 2).reshape(rows, heads, time, -1)
        return cross.merge_heads(seen, context)

    def attend_hidden(self, q: Tensor, w_k: Tensor, w_v: Tensor, b_v: Tensor | None, scale: float) -> Tensor:
        """Attend to the hidden states; the bias of the keys adds the same to all scores of a query."""
        sources, heads, queries, _ = q.shape
        w_k, w_v = (repeat_kv(w[None].to(q.dtype), heads)[0] for w in (w_k, w_v))
        projected = (q @ w_k).flatten(1, 2)  # q W_kᵀ: (sources, heads * queries, width)
        scores, nearest = self.search(projected)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
        weights = scores.softmax(-1).to(q.dtype)  # (sources, heads * queries, keys)
        mean = weighted_sum(self.hidden, nearest, weights).view(sources, heads, queries, -1)
        seen = mean @ w_v.transpose(-1, -2)
        return seen if b_v is None else seen + repeat_kv(b_v[None, :, None].to(q.dtype), heads)

    def search(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The largest inner products with the hidden states of each source, and their positions: (sources, queries,
        keys); -inf for those that are not there."""
        count = min(self.keys, self.hidden.shape[1])
        if self.indexes is None:
            scores = queries @ self.hidden.transpose(1, 2)
            if self.layout.real is not None:
                scores = scores.masked_fill(~self.layout.real[:, None], float("-inf"))
            scores, nearest = scores.topk(count, -1, sorted=False)
            return scores, nearest
        parts = []
        for index, some in zip(self.indexes, queries.float().cpu().numpy(), strict=True):
            parts.append([torch.from_numpy(found) for found in index.search(some, count)])
        scores, nearest = (torch.stack(both).to(queries.device) for both in zip(*parts, strict=True))
        missing = nearest < 0  # fewer tokens than keys
        return scores.masked_fill(missing, float("-inf")).to(queries.dtype), nearest.masked_fill(missing, 0)

    def attend_keys(self, cross: Any, q: Tensor, context: Context, state: Any) -> Tensor:
        """Attend to projected keys, where scores are not inner products with a linear map of the states: norms of keys,
        other score functions, quantized maps. Keys and values are kept as in other cross-attention."""
        if state is None or state.keys is None:
            k, v = cross.source(self.hidden, context)
            if state is not None:
                state.keys, state.values, state.end = k, v, k.shape[2]
        else:
            k, v = state.keys, state.values
        places = self.layout.positions
        real = torch.ones_like(places, dtype=torch.bool) if self.layout.real is None else self.layout.real
        every = torch.zeros_like(q[:1, 0, :, 0], dtype=torch.long)  # cross-attention has no positions of queries
        scores = masked_scores(q, k, real[:, None, None], every, places, cross.score_mod())
        scores, nearest = scores.topk(min(self.keys, k.shape[2]), -1, sorted=False)
        weights, v = scores.softmax(-1).to(v.dtype), repeat_kv(v, q.shape[1])
        seen = weighted_sum(v.flatten(0, 1), nearest.flatten(0, 1), weights.flatten(0, 1))
        return seen.unflatten(0, q.shape[:2])


def linear_projections(cross: Any) -> Projections | None:
    """The projections of keys and values; None if scores are not inner products with linear maps of the states."""
    maps = (cross.k, cross.v) if cross.kv is None else (cross.kv,)
    if cross.k_norm is not None or cross.soft_cap is not None or cross.own_score:
        return None
    if any(type(each) not in (nn.Linear, MergedLinear) for each in maps):
        return None
    weights = torch.cat([each.weight for each in maps]).unflatten(0, (2, -1, cross.head_width))
    bias = maps[-1].bias
    own = None if bias is None else bias[-cross.kv_width :].unflatten(0, (-1, cross.head_width))
    return weights[0], weights[1], own


def weighted_sum(values: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """values (batch, all, width), chosen and weights (batch, queries, keys): Σ weight · value, (batch, queries, width),
    without a copy of the chosen values."""
    batch, time, width = values.shape
    offsets = torch.arange(batch, device=values.device)[:, None, None] * time
    flat = embedding_bag(
        (chosen + offsets).flatten(0, 1),
        values.reshape(-1, width),
        per_sample_weights=weights.flatten(0, 1),
        mode="sum",
    )
    return flat.unflatten(0, (batch, -1))
