"""Attention over tiles by our own GPU kernels (kernels/triton/training/tiled_attention.py), for training.

They add a bias by distance whose gradient they sum up (T5's buckets), and take patterns in small tiles whose masks are
stored once for all equal tiles (BigBird), with tokens read in the order of the tiles (dilated and strided patterns).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.dense import AttentionFn, ScoreMod
from allyouneed.nn.patterns.core import Causal, Full, Pattern

WIDEST = 128  # features of a head that fit in a program
TILES_AT_ONCE = 512  # masks that are computed at once


class Tiled:
    """`parts`: blocks of self-attention, one layout for each token order. Partial blocks of `Causal` and `Full` are
    masked by computing, those of other patterns by stored tiles. `make_fallback` builds the plan for what the kernels
    cannot do: dropout, wide heads. `constant_from`: as in `ScoreMod`."""

    def __init__(
        self, pattern: Pattern, parts: Sequence[BlockLayout], layout: TokenLayout,
        make_fallback: Callable[[], AttentionFn], constant_from: int | None = None,
    ) -> None:  # fmt: skip
        self.block, self.make_fallback = parts[0].block, make_fallback
        self.computed, self.causal = isinstance(pattern, Causal | Full), isinstance(pattern, Causal)
        self.masked_by = 0 if layout.segments is None else 2 if layout.packed else 1
        self.segments = None if layout.segments is None else layout.segments.to(torch.int32)
        # blocks that are `near` or more apart share one bias
        self.near = parts[0].query.blocks + 1 if constant_from is None else 1 - (1 - constant_from) // self.block
        self.plan = [x for part in parts for x in part_tables(part, not self.computed, self.near)]

    @cached_property
    def fallback(self) -> AttentionFn:
        return self.make_fallback()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        by_distance = score_mod.distance_bias
        known = score_mod.plain or (score_mod.fused and by_distance is not None and self.computed)
        if dropout or not known or max(q.shape[-1], v.shape[-1]) > WIDEST or not usable(q):
            return self.fallback(q, k, v, dropout, score_mod)
        from allyouneed.kernels.triton.training.tiled_attention import tiled_attention

        bias = None if by_distance is None else by_distance(q.shape[2])
        how = (score_mod.scale, self.block, self.causal, self.masked_by, self.near)
        return tiled_attention(q, k, v, bias, self.segments, self.plan, *how)


def part_tables(part: BlockLayout, tiles: bool, near: int) -> list[Tensor]:
    """Tensors of one part: token order (slots,), int32, empty if it is that of the row; of each query block the numbers
    of key blocks that are full and at least `near` blocks away, that are full, and of all (3, rows, blocks); in this
    order their indices and masks (2, rows, blocks, most); the same of each key block; mask tiles (n, block, block)
    int8, empty if masks are computed."""
    device, block = part.query.tokens.device, part.block
    order = part.query.tokens.flatten().to(torch.int32) if part.query.sorted else torch.empty(0, device=device).int()
    some, every = part.grid()
    masks = torch.empty(0, dtype=torch.int8, device=device)
    number = torch.zeros_like(some, dtype=torch.int32)
    if tiles:
        masks, number[some & ~every] = mask_tiles(part, *(some & ~every).nonzero(as_tuple=True)[1:])
        masks = masks if len(masks) else torch.ones(1, block, block, dtype=torch.int8, device=device)
    step = torch.arange(part.query.blocks, device=device)
    away, found = (step[:, None] - step).abs() >= near, []
    for here, whole, tile in ((some, every, number), (some.mT, every.mT, number.mT)):
        far = whole & away
        which = torch.stack((here, whole, far)).sum(0).argsort(dim=-1, descending=True, stable=True)
        counts = torch.stack([x.sum(-1, dtype=torch.int32) for x in (far, whole, here)])
        if tiles:
            which = which[..., : max(1, int(counts[2].max()))]
        found += [counts, torch.stack((which.to(torch.int32), tile.gather(-1, which)))]
    return [order, *found, masks]


def mask_tiles(part: BlockLayout, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct masks (n, block, block) int8 of these pairs of blocks in one row, and which of them each pair has."""
    bits, words_each = torch.arange(64, device=queries.device), part.block**2 // 64
    words = [
        (part.tile_masks(q, k).view(len(q), words_each, 64).long() << bits).sum(-1)
        for q, k in zip(queries.split(TILES_AT_ONCE), keys.split(TILES_AT_ONCE), strict=True)
    ]
    packed, which = torch.cat(words).cpu().unique(dim=0, return_inverse=True)
    unpacked = (packed.to(queries.device)[..., None] >> bits) & 1
    return unpacked.view(-1, part.block, part.block).to(torch.int8), which.to(queries.device, torch.int32)
