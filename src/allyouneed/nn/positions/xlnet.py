"""XLNet's relative positions: Transformer-XL's plus relative segment encodings."""

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
    """Yang et al. 2019, 2.5: Transformer-XL's score, with u and v per layer, plus (q + b)·s; s is s₊ if query and key
    have the same type and s₋ otherwise (relative segment encodings).

    `types`: number of token types; in the authors' data two texts, the class token and padding.
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["xlnet"] = "xlnet"
    types: Annotated[int, Field(gt=0)] = 4
    """Number of token types."""
    clamp: Annotated[int, Field(gt=0)] | None = None
    """Larger distances count as this one; default: no limit."""

    def inputs(self) -> dict[str, bool]:
        return {"types": False}

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
    """(q + b)·s₋ is constant over the keys of a query and cancels in the softmax; what remains is (q + b)·(s₊ − s₋)
    where types agree. It is computed as `types` extra features: this number in the feature of the query's type,
    times a one in the feature of the key's type."""

    def __init__(self, config: XLNetRelative, heads: Heads, common: Common) -> None:
        super().__init__(config.distances, heads, common)
        self.types, self.head_width = config.types, heads.head_width
        self.kinds = XLNetKinds(heads)

    def apply_positions(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        layout = context.queries
        types = torch.zeros_like(layout.positions) if layout.types is None else layout.types
        known = torch.arange(self.types, device=types.device)  # one_hot() would read the largest one on the host
        own_type = (types[..., None] == known).to(q.dtype)[:, None]  # (batch or 1, 1, time, types)
        same, other = self.kinds.vectors.to(q.dtype)
        # (batch, heads, time, 1)
        same_type_score = ((q + self.kinds.bias.to(q.dtype)) * (same - other)).sum(-1, keepdim=True)
        q, k, v = super().apply_positions(q, k, v, context)
        return torch.cat((q, same_type_score * own_type), -1), torch.cat((k, own_type.expand(*k.shape[:3], -1)), -1), v

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        return super().bias(q[..., : self.head_width], queries, keys, scale)

    def query_bias(self, q: Tensor, scale: float, causal: bool) -> tuple[Tensor, int, Tensor | None]:
        return super().query_bias(q[..., : self.head_width], scale, causal)


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
