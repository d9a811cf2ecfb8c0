"""XLNet's two streams (Yang et al. 2019, 2.3) in one: the query stream is appended to the content stream.

The content stream is the row itself, h_z ← Attention(Q = h_z, KV = h_{z ≤ t}). For each token to predict, a
query-stream token at its position, without its content, attends to the tokens before it in the order and is attended to
by none: g_z ← Attention(Q = g_z, KV = h_{z < t}). Both pass through the same blocks with the same weights; the pattern
`permuted` over `Rows.order` separates them. Only tokens to predict need a query (2.3, partial prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.states.base import States


def query_stream(rows: Rows, positions: Tensor) -> Rows:
    """Query-stream tokens that predict the tokens at `positions` (batch, count). Their token ids are ignored."""

    def there(value: Tensor) -> Tensor:
        return value.gather(1, positions)

    assert rows.order is not None, "the query stream requires Rows.order"
    positions = positions if rows.positions is None else there(rows.positions)
    types = None if rows.types is None else there(rows.types)
    return Rows(torch.zeros_like(positions), positions=positions, order=-1 - there(rows.order), types=types)


def append_query_stream(rows: Rows, positions: Sequence[Sequence[int]], pad: int = 0) -> Rows:
    """Each row (padded on the right) followed by the query stream for the tokens at `positions`."""
    batch, time = rows.tokens.shape
    lengths = [time] * batch if rows.lengths is None else rows.lengths.tolist()
    total = [length + len(queried) for length, queried in zip(lengths, positions, strict=True)]
    # (batch, longest): index of the token in the original row, for both streams
    origin = torch.zeros(batch, max(total), dtype=torch.long)
    queries = torch.zeros_like(origin, dtype=torch.bool)
    for row, (length, queried) in enumerate(zip(lengths, positions, strict=True)):
        origin[row, : total[row]] = torch.tensor([*range(length), *queried])
        queries[row, length : total[row]] = True
    origin, queries = origin.to(rows.tokens.device), queries.to(rows.tokens.device)
    assert rows.order is not None and rows.segments is None and rows.side == "right"
    order = rows.order.gather(1, origin)
    return Rows(
        torch.where(queries, pad, rows.tokens.gather(1, origin)),
        lengths=torch.tensor(total, device=origin.device),
        positions=origin if rows.positions is None else rows.positions.gather(1, origin),
        order=torch.where(queries, -1 - order, order),
        types=None if rows.types is None else rows.types.gather(1, origin),
    )


def advance_segment(
    embed: Any, stack: Stack, new: Rows, states: States, queries: Rows | None = None, losses: list[Tensor] | None = None
) -> Tensor:
    """Run the next segment of every text over the cached states of earlier segments (2.4, mem): hidden states of its
    tokens followed by the query stream, (batch, time + queries, width). Cached tokens come first in the order.
    Segments are full rows; positions of the query stream count from the start of the segment."""
    if new.lengths is not None or new.segments is not None or len(set(states.lengths)) > 1:
        raise ValueError("a segment must fill its row in all texts, without padding")
    (rows, time), begin = new.tokens.shape, states.lengths[0]
    layout = TokenLayout.following(states.lengths, replace(new, order=None))
    states.append_marks(layout, begin + time)
    slots = states.slot_layout(begin + time)
    if new.order is not None:  # cached tokens have order 0
        layout = replace(layout, order=new.order + 1)
        slots = replace(slots, order=torch.cat((new.order.new_zeros(rows, begin), new.order + 1), 1))
    x = embed(new, layout)
    context = Context(layout, slots, losses=losses)
    if queries is not None:
        assert queries.positions is not None and queries.order is not None
        query_layout = TokenLayout(begin + queries.positions, order=queries.order - 1, types=queries.types)
        x = torch.cat((x, embed(queries, query_layout)), 1)
        context = Context(_join_layouts(layout, query_layout, rows), slots, content=layout, losses=losses)
    hidden: Tensor = stack(x, context, states.layers)
    states.lengths = [begin + time] * rows
    return hidden


def _join_layouts(layout: TokenLayout, queries: TokenLayout, rows: int) -> TokenLayout:
    assert layout.order is not None and queries.order is not None
    types = (
        layout.types if layout.types is None or queries.types is None else torch.cat((layout.types, queries.types), 1)
    )
    return TokenLayout(
        torch.cat((layout.positions.expand(rows, -1), queries.positions), 1),
        order=torch.cat((layout.order, queries.order), 1),
        types=types,
    )
