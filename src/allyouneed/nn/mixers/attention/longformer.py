"""Longformer attention: a sliding window plus global tokens chosen by the batch.

Beltagy et al. 2020, 3.1: global tokens attend with their own query, key and value projections; other tokens attend to
global tokens with the ordinary ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, SelfAttention, Size
from allyouneed.nn.observe import observe, show
from allyouneed.nn.ops.attention.dense import attention_weights, dense_mask
from allyouneed.nn.ops.attention.select import select_attention
from allyouneed.nn.patterns.core import Full, Pattern, TokenFields
from allyouneed.nn.patterns.marked import Chosen
from allyouneed.nn.patterns.sparse import Dilated
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer


class Longformer(Mixer):
    """A token attends to window / 2 positions on each side, `dilation` apart. `Rows.chosen` marks the global tokens."""

    kind: Literal["longformer"] = "longformer"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    window: Size = 512
    """Positions of the window, both sides together."""
    dilation: Size = 1
    """Distance between its positions."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    def inputs(self) -> dict[str, bool]:
        return {"global_positions": False}

    @property
    def causal(self) -> bool:
        return False

    def leak(self) -> str:
        return "the longformer window covers both sides; use attention with pattern 'causal & window(n)'"

    def visible(self, tokens: TokenFields) -> Tensor:
        return self.attention.visible(tokens)

    @property
    def pattern(self) -> Pattern:
        return Dilated(size=self.window // 2 + 1, dilation=self.dilation) | Chosen()

    @property
    def attention(self) -> Attention:
        """The sliding-window part."""
        return Attention(
            heads=self.heads, head_width=self.head_width, pattern=self.pattern, bias=self.bias, dropout=self.dropout
        )

    def build(self, common: Common) -> SubLayer:
        return LongformerAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """The cost without the queries of global tokens, whose number is unknown."""
        inner = self.attention.sizes(common).inner
        own = common.linear.cost(common.width, inner, self.bias)
        global_kv = common.linear.cost(common.width, 2 * inner, self.bias)
        return self.attention.cost(common, length) + Cost(own.parameters) + global_kv

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if self.window % 2:
            found.append(("window", f"{self.window} is odd; it must be even"))
        return found


class LongformerAttention(SelfAttention):
    def __init__(self, config: Longformer, common: Common) -> None:
        super().__init__(config.attention, common)
        self.global_q = common.linear.build(common.width, self.inner, config.bias)
        self.global_kv = common.linear.build(common.width, (self.inner, self.inner), config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = self.project(x, context)
        seen = self.attend(q, k, v, context, context.queries)
        chosen = context.queries.chosen
        if chosen is None:
            return self.out(seen.transpose(1, 2).flatten(2))
        index, layout = context.memoize(
            LongformerAttention, "global tokens", lambda: gather_global_tokens(context.queries, chosen, len(x))
        )
        rows = torch.arange(len(x), device=x.device)[:, None]
        q = observe(
            self, "global.q", self.split(self.global_q(x[rows, index]))
        )  # (batch, heads, most chosen, head_width)
        k, v = map(self.split, self.global_kv(x).chunk(2, -1))
        k, v = observe(self, "global.k", k), observe(self, "global.v", v)
        score_mod, keys = self.score_mod(), context.queries
        execute = context.memoize(
            LongformerAttention, ("attention", len(q)), lambda: select_attention(Full(), layout, keys, score_mod)
        )
        global_out = execute(q, k, v, self.dropout if self.training else 0.0, score_mod)
        show(self, "global.weights", lambda: self.global_weights(q, k, context, layout))
        global_out = observe(self, "global.heads", global_out).transpose(1, 2)
        # rows with fewer global tokens write their padding to an extra slot
        seen = torch.cat((seen.transpose(1, 2), global_out.new_zeros(len(x), 1, *global_out.shape[2:])), 1)
        slot = torch.where(layout.segments > 0, index, x.shape[1]) if layout.segments is not None else index
        seen = seen.index_put((rows, slot), global_out.to(seen.dtype))[:, :-1]
        self._record_weights(q, k, context, layout, rows, slot)
        return self.out(seen.flatten(2))

    def _record_weights(
        self, q: Tensor, k: Tensor, context: Context, layout: TokenLayout, rows: Tensor, slot: Tensor
    ) -> None:
        """Overwrite the recorded rows of global tokens by their own weights."""
        request = None if context.record is None else context.record.get(self)
        if request is None:
            return
        weights = self.global_weights(q, k, context, layout)
        weights = weights if request.heads is None else weights[:, list(request.heads)]
        recorded = torch.cat((request.weights[-1], weights.new_zeros(*weights.shape[:2], 1, weights.shape[3])), 2)
        request.weights[-1] = (
            recorded.transpose(1, 2).index_put((rows, slot), weights.transpose(1, 2)).transpose(1, 2)[:, :, :-1]
        )

    def global_weights(self, q: Tensor, k: Tensor, context: Context, layout: TokenLayout) -> Tensor:
        """(batch, heads, most chosen, time)"""
        mask = dense_mask(Full(), layout, context.queries)
        return attention_weights(q, k, mask, layout.positions, context.queries.positions, self.score_mod())

    def new_state(self) -> State:
        raise ValueError("longformer cannot decode: its window covers both sides")


def gather_global_tokens(here: TokenLayout, flags: Tensor, batch: int) -> tuple[Tensor, TokenLayout]:
    """Column of each global token (batch, most per row), padded on the right, and their layout."""
    chosen = flags if here.real is None else flags & here.real
    chosen = chosen.expand(batch, -1)
    most = max(1, int(chosen.sum(1).max()))
    index = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = chosen.gather(1, index)
    positions = here.positions.expand(batch, -1).gather(1, index)
    segments = there.long() if here.segments is None else here.segments.expand(batch, -1).gather(1, index) * there
    return index, replace(TokenLayout(torch.where(there, positions, 0), segments), packed=here.packed)
