"""Attention to the sentences before the source, with a gate (Zhang et al. 2018, "Improving the Transformer Translation
Model with Document-Level Context", 3.3-3.4).

    C = MultiHead(H, context, context)
    λ = σ(W_i H + W_s C)
    Gating(H) = λ ⊙ H + (1 − λ) ⊙ C

The gate stands in place of the residual connection. Since a wiring adds H, the sub-layer gives (1 − λ) ⊙ (C − H): on a
post-norm wiring, the paper's, the block computes LayerNorm(Gating(H)).

Without context the gate is closed (λ = 1): the sub-layer gives 0.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, CrossAttention
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer


class ContextAttention(Mixer):
    """As a `cross` of encoder or decoder layers, in an encoder-decoder with a `context` encoder."""

    supports_cross: ClassVar[bool] = True
    supports_self: ClassVar[bool] = False
    reads_context: ClassVar[bool] = True

    kind: Literal["context-attention"] = "context-attention"
    heads: Annotated[int, Field(gt=0)]
    """Number of attention heads."""

    @property
    def attention(self) -> Attention:
        return Attention(heads=self.heads)

    def build(self, common: Common) -> SubLayer:
        raise TypeError("context-attention is a cross")

    def build_cross(self, common: Common) -> SubLayer:
        return GatedContextAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        gate = common.linear.cost(common.width, common.width, False) * 2
        return self.attention.cost(common, length, cross=True) + gate

    def source_flops(self, common: Common) -> float:
        return self.attention.source_flops(common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)

    def cross_problems(self, common: Common) -> list[tuple[str, str]]:
        if not getattr(common, "context", ()):
            return [("kind", "needs a context encoder; set context, in an encoder-decoder")]
        return []


class GatedContextAttention(CrossAttention):
    traceable = False  # which tokens have a context is found out while it runs
    reads_context = True  # not the source

    def __init__(self, config: ContextAttention, common: Common) -> None:
        super().__init__(config.attention, common)
        self.gate_input = common.linear.build(common.width, common.width, False)  # W_i
        self.gate_context = common.linear.build(common.width, common.width, False)  # W_s

    def prepare(self, context: Context, rows: int) -> None:
        pass

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        preceding = context.preceding
        if preceding is None:
            return torch.zeros_like(x)
        k, v = self.cached_source(preceding, context, state)
        seen = self.read(x, k, v, preceding, context)
        opened = 1 - (self.gate_input(x) + self.gate_context(seen)).sigmoid()  # 1 − λ
        found = context.memoize(
            GatedContextAttention, "has context", lambda: has_context(context.queries, preceding.layout, len(x))
        )
        mixed: Tensor = opened * (seen - x)
        return mixed if found is None else mixed.where(found[..., None], 0)


def has_context(queries: TokenLayout, context: TokenLayout, rows: int) -> Tensor | None:
    """Which of the queries have sentences before them: (rows, time) bool, or (rows, 1) for whole rows; None: all."""
    if context.segments is None:
        return None
    if not context.packed:
        found = (context.segments > 0).any(1, keepdim=True)
        return found.repeat_interleave(rows // max(1, len(found)), 0)  # beams
    assert queries.segments is not None
    known = torch.zeros_like(context.segments[:, :1]).expand(-1, context.time + 1)
    known = known.scatter(1, context.segments, torch.ones_like(context.segments))
    return (known.gather(1, queries.segments) > 0) & (queries.segments > 0)
