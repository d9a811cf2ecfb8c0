"""Shaw's relative positions: a learned vector per distance, added to keys and values."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.ops.index_sums import index_sums, lookup
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class Shaw(Relative):
    """Shaw et al. 2018, eq. 3-5: query i attends to key k_j + a^K_{j−i} and value v_j + a^V_{j−i}, distances clipped to
    ±`distance`. Heads share the vectors (3.3), layers do not.

    `values: false` omits a^V, which the paper found to matter little (table 3). `terms: key-query` also adds k_j·a^K of
    the same distance to the score (Huang et al. 2020, "Improve Transformer Models with Better Relative Position
    Embeddings", method 4; `relative_key_query` of Hugging Face's BERT).
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["shaw"] = "shaw"
    distance: Annotated[int, Field(gt=0)]
    """Distances beyond it share one vector."""
    values: bool = True
    """Add vectors to the values as well as to the keys."""
    terms: Literal["key", "key-query"] = "key"
    """What the vectors of the keys are multiplied with: queries, or queries and keys (`relative_key_query`)."""

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return ShawModule(self, heads.head_width)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        table, sides = 2 * self.distance + 1, 1 + self.values
        flops = (sides + (self.terms == "key-query")) * 2 * table * heads.inner
        return Cost(parameters=sides * table * heads.head_width, flops=flops)


class ShawModule(RelativeModule):
    """Multiplies a query with the distinct vectors, not with one per key (3.3)."""

    adds_bias = bias_by_query = True

    def __init__(self, config: Shaw, head_width: int) -> None:
        super().__init__()
        self.distance, self.adds_values = config.distance, config.values
        self.adds_key_bias = config.terms == "key-query"
        self.keys_table = nn.Embedding(2 * config.distance + 1, head_width)
        self.values_table = nn.Embedding(2 * config.distance + 1, head_width) if config.values else None

    def index(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Index of the vector: (batch or 1, 1, queries, keys)."""
        ahead = -distances(queries, keys)[:, None]
        return ahead.clamp(-self.distance, self.distance) + self.distance

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        scores = q @ self.keys_table.weight.to(q.dtype).T * scale  # (batch, heads, queries, vectors)
        return lookup(scores, self.index(queries, keys))

    def query_bias(self, q: Tensor, scale: float, causal: bool) -> tuple[Tensor, int, Tensor | None]:
        columns = self.distance + 1 if causal else 2 * self.distance + 1
        values = None if self.values_table is None else self.values_table.weight[:columns]
        return (q * scale) @ self.keys_table.weight[:columns].to(q.dtype).T, self.distance, values

    def key_bias(self, k: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        scores = k @ self.keys_table.weight.to(k.dtype).T * scale  # (batch, heads, keys, vectors)
        index = self.index(queries, keys).transpose(-1, -2)  # (batch or 1, 1, keys, queries)
        return lookup(scores, index).transpose(-1, -2)

    def values(self, weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        assert self.values_table is not None
        table = self.values_table.weight.to(weights.dtype)
        return index_sums(weights, self.index(queries, keys), len(table)) @ table
