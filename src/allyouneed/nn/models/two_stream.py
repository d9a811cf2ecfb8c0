"""XLNet's two streams (Yang et al. 2019, 2.3) without a second stream: a row is followed by tokens that only ask.

The content stream is the row itself, h_z ← Attention(Q = h_z, KV = h_{z ≤ t}). For each token to be told there is one
more that stands at its place, knows where it stands but not what stands there, sees what is said before it and is seen
by nobody: the query stream, g_z ← Attention(Q = g_z, KV = h_{z < t}). Both go through the same blocks with the same
weights, and who sees whom is the pattern `permuted` over `Rows.order`. Only as many ask as are to be told (2.3, partial
prediction).
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


def askers(rows: Rows, places: Tensor) -> Rows:
    """Those that ask for the tokens at `places` (batch, count) of these rows. What they are read as does not matter."""

    def there(value: Tensor) -> Tensor:
        return value.gather(1, places)

    assert rows.order is not None, "who asks must know when the token is said: give the rows an order"
    positions = places if rows.positions is None else there(rows.positions)
    types = None if rows.types is None else there(rows.types)
    return Rows(torch.zeros_like(places), positions=positions, order=-1 - there(rows.order), types=types)


def asking(rows: Rows, places: Sequence[Sequence[int]], pad: int = 0) -> Rows:
    """Each row of its own length (padded on the right) and behind it those that ask for the tokens at its `places`."""
    batch, time = rows.tokens.shape
    lengths = [time] * batch if rows.lengths is None else rows.lengths.tolist()
    total = [length + len(asked) for length, asked in zip(lengths, places, strict=True)]
    # (batch, longest): which token of the row a place of the new one is or asks for
    origin = torch.zeros(batch, max(total), dtype=torch.long)
    asks = torch.zeros_like(origin, dtype=torch.bool)
    for row, (length, asked) in enumerate(zip(lengths, places, strict=True)):
        origin[row, : total[row]] = torch.tensor([*range(length), *asked])
        asks[row, length : total[row]] = True
    origin, asks = origin.to(rows.tokens.device), asks.to(rows.tokens.device)
    assert rows.order is not None and rows.segments is None and rows.side == "right"
    order = rows.order.gather(1, origin)
    return Rows(
        torch.where(asks, pad, rows.tokens.gather(1, origin)),
        lengths=torch.tensor(total, device=origin.device),
        positions=origin if rows.positions is None else rows.positions.gather(1, origin),
        order=torch.where(asks, -1 - order, order),
        types=None if rows.types is None else rows.types.gather(1, origin),
    )


def read_on(
    embed: Any,
    stack: Stack,
    new: Rows,
    states: States,
    asks: Rows | None = None,
    losses: list[Tensor] | None = None,
) -> Tensor:
    """Read the next segment of every text, over what is remembered of those before (2.4, mem): hidden states of its
    tokens and behind them of those that ask, (batch, time + askers, width). Everything remembered counts as said before
    the segment. Segments are full rows; the positions of those that ask count from the segment's first token.
    """
    if new.lengths is not None or new.segments is not None or len(set(states.lengths)) > 1:
        raise ValueError("a segment is a full row of tokens, as long in all texts: no padding")
    (rows, time), begin = new.tokens.shape, states.lengths[0]
    layout = TokenLayout.following(states.lengths, replace(new, order=None))
    states.mark(layout, begin + time)
    slots = states.slots(begin + time)
    if new.order is not None:  # what is remembered is said first, as number 0
        layout = replace(layout, order=new.order + 1)
        slots = replace(slots, order=torch.cat((new.order.new_zeros(rows, begin), new.order + 1), 1))
    x = embed(new, layout)
    context = Context(layout, slots, losses=losses)
    if asks is not None:
        assert asks.positions is not None and asks.order is not None
        there = TokenLayout(begin + asks.positions, order=asks.order - 1, types=asks.types)
        x = torch.cat((x, embed(asks, there)), 1)
        context = Context(_joined(layout, there, rows), slots, said=layout, losses=losses)
    hidden: Tensor = stack(x, context, states.layers)
    states.lengths = [begin + time] * rows
    return hidden


def _joined(layout: TokenLayout, asks: TokenLayout, rows: int) -> TokenLayout:
    assert layout.order is not None and asks.order is not None
    types = layout.types if layout.types is None or asks.types is None else torch.cat((layout.types, asks.types), 1)
    return TokenLayout(
        torch.cat((layout.positions.expand(rows, -1), asks.positions), 1),
        order=torch.cat((layout.order, asks.order), 1),
        types=types,
    )
