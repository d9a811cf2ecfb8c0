"""The input of a context encoder (Zhang et al. 2018, "Improving the Transformer Translation Model with Document-Level
Context", 3.2), a second encoder for the sentences before the source. Layers read it with a `cross` of kind
`context-attention`.

A source is one row of tokens, `sentence <break> sentence <break> source`: what ends with the last break is the context.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout


def split_context(source: Rows, layout: TokenLayout, separator: int) -> tuple[Rows, Rows]:
    """The context of each sentence, which may be empty, and the sentence; both with positions from 0. A sentence is
    never empty: its last token is no break. `layout`: of the whole. Packed rows keep their columns; others move to the
    left and are as short as possible."""
    positions = layout.positions.expand_as(source.tokens)
    real = torch.ones_like(positions, dtype=torch.bool) if layout.real is None else layout.real
    segments = real.long() if layout.segments is None else layout.segments

    def most(values: Tensor) -> Tensor:
        """The largest value in the sentence of each token; 0 at least."""
        found = torch.zeros_like(values[:, :1]).expand(-1, values.shape[1] + 1)
        return found.scatter_reduce(1, segments, values.where(real, 0), "amax").gather(1, segments)

    length = most(positions + 1)
    breaks = (source.tokens == separator) & (positions + 1 < length)
    before = most((positions + 1) * breaks)  # tokens of the context
    inside = positions < before
    if layout.packed:
        context = replace(source, segments=segments.where(inside, 0), positions=positions)
        return context, replace(source, segments=segments.where(~inside, 0), positions=positions - before)
    first = real.long().argmax(1, keepdim=True)  # of rows padded on the left
    before, length = before.amax(1, keepdim=True), length.amax(1, keepdim=True)
    return _cut(source, first, before), _cut(source, first + before, length - before)


def _cut(rows: Rows, first: Tensor, counts: Tensor) -> Rows:
    """`counts` tokens of each row from column `first`, both (batch, 1), padded on the right to one column at least."""
    time = max(1, int(counts.max())) if len(counts) else 1
    columns = (first + torch.arange(time, device=first.device)).clamp(max=rows.tokens.shape[1] - 1)
    kept = replace(rows, lengths=None, positions=None, side="right")
    return replace(kept.each(lambda tensor: tensor.take_along_dim(columns, 1)), lengths=counts[:, 0])
