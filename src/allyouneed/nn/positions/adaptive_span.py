"""Adaptive attention span: every head learns how far back it looks, and the KV cache keeps no more than that."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative, RelativeModule, distances

Size = Annotated[int, Field(gt=0)]
MASKED = -3e4  # exp of it is exactly 0 beside any visible key, and half precision can hold it


class AdaptiveSpan(Relative):
    """Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers", 2.2: a head with span z weights the key at
    distance x by m_z(x) = clamp((R + z − x) / R, 0, 1) before the softmax normalises, which adds log m_z(x) to the
    score; keys at distance R + z and beyond have no weight. z in [0, `span`] is learned per head, and λ times the mean
    z of the layer is added to the loss.

    The KV cache of a layer is a ring as long as its longest head looks back, once the model is trained; during training
    it holds `span` tokens, since spans may still grow. `vectors` are the paper's position vectors: p_x is added to the
    key at distance x (2.1), shared by all heads and layers. `positions` may be any other relative positions.
    """

    kind: Literal["adaptive-span"] = "adaptive-span"
    span: Size
    """S: the most tokens a head can look back, itself included."""
    ramp: Size = 32
    """R: tokens over which the mask falls from 1 to 0."""
    penalty: Annotated[float, Field(ge=0)] = 2e-6
    """λ: added to the loss of each layer, per token of its mean span."""
    initial: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Initial z as a fraction of `span`; 0 in the authors' code."""
    vectors: bool = False
    """Learn a vector per distance, added to the keys."""
    positions: Relative = NoRelative()
    """Other relative positions, used as well."""

    @property
    def bilinear(self) -> bool:  # type: ignore[override]  # depends on the fields
        return self.vectors or self.positions.bilinear

    @property
    def features(self) -> int:
        return self.positions.features

    @property
    def reach(self) -> int:
        return self.span  # what is learned is not known to the config

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return AdaptiveSpanModule(self, heads, common)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        scored = Cost(flops=2 * heads.inner * keys) if self.vectors else Cost()
        return Cost(parameters=heads.heads) + scored + self.positions.cost(heads, common, keys)

    def shared(self, heads: Heads, common: Common) -> dict[Hashable, Cost]:
        found = dict(self.positions.shared(heads, common))
        if self.vectors:
            found[self.key(heads)] = Cost(parameters=self.span * heads.head_width)
        return found

    def key(self, heads: Heads) -> Hashable:
        return "adaptive-span", self.span, heads.head_width

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        found = [(f"positions.{key}", text) for key, text in self.positions.problems(heads, common)]
        if isinstance(self.positions, AdaptiveSpan):
            found.append(("positions", "is adaptive-span already; use other positions"))
        return found


class DistanceVectors(nn.Embedding):
    """p: (span, head_width), one table per stack."""

    def __init__(self, config: AdaptiveSpan, heads: Heads) -> None:
        super().__init__(config.span, heads.head_width)
        self.one_per_stack = config.key(heads)


class AdaptiveSpanModule(RelativeModule):
    adds_bias = True
    traceable = False

    def __init__(self, config: AdaptiveSpan, heads: Heads, common: Common) -> None:
        super().__init__()
        self.config = config
        self.fraction = nn.Parameter(torch.empty(heads.heads))  # z / span
        self.vectors = DistanceVectors(config, heads) if config.vectors else None
        self.inner = config.positions.build(heads, common)
        self.score_scale, self.adds_values = self.inner.score_scale, self.inner.adds_values
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.fraction, self.config.initial)

    @property
    def static(self) -> Hashable:
        depends_on_q = self.vectors is not None or (self.inner.adds_bias and self.inner.static is None)
        return None if depends_on_q else ("adaptive-span", id(self))

    def spans(self) -> Tensor:
        """z in tokens: (heads,)."""
        return self.fraction.clamp(0, 1) * self.config.span

    def visible(self) -> int:
        if self.training:
            return self.config.span
        return max(1, min(self.config.span, math.ceil(self.spans().max().item()) + self.config.ramp))

    def prepare(self, context: Context) -> None:
        self.inner.prepare(context)

    def apply_positions(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            self.fraction.data.clamp_(0, 1)  # the authors' code does it after each update
            if context.losses is not None and not context.is_recomputing:
                context.losses.append(self.config.penalty * self.spans().float().mean())
        return self.inner.apply_positions(q, k, v, context)

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        config, dtype = self.config, torch.promote_types(q.dtype, torch.float32)
        away = distances(queries, keys)[:, None].abs()  # (batch or 1, 1, queries, keys)
        z = self.spans().to(dtype)[:, None, None]
        mask = ((config.ramp + z - away) / config.ramp).clamp(0, 1)  # (batch or 1, heads, queries, keys)
        seen = (mask > 0) & (away < config.span)
        found = torch.where(seen, mask.where(seen, 1).log(), MASKED)
        if self.vectors is not None:
            found = found + self.score_distances(q, away) * scale
        return found + self.inner.bias(q, queries, keys, scale) if self.inner.adds_bias else found

    def score_distances(self, q: Tensor, away: Tensor) -> Tensor:
        """q·p_x for each pair, from one product with all distances that occur: (batch, heads, queries, keys)"""
        assert self.vectors is not None
        away = away.clamp(max=self.config.span - 1)  # the others are masked
        several = away.numel() and q.shape[2] > 1  # one query needs no range of distances, looked up on the host
        table = self.vectors.weight[: int(away.max()) + 1] if several else self.vectors.weight
        scores = q @ table.to(q.dtype).T  # (batch, heads, queries, distances)
        return scores.gather(-1, away.expand(*scores.shape[:3], -1))

    def values(self, weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return self.inner.values(weights, queries, keys)
