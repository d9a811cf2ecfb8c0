"""Gaussian-prior attention: near tokens get larger scores, as far as each head finds useful."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class Gaussian(Relative):
    """Gaussian Transformer (Guo et al. 2019): weights are multiplied by a Gaussian of the distance d = i − j, which in
    log space adds −|w·d² + b| to the score. w > 0 is the precision of the Gaussian; b ≤ 0 lowers the weight of the
    token itself, which knows its own content already, below that of its neighbours. Both are learned, one pair per
    head.

    The signs of w and b are initial values: w < 0 with b ≥ 0 is the same prior, and equal signs differ from b = 0 by a
    constant, which cancels in the softmax.
    """

    kind: Literal["gaussian"] = "gaussian"

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return GaussianModule(heads.heads)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        return Cost(parameters=2 * heads.heads)


class GaussianModule(RelativeModule):
    adds_bias = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.precision = nn.Parameter(torch.empty(heads))  # w
        self.shift = nn.Parameter(torch.empty(heads))  # b
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A deviation of about 2 tokens, and the token itself as likely as its neighbours at distance 1.4."""
        nn.init.constant_(self.precision, 0.1)
        nn.init.constant_(self.shift, -0.1)

    @property
    def static(self) -> Hashable:
        return "gaussian", id(self)

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        dtype = torch.promote_types(self.precision.dtype, torch.float32)  # d² exceeds what half precision holds
        squared = distances(queries, keys)[:, None].to(dtype).square()  # (batch or 1, 1, queries, keys)
        w, b = (p.to(dtype)[:, None, None] for p in (self.precision, self.shift))
        return -(w * squared + b).abs()
