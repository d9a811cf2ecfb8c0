"""Synchronous bidirectional attention (Zhou et al. 2019, "Synchronous Bidirectional Neural Machine Translation").

A target is written from left to right and from right to left at once. Each direction attends to its own past, and to
the past of the other one, which is the future of the text (3.1, eq. 5-9):

    H = H_history ⊕ H_future,    H_history = Attention(Q, K_own, V_own),    H_future = Attention(Q, K_other, V_other)

Both directions share all weights and are rows of one batch: row i + batch / 2 belongs to row i (`Rows.mirrored`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, SelfAttention
from allyouneed.nn.patterns.core import Causal
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVState
from allyouneed.nn.sublayer import Mixer, SubLayer


class Synchronous(Mixer):
    """`fusion`: how both are combined. linear: H_history + λ H_future; tanh: H_history + λ tanh(H_future) (the paper's
    best); gate: r ⊙ H_history + z ⊙ H_future with r, z = σ(W [H_history; H_future]), in every head.

    In a batch that is not mirrored it is causal attention.
    """

    kind: Literal["synchronous"] = "synchronous"
    heads: Annotated[int, Field(gt=0)]
    """Number of attention heads."""
    fusion: Literal["linear", "tanh", "gate"] = "tanh"
    """How the past of both directions is combined."""
    weight: Annotated[float, Field(ge=0)] = 0.1
    """λ, for the fusions `linear` and `tanh`."""

    @property
    def attention(self) -> Attention:
        return Attention(heads=self.heads, pattern=Causal())

    def build(self, common: Common) -> SubLayer:
        return SynchronousAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """The cost for a batch that is not mirrored."""
        size = self.attention.sizes(common).head_width
        gate = common.linear.cost(2 * size, 2 * size, False).parameters if self.fusion == "gate" else 0
        return self.attention.cost(common, length) + Cost(parameters=gate)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


class SynchronousAttention(SelfAttention):
    traceable = False  # the partners' keys are planned while it runs

    def __init__(self, config: Synchronous, common: Common) -> None:
        super().__init__(config.attention, common)
        self.fusion, self.weight = config.fusion, config.weight
        size = 2 * self.head_width
        self.gate = common.linear.build(size, size, False) if config.fusion == "gate" else None

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if not context.queries.mirrored:
            return super().forward(x, context, state)
        q, k, v = self.project(x, context)
        keys = context.queries
        if state is not None:
            assert isinstance(state, KVState)
            k, v, keys = state.append(k, v, context)
        history = self.attend(q, k, v, context, keys)
        order, partners = context.memoize(SynchronousAttention, keys, lambda: mirror(keys, len(x)))
        future = self.attend(q, k.index_select(0, order), v.index_select(0, order), context, partners)
        return self.merge_heads(self.fuse(history, future), context)

    def fuse(self, history: Tensor, future: Tensor) -> Tensor:
        """Both (batch, heads, time, head_width)."""
        if self.gate is None:
            return history + self.weight * (future.tanh() if self.fusion == "tanh" else future)
        r, z = self.gate(torch.cat([history, future], -1)).sigmoid().chunk(2, -1)
        return r * history + z * future


def mirror(keys: TokenLayout, rows: int) -> tuple[Tensor, TokenLayout]:
    """The partner of each row, and the layout of the partners' keys."""
    order = torch.arange(rows, device=keys.device).roll(rows // 2)
    return order, keys.select(order)
