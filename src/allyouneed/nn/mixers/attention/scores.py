"""How a query scores a key (Luong et al. 2015, 3.1; "Attention Is All You Need", 3.2.1).

Queries and keys are what an attention's own projections make of tokens. What is learned here comes besides.
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
    bilinear: ClassVar[bool] = True  # a score is some q'·k: what fast kernels compute

    @abstractmethod
    def build(self, heads: Heads, common: Common) -> ScoresModule: ...

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        """Of scoring so many keys."""
        return Cost(flops=2 * heads.inner * keys)

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        return []


class ScoresModule(nn.Module):
    """`prepare` changes the queries before positions turn them, `scale` multiplies q·k; one that is not bilinear writes
    its own `score`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def prepare(self, q: Tensor) -> Tensor:
        return q

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch, heads, queries, head_width), (batch, heads, keys, head_width) -> (batch, heads, queries, keys)"""
        return (q @ k.transpose(-1, -2)) * self.scale

    def check(self, keys: TokenLayout) -> None:
        """Refuse keys that cannot be scored, given where they (while decoding: the newest of them) stand."""


class ScaledDot(Scores):
    """q·k / √head_width ("Attention Is All You Need", eq. 1)."""

    kind: Literal["scaled-dot"] = "scaled-dot"
    scale: float | None = None  # another factor than 1/√head_width

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return ScoresModule(heads.head_width**-0.5 if self.scale is None else self.scale)


class Dot(Scores):
    """q·k (Luong et al. 2015, "dot"; T5 too, which puts the scale into the initial weights)."""

    kind: Literal["dot"] = "dot"

    def build(self, heads: Heads, common: Common) -> ScoresModule:
        return ScoresModule()


class General(Scores):
    """q·W·k, W of each head its own (Luong et al. 2015, "general")."""

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
        """At first q·W·k varies as much as q·k / √head_width does."""
        nn.init.normal_(self.weight, std=1 / self.weight.shape[-1])

    def prepare(self, q: Tensor) -> Tensor:
        return q @ self.weight


class Additive(Scores):
    """v · tanh(W s + U h), v of each head its own (Bahdanau et al. 2015, A.1.2; Luong's "concat").

    W and U are the attention's projections of queries and keys: q = W s, k = U h. There is no product to hand to a fast
    kernel: memory grows with queries · keys · width.
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
    """W q, which has a score for each of the first `length` places (Luong et al. 2015, eq. 8): what stands there does
    not matter. W of each head is its own."""

    bilinear: ClassVar[bool] = False

    kind: Literal["location"] = "location"
    length: Annotated[int, Field(gt=0)]

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

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        scores = q @ self.weight  # (batch, heads, queries, length)
        places = keys.clamp(max=scores.shape[-1] - 1)[:, None, None]  # beyond the last stands only padding: see check
        return scores.gather(-1, places.expand(*scores.shape[:-1], -1))

    def check(self, keys: TokenLayout) -> None:
        places = keys.positions if keys.real is None else keys.positions.where(keys.real, 0)
        length = self.weight.shape[-1]
        if places.numel() and (longest := int(places.max()) + 1) > length:
            raise UserError(f"a sentence of {longest} tokens is longer than the {length} places attention can score")
