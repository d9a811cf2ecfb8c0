"""T5's relative positions: a learned bias per head and bucket of distances."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class Buckets(Relative):
    """Raffel et al. 2020, 2.1: a bias per head and bucket is added to the scores. Half of the buckets hold one distance
    each, the others grow logarithmically up to `distance`; larger distances share the last bucket.

    `bidirectional` reserves half of the buckets for keys ahead; otherwise these count as distance 0. Default: true
    unless the attention is causal. All layers of a stack share one table, as in T5; `untied` gives each its own.
    """

    kind: Literal["buckets"] = "buckets"
    buckets: Annotated[int, Field(ge=4)] = 32
    """Number of buckets."""
    distance: Annotated[int, Field(gt=0)] = 128
    """Larger distances share the last bucket."""
    bidirectional: bool | None = None
    """Reserve half of the buckets for keys ahead; default: unless the attention is causal."""
    untied: bool = False
    """Give each layer a table of its own; T5 shares one per stack."""

    def both(self, heads: Heads) -> bool:
        return not heads.causal if self.bidirectional is None else self.bidirectional

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return BucketsModule(self, heads)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        return self._table(heads) if self.untied else Cost()

    def shared(self, heads: Heads, common: Common) -> dict[Hashable, Cost]:
        return {} if self.untied else {self.key(heads): self._table(heads)}

    def _table(self, heads: Heads) -> Cost:
        return Cost(parameters=self.buckets * heads.heads)

    def key(self, heads: Heads) -> Hashable:
        return "buckets", self, heads.heads, self.both(heads)

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        found = []
        if heads.causal and self.bidirectional:
            text = "causal attention has no keys ahead, so half of the buckets would be unused; remove it"
            found.append(("bidirectional", text))
        if self.both(heads) and self.buckets % 2:
            found.append(("buckets", f"{self.buckets} is odd; bidirectional buckets must be even"))
        one_each = self.buckets // (4 if self.both(heads) else 2)
        if self.distance <= one_each:
            found.append(
                ("distance", f"{self.distance} must exceed {one_each}, the number of buckets with one distance each")
            )
        return found


def bucket(distance: Tensor, buckets: int, farthest: int, both: bool) -> Tensor:
    """Bucket of a distance, positive for keys behind the query."""
    ahead = torch.zeros_like(distance)
    if both:
        buckets //= 2
        ahead = (distance < 0) * buckets
        distance = distance.abs()
    distance = distance.clamp(min=0)
    one_each = buckets // 2
    grown = (distance.clamp(min=1).float() / one_each).log() / math.log(farthest / one_each)  # 0 … 1 and beyond
    wide = one_each + (grown * (buckets - one_each)).long()
    return ahead + torch.where(distance < one_each, distance, wide.clamp(max=buckets - 1))


class BucketsModule(RelativeModule):
    adds_bias = True
    bias_by_distance = True

    def __init__(self, config: Buckets, heads: Heads) -> None:
        super().__init__()
        self.config, self.both, self.constant_from = config, config.both(heads), config.distance
        self.one_per_stack = None if config.untied else config.key(heads)
        self.table = nn.Embedding(config.buckets, heads.heads)

    @property
    def static(self) -> Hashable:
        return "buckets", id(self)  # layers that share the table share the module

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        biases: Tensor = self.table(self.numbers(queries, keys))  # (batch or 1, queries, keys, heads)
        return biases.permute(0, 3, 1, 2)

    def distance_bias(self, time: int) -> Tensor:
        apart = torch.arange(1 - time, time, device=self.table.weight.device)
        return self.table.weight.T[:, bucket(apart, self.config.buckets, self.config.distance, self.both)]

    def numbers(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bucket of every pair (batch or 1, queries, keys)."""
        return bucket(distances(queries, keys), self.config.buckets, self.config.distance, self.both)
