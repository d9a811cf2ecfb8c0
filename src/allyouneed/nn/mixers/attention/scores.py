"""Attention score functions (Luong et al. 2015, 3.1; "Attention Is All You Need", 3.2.1).

They take projected queries and keys; parameters defined here come in addition to the projections.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.relative import Heads


class Scores(Part, slot="scores"):
    bilinear: ClassVar[bool] = True  # the score is q'·k for some q' of q, as fast kernels require

    @abstractmethod
    def build(self, heads: Heads, common: Common) -> ScoresModule: ...

    @property
    def longest(self) -> int | None:
        """Positions that it has weights for; None: any number."""
        return None

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        """The cost of one query over `keys` keys."""
        return Cost(flops=2 * heads.inner * keys)

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        return []


class ScoresModule(nn.Module):
    """`prepare` maps queries before positions are applied; `scale` multiplies q·k. Scores that are not bilinear
    override `score`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def prepare(self, q: Tensor) -> Tensor:
        return q

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch, heads, queries, head_width), (batch, heads, keys, head_width) -> (batch, heads, queries, keys)"""
        return (q @ k.transpose(-1, -2)) * self.scale

    def check(self, keys: TokenLayout) -> None:
        """Raise when a key position cannot be scored; while decoding, `keys` holds the new tokens only."""


class ScaledDot(Scores):
    """q·k / √head_width ("Attention Is All You Need", eq. 1)."""

    kind: Literal["scaled-dot"] = "scaled-dot"
    scale: float | None = None
    """Factor of q·k; default: 1/√head_width."""

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return ScoresModule(heads.head_width**-0.5 if self.scale is None else self.scale)


class Dot(Scores):
    """q·k (Luong et al. 2015, "dot"; also T5, which folds the scale into its initial weights)."""

    kind: Literal["dot"] = "dot"

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return ScoresModule()


class General(Scores):
    """q·W·k with one W per head (Luong et al. 2015, "general")."""

    kind: Literal["general"] = "general"

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return GeneralModule(heads)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        size = heads.inner * heads.head_width
        return Cost(parameters=size, flops=2 * size) + super().cost(heads, common, keys)


class GeneralModule(ScoresModule):
    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads.heads, heads.head_width, heads.head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial variance of q·W·k equals that of q·k / √head_width."""
        nn.init.normal_(self.weight, std=1 / self.weight.shape[-1])

    def prepare(self, q: Tensor) -> Tensor:
        return q @ self.weight


class Additive(Scores):
    """v · tanh(W s + U h) with one v per head (Bahdanau et al. 2015, A.1.2; Luong's "concat").

    W and U are the projections of queries and keys: q = W s, k = U h. No fused kernel applies: memory grows with
    queries · keys · width.
    """

    bilinear: ClassVar[bool] = False

    kind: Literal["additive"] = "additive"

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return AdditiveModule(heads)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        return Cost(parameters=heads.inner) + super().cost(heads, common, keys)


class AdditiveModule(ScoresModule):
    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads.heads, heads.head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        both = (q[:, :, :, None] + k[:, :, None]).tanh()  # (batch, heads, queries, keys, head_width)
        return (both @ self.weight[:, None, :, None]).squeeze(-1)


class Location(Scores):
    """W q: one score for each of the first `length` positions, independent of the keys (Luong et al. 2015, eq. 8). One
    W per head."""

    bilinear: ClassVar[bool] = False

    kind: Literal["location"] = "location"
    length: Annotated[int, Field(gt=0)]
    """Positions that get a score; longer sources are an error."""

    @property
    def longest(self) -> int:
        return self.length

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return LocationModule(heads, self.length)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        size = heads.inner * self.length
        return Cost(parameters=size, flops=2 * size)


class LocationModule(ScoresModule):
    def __init__(self, heads: Heads, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads.heads, heads.head_width, length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    @property
    def position_limit(self) -> int:
        return self.weight.shape[-1]

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        scores = q @ self.weight  # (batch, heads, queries, length)
        positions = keys.clamp(max=scores.shape[-1] - 1)[
            :, None, None
        ]  # positions beyond the table are padding: see check
        return scores.gather(-1, positions.expand(*scores.shape[:-1], -1))

    def check(self, keys: TokenLayout) -> None:
        length = self.position_limit
        if (longest := keys.longer_than(length)) is not None:
            raise UserError(
                f"sentence of {longest} tokens exceeds the {length} positions of location scores; set scores.length"
            )
