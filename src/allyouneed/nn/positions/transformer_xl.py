"""Transformer-XL's relative positions: sinusoids of the distance, scored by each query."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.absolute import Sinusoidal
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class TransformerXL(Relative):
    """Dai et al. 2019, 3.3: the score of query i and key j is q·k + q·W_R R_{i−j} + u·k + v·W_R R_{i−j} = (q + u)·k +
    (q + v)·W_R R_{i−j}, with R sinusoids of the model width.

    u and v are learned and shared by all layers of a stack, as in the authors' models; `untied` gives each layer its
    own. Distances are clipped to `clamp` (`clamp_len` in the authors' code).
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["transformer-xl"] = "transformer-xl"
    untied: bool = False
    """Give each layer vectors u and v of its own; the authors share them."""
    clamp: Annotated[int, Field(gt=0)] | None = None
    """Larger distances count as this one; default: no limit."""

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return TransformerXLModule(self, heads, common)

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        """W_R maps as many distances as tokens, twice as many for bidirectional attention."""
        sides = 1 if heads.causal else 2
        linear = common.linear.cost(common.width, heads.inner, False)
        each = Cost(linear.parameters, sides * linear.flops + 2 * sides * heads.inner * keys)
        return each + (self._biases(heads) if self.untied else Cost())

    def shared(self, heads: Heads, common: Common) -> dict[Hashable, Cost]:
        return {} if self.untied else {_key(heads): self._biases(heads)}

    def _biases(self, heads: Heads) -> Cost:
        return Cost(parameters=2 * heads.inner)


def _key(heads: Heads) -> Hashable:
    return "transformer-xl", heads.heads, heads.head_width


class TransformerXLBiases(nn.Module):
    """u (`content`) and v (`place`): (heads, 1, head_width)."""

    def __init__(self, heads: Heads, untied: bool) -> None:
        super().__init__()
        self.one_per_stack = None if untied else _key(heads)
        self.content = nn.Parameter(torch.empty(heads.heads, 1, heads.head_width))
        self.place = nn.Parameter(torch.empty(heads.heads, 1, heads.head_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.content, std=0.02)
        nn.init.normal_(self.place, std=0.02)


class TransformerXLModule(RelativeModule):
    """`apply_positions` replaces q by q + u, so that attention computes (q + u)·k; `bias` uses q + v."""

    adds_bias = bias_by_query = True
    uncompiled = ("bias",)  # it looks up the range of the distances

    def __init__(self, config: TransformerXL, heads: Heads, common: Common) -> None:
        super().__init__()
        self.causal, self.clamp = heads.causal, config.clamp
        self.sinusoids = Sinusoidal(order="halves").build(common.width)
        self.far = common.linear.build(common.width, heads.inner, False)  # W_R
        self.biases = TransformerXLBiases(heads, config.untied)

    def apply_positions(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        return q + self.biases.content.to(q.dtype), k, v

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        away = distances(queries, keys)[:, None]  # (batch or 1, 1, queries, keys)
        if self.causal:
            away = away.clamp(min=0)  # keys ahead are masked
        if self.clamp is not None:
            away = away.clamp(-self.clamp, self.clamp)
        query = self.query(q)
        if queries.shape[1] == 1:
            return self.score_one(query, away) * scale
        first, last = int(away.min()), int(away.max())
        every = self.sinusoids(torch.arange(first, last + 1, device=q.device)).to(self.biases.place.dtype)
        scores = self.score_distances(query, every) * scale  # (batch, heads, queries, distances)
        return scores.gather(-1, (away - first).expand(*scores.shape[:3], -1))

    def query(self, q: Tensor) -> Tensor:
        """q + v, of the q + u that `apply_positions` gave."""
        return q + (self.biases.place - self.biases.content).to(q.dtype)

    def query_bias(self, q: Tensor, scale: float, causal: bool) -> tuple[Tensor, int, Tensor | None]:
        far = q.shape[2] - 1 if self.clamp is None else min(self.clamp, q.shape[2] - 1)
        behind = torch.arange(far, -1 if causal else -far - 1, -1, device=q.device)
        every = self.sinusoids(behind).to(self.biases.place.dtype)
        return self.score_distances(self.query(q) * scale, every), far, None

    def score_one(self, query: Tensor, away: Tensor) -> Tensor:
        """Scores of one query per row (batch, heads, 1, head_width) for each key; the host looks up no range of
        distances."""
        every = self.sinusoids(away[:, 0, 0]).to(self.biases.place.dtype)  # (batch or 1, keys, width)
        heads = query.shape[1]
        if type(self.far) is nn.Linear:
            weight = self.far.weight.unflatten(0, (heads, -1)).to(query.dtype)  # (heads, head_width, width)
            return query @ weight @ every[:, None].to(query.dtype).mT
        far = self.far(every).unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch or 1, heads, keys, head_width)
        return query @ far.to(query.dtype).mT

    def score_distances(self, query: Tensor, every: Tensor) -> Tensor:
        """query · W_R · R for each distance, cheaper product first: decoding has fewer queries than distances. Only a
        plain linear map gives access to W_R itself."""
        (distances, width), (batch, heads, queries, head_width) = every.shape, query.shape
        count = batch * queries
        queries_first = count * (head_width * width + width * distances)
        if type(self.far) is nn.Linear and queries_first < distances * head_width * (width + count):
            weight = self.far.weight.unflatten(0, (heads, -1)).to(query.dtype)  # (heads, head_width, width)
            return query @ weight @ every.to(query.dtype).T
        far = self.far(every).unflatten(-1, (heads, -1)).transpose(0, 1)  # (heads, distances, head_width)
        return query @ far.to(query.dtype).transpose(-1, -2)
