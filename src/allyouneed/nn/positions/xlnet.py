"""XLNet's relative positions: Transformer-XL's, and whether query and key belong to the same text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule
from allyouneed.nn.positions.transformer_xl import TransformerXL, TransformerXLModule


class XLNetRelative(Relative):
    """Yang et al. 2019, 2.5: to Transformer-XL's score, with u and v of each layer's own, comes (q + b)·s: s is s₊ if
    query and key are of the same type and s₋ if they are not (relative segment encodings).

    `types`: how many types the batch may name; two texts, the class mark and padding in the authors' data.
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["xlnet"] = "xlnet"
    types: Annotated[int, Field(gt=0)] = 4
    clamp: Annotated[int, Field(gt=0)] | None = None  # as of transformer-xl

    @property
    def features(self) -> int:
        return self.types

    @property
    def distances(self) -> TransformerXL:
        return TransformerXL(untied=True, clamp=self.clamp)

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return XLNetRelativeModule(self, heads, common)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        kinds = Cost(parameters=3 * heads.inner, flops=2 * heads.heads * self.types * keys)
        return self.distances.cost(heads, common, keys) + kinds


class XLNetRelativeModule(TransformerXLModule):
    """(q + b)·s₋ is the same for all keys of a query, so that the softmax does not see it; what is left of the term is
    (q + b)·(s₊ − s₋) where types agree. That is a product: of this number in the place of the query's type with a one
    in the place of the key's. So queries and keys get as many features more as there are types."""

    def __init__(self, config: XLNetRelative, heads: Heads, common: Common) -> None:
        super().__init__(config.distances, heads, common)
        self.types, self.head_width = config.types, heads.head_width
        self.kinds = XLNetKinds(heads)

    def turn(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        layout = context.queries
        types = torch.zeros_like(layout.positions) if layout.types is None else layout.types
        mine = nn.functional.one_hot(types, self.types).to(q.dtype)[:, None]  # (batch or 1, 1, time, types)
        same, other = self.kinds.vectors.to(q.dtype)
        liking = ((q + self.kinds.bias.to(q.dtype)) * (same - other)).sum(-1, keepdim=True)  # (batch, heads, time, 1)
        q, k, v = super().turn(q, k, v, context)
        return torch.cat((q, liking * mine), -1), torch.cat((k, mine.expand(*k.shape[:3], -1)), -1), v

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        return super().bias(q[..., : self.head_width], queries, keys, scale)


class XLNetKinds(nn.Module):
    """s₊ and s₋ (2, heads, 1, head_width), and b (heads, 1, head_width)."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(2, heads.heads, 1, heads.head_width))
        self.bias = nn.Parameter(torch.empty(heads.heads, 1, heads.head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.vectors, std=0.02)
        nn.init.normal_(self.bias, std=0.02)
