"""Longformer attention: a window for everyone, and tokens of the batch's choice that see all and are seen by all.

Beltagy et al. 2020, 3.1: chosen tokens look with projections of their own, over keys and values of their own; whoever
else looks at a chosen token uses the ordinary ones.
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
from allyouneed.nn.ops.attention.dense import attention_weights, dense_mask
from allyouneed.nn.ops.attention.select import plan
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.patterns.marked import Chosen
from allyouneed.nn.patterns.sparse import Dilated
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer


class Longformer(Mixer):
    """A token sees half of `window` places on each side, `dilation` apart. `Rows.chosen` are the global tokens."""

    kind: Literal["longformer"] = "longformer"
    heads: Size
    head_width: Size | None = None
    window: Size = 512
    dilation: Size = 1
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def causal(self) -> bool:
        return False

    def leak(self) -> str:
        return "a longformer's window reaches to both sides (attention with 'causal & window(n)' does not)"

    @property
    def pattern(self) -> Pattern:
        return Dilated(size=self.window // 2 + 1, dilation=self.dilation) | Chosen()

    @property
    def attention(self) -> Attention:
        """The ordinary part of it."""
        return Attention(
            heads=self.heads, head_width=self.head_width, pattern=self.pattern, bias=self.bias, dropout=self.dropout
        )

    def build(self, common: Common) -> SubLayer:
        return LongformerAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """How many tokens will be chosen is not known; their own looks are not counted."""
        inner = self.attention.sizes(common).inner
        own = common.linear.cost(common.width, inner, self.bias)
        everywhere = common.linear.cost(common.width, 2 * inner, self.bias)
        return self.attention.cost(common, length) + Cost(own.parameters) + everywhere

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if self.window % 2:
            found.append(("window", f"half of {self.window} places cannot lie on each side; make it even"))
        return found


class LongformerAttention(SelfAttention):
    def __init__(self, config: Longformer, common: Common) -> None:
        super().__init__(config.attention, common)
        self.global_q = common.linear.build(common.width, self.inner, config.bias)
        self.global_kv = common.linear.build(common.width, (self.inner, self.inner), config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = self.project(x, context)
        seen = self.look(q, k, v, context, context.queries)
        chosen = context.queries.chosen
        if chosen is None:
            mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
            return mixed
        index, layout = context.plan("chosen", lambda: gathered(context.queries, chosen, len(x)))
        rows = torch.arange(len(x), device=x.device)[:, None]
        q = self.split(self.global_q(x[rows, index]))  # (batch, heads, most chosen, head_width)
        k, v = map(self.split, self.global_kv(x).chunk(2, -1))
        score_mod, keys = self.score_mod(), context.queries
        execute = context.plan(("chosen", q.shape[0]), lambda: plan(Full(), layout, keys, score_mod))
        theirs = execute(q, k, v, self.dropout if self.training else 0.0, score_mod).transpose(1, 2)
        # a row with fewer chosen tokens than another writes its surplus where it is thrown away
        seen = torch.cat((seen.transpose(1, 2), theirs.new_zeros(len(x), 1, *theirs.shape[2:])), 1)
        place = torch.where(layout.segments > 0, index, x.shape[1]) if layout.segments is not None else index
        seen = seen.index_put((rows, place), theirs.to(seen.dtype))[:, :-1]
        self._show(q, k, context, layout, rows, place)
        result: Tensor = self.out(seen.flatten(2))
        return result

    def _show(self, q: Tensor, k: Tensor, context: Context, layout: TokenLayout, rows: Tensor, place: Tensor) -> None:
        """Let those who asked for weights have the chosen tokens' own."""
        wanted = None if context.record is None else context.record.get(self)
        if wanted is None:
            return
        mask = dense_mask(Full(), layout, context.queries)
        weights = attention_weights(q, k, mask, layout.positions, context.queries.positions, self.score_mod())
        weights = weights if wanted.heads is None else weights[:, list(wanted.heads)]
        shown = torch.cat((wanted.found[-1], weights.new_zeros(*weights.shape[:2], 1, weights.shape[3])), 2)
        wanted.found[-1] = (
            shown.transpose(1, 2).index_put((rows, place), weights.transpose(1, 2)).transpose(1, 2)[:, :, :-1]
        )

    def new_state(self) -> State:
        raise ValueError("a longformer sees both sides: it cannot decode")


def gathered(here: TokenLayout, chosen: Tensor, batch: int) -> tuple[Tensor, TokenLayout]:
    """Where the chosen tokens of each row are (batch, most of them), padded on the right, and what is known of them."""
    picked = chosen if here.real is None else chosen & here.real
    picked = picked.expand(batch, -1)
    most = max(1, int(picked.sum(1).max()))
    index = picked.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    there = picked.gather(1, index)
    positions = here.positions.expand(batch, -1).gather(1, index)
    segments = there.long() if here.segments is None else here.segments.expand(batch, -1).gather(1, index) * there
    return index, replace(TokenLayout(torch.where(there, positions, 0), segments), packed=here.packed)
