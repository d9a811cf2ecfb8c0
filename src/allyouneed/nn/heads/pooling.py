"""Pool token vectors to one vector per sentence, ignoring padding on either side."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from allyouneed.nn.context import TokenLayout

Pool = Literal["first", "mean", "last"]


def pool(x: Tensor, layout: TokenLayout, how: Pool) -> Tensor:
    """x (batch, time, width) -> (sentences, width): one per row; for packed rows one per segment, in order.

    first: BERT's [CLS]; last: the end token, which in a causal stack has seen everything (GPT, CLIP); mean: of all
    tokens.
    """
    segments = layout.segments
    if segments is None:
        return x.mean(1) if how == "mean" else x[:, 0 if how == "first" else -1]
    real = segments > 0
    if not layout.packed:
        if how == "mean":
            weights = real.to(x.dtype)[..., None]
            return (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        positions = torch.arange(x.shape[1], device=x.device)
        best = (
            positions.masked_fill(~real, -1).amax(1)
            if how == "last"
            else positions.masked_fill(~real, len(positions)).amin(1)
        )
        return x[torch.arange(len(x), device=x.device), best.clamp(0, x.shape[1] - 1)]
    edge = torch.zeros_like(segments[:, :1])
    begins = real & (segments != torch.cat([edge, segments[:, :-1]], 1))
    if how == "first":
        return x[begins]
    if how == "last":
        return x[real & (segments != torch.cat([segments[:, 1:], edge], 1))]
    owners = begins.flatten().cumsum(0)[real.flatten()] - 1  # (tokens): sentence of each token
    count = int(begins.sum())
    sums = x.new_zeros(count, x.shape[2]).index_add(0, owners, x[real])
    sizes = x.new_zeros(count).index_add(0, owners, torch.ones_like(owners, dtype=x.dtype))
    return sums / sizes[:, None]
