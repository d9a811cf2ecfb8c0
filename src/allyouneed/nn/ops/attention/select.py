"""Selects how softmax attention is executed.

    full          nothing is masked: SDPA without a mask
    causal        one causal sentence per row: SDPA's `is_causal` (padding on the right is never attended to)
    short rows    packed rows of at most 128 tokens on GPU: one tile of a kernel (short_rows.py)
    packed        packed rows on CPU: sentences regrouped by length into padded batches (packed.py)
    block-sparse  long rows with few keys per query: only non-empty blocks of the mask are computed (block_sparse.py)
    flex          the same on GPU, and packed rows: FlexAttention with those blocks as its block mask (flex.py)
    by distance   training on GPU: numbers of each query by distance, of Shaw and Transformer-XL (by_distance.py)
    tiled         training on GPU: learned biases by distance, and patterns of small or sorted blocks (tiled.py)
    dense         everything else: SDPA with the pattern's boolean mask (dense.py)

`dense` is the definition; tests compare every other path with it, gradients included. The selection is made once per
forward pass and pattern, then called by all layers with q, k, v of shape (batch, heads, time, head_width).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.block_mask import BlockLayout, disjoint_alternatives
from allyouneed.nn.ops.attention.block_sparse import BlockSparse
from allyouneed.nn.ops.attention.dense import AttentionFn, DenseAttention, ScoreMod, dense_mask
from allyouneed.nn.ops.attention.flex import FLEX_BLOCK, Flex
from allyouneed.nn.ops.attention.packed import attend_packed
from allyouneed.nn.patterns.core import Causal, Full, Pattern

if TYPE_CHECKING:
    from allyouneed.nn.ops.attention.tiled import Tiled

P = TypeVar("P")


def select_attention(
    pattern: Pattern, queries: TokenLayout, keys: TokenLayout, score_mod: ScoreMod, static: bool = False
) -> AttentionFn:
    """The cheapest attention equal to the dense mask of this pattern. `static`: nothing may wait for the device, and so
    blocks are not searched.

    It depends on `score_mod` only through `plain`, `constant_from` and whether it has a `pair_bias`, `distance_bias` or
    `by_query`, so layers that agree in that share it.
    """
    if queries.packed != keys.packed:
        raise ValueError("one side is packed (segments), the other is not; pack both or neither")
    packed, cuda = queries.packed, queries.device.type == "cuda"
    if packed and not cuda:
        return attend_packed(lambda q, k: select_attention(pattern, q, k, score_mod), queries, keys)
    # self-attention never reaches right padding; cross-attention does
    aligned = queries.start is not None and keys.start == 0 and (keys.segments is None or keys is queries)
    if isinstance(pattern, Causal) and aligned and score_mod.plain:
        if queries.start == 0 and queries.time == keys.time:
            return causal
        if queries.time == 1 and queries.start == keys.time - 1:
            return full  # the newest token attends to everything
    if isinstance(pattern, Full) and keys.segments is None and score_mod.plain:
        return full
    if static:
        return dense(pattern, queries, keys)
    if packed and isinstance(pattern, Causal | Full) and score_mod.plain and _are_short(queries, keys):
        from allyouneed.nn.ops.attention.short_rows import ShortRows  # registers operators, 0.2 s

        return ShortRows(
            queries, keys, isinstance(pattern, Causal), lambda: _general(pattern, queries, keys, score_mod)
        )
    return _general(pattern, queries, keys, score_mod)


def _are_short(queries: TokenLayout, keys: TokenLayout) -> bool:
    return 0 < queries.time <= SHORT and 0 < keys.time <= SHORT


SHORT = 128  # tokens: all scores of a row and head are one tile of a kernel


def _general(pattern: Pattern, queries: TokenLayout, keys: TokenLayout, score_mod: ScoreMod) -> AttentionFn:
    packed, cuda, plain, time = queries.packed, queries.device.type == "cuda", score_mod.plain, queries.time
    long = time * keys.time >= MIN_BLOCK_SPARSE_SCORES
    large = long or (packed and time >= FLEX_BLOCK)
    own = cuda and keys is queries and time >= FLEX_BLOCK and torch.is_grad_enabled()
    by_distance = score_mod.distance_bias is not None and score_mod.fused and queries.consecutive
    if score_mod.by_query is not None and keys is queries and isinstance(pattern, Causal | Full):
        from allyouneed.nn.ops.attention.by_distance import AttentionByDistance, Sentences  # registers operators

        if Sentences.known(queries):
            causal = isinstance(pattern, Causal)
            return AttentionByDistance(Sentences(queries), causal, lambda: dense(pattern, queries, keys))
    if own and by_distance and isinstance(pattern, Causal | Full):
        return tiled(pattern, queries, score_mod.constant_from)
    # a bias inside the kernel, in training: prompts have many lengths, and each would be compiled
    pairwise = plain or (score_mod.pair_bias is not None and score_mod.fused and torch.is_grad_enabled())
    if own and large and plain and time <= LONGEST_TILED and _whole_rows(queries) is not None:
        return tiled_or_flex(pattern, queries)
    if cuda and pairwise and large:
        return flex(pattern, queries, keys)
    return block_sparse_or_dense(pattern, queries, keys) if long else dense(pattern, queries, keys)


def tiled(pattern: Pattern, layout: TokenLayout, constant_from: int | None) -> Tiled:
    """Our own kernels for self-attention, masks computed; `Causal` or `Full`."""

    def plan() -> Tiled:
        from allyouneed.nn.ops.attention.tiled import Tiled

        parts = [BlockLayout(pattern, layout, layout, FLEX_BLOCK)]
        return Tiled(pattern, parts, layout, lambda: block_sparse_or_dense(pattern, layout, layout), constant_from)

    rows = _whole_rows(layout)
    return _keep((tiled, pattern, rows and (*rows, constant_from), layout.device), plan)


def tiled_or_flex(pattern: Pattern, layout: TokenLayout) -> Tiled | Flex:
    """Self-attention over whole rows. Our kernels where they save work: blocks of 64 tokens waste much less than those
    of 128 (BigBird), or tokens need another order, in which they are read instead of copied (dilated and strided
    patterns). Otherwise FlexAttention."""

    def plan() -> Tiled | Flex:
        from allyouneed.nn.ops.attention.tiled import Tiled

        parts = block_layouts(pattern, layout, layout, BLOCK)
        large = BlockLayout(pattern, layout, layout, FLEX_BLOCK)
        ordered = len(parts) == 1 and not parts[0].query.sorted
        if ordered and parts[0].area > 0.75 * large.area:
            return flex(pattern, layout, layout)
        return Tiled(pattern, parts, layout, lambda: flex(pattern, layout, layout))

    return _keep((tiled_or_flex, pattern, _whole_rows(layout), layout.device), plan)


def flex(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> Flex:
    """FlexAttention."""

    def plan() -> Flex:
        parts = block_layouts(pattern, queries, keys, FLEX_BLOCK, rounded=True)
        return Flex(parts, lambda: block_sparse_or_dense(pattern, queries, keys))

    rows = [_whole_rows(side) for side in (queries, keys)]
    return _keep((Flex, pattern, None if None in rows else (*rows, keys is queries), queries.device), plan)


def _keep(key: tuple[Hashable, ...], make: Callable[[], P]) -> P:
    """The plan for whole rows depends on their length only: it is kept, so that later passes neither build it again nor
    wait for the device."""
    if None in key:
        return make()
    if key not in _plans:
        while len(_plans) >= MAX_PLANS:
            _plans.pop(next(iter(_plans)))
        _plans[key] = make()
    return _plans[key]


_plans: dict[Hashable, Any] = {}
MAX_PLANS = 64


def _whole_rows(layout: TokenLayout) -> tuple[int, int] | None:
    """First position and length, if nothing else matters: rows are one sentence each, without padding or marks."""
    marks = (layout.segments, layout.prompt, layout.chosen, layout.order)
    return None if layout.start is None or any(x is not None for x in marks) else (layout.start, layout.time)


def block_sparse_or_dense(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
    if pattern.mean_keys(keys.time, 16) < 0.4 * keys.time:  # an estimate that skips the block search for dense patterns
        parts = block_layouts(pattern, queries, keys, BLOCK)
        if sum(part.area for part in parts) < 0.6 * queries.time * keys.time:
            return BlockSparse(parts)
    return dense(pattern, queries, keys)


def dense(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
    return DenseAttention(dense_mask(pattern, queries, keys), queries.positions, keys.positions)


MIN_BLOCK_SPARSE_SCORES = 512 * 1024  # scores; below this, dense attention is faster than the block search
BLOCK = 64
LONGEST_TILED = 1 << 17  # tokens: all pairs of blocks are tested


def block_layouts(
    pattern: Pattern, queries: TokenLayout, keys: TokenLayout, block: int, rounded: bool = False
) -> list[BlockLayout]:
    """Non-empty blocks of a pattern, in one token order or in several, whichever is cheaper."""
    full = BlockLayout(pattern, queries, keys, block, rounded)
    alternatives = disjoint_alternatives(pattern)
    if len(alternatives) == 1:
        return [full]
    if queries.packed:  # counting its blocks would wait for a GPU
        several_save = _keep(
            (block_layouts, pattern, queries.time, keys.time, block),
            partial(_save_in_rows, pattern, queries.time, keys.time, block),
        )
        return [BlockLayout(one, queries, keys, block, rounded) for one in alternatives] if several_save else [full]
    several = [BlockLayout(one, queries, keys, block, rounded) for one in alternatives]
    return several if 1.5 * sum(part.area for part in several) < full.area else [full]


def _save_in_rows(pattern: Pattern, queries: int, keys: int, block: int) -> bool:
    """Whether several token orders save work in packed rows, of which the host knows the lengths only. They have to
    save more than in whole rows: sentences are shorter, and have few blocks far from the diagonal."""
    rows = {time: TokenLayout(torch.arange(time)[None], start=0) for time in (queries, keys)}
    areas = [
        BlockLayout(one, rows[queries], rows[keys], block).area for one in (pattern, *disjoint_alternatives(pattern))
    ]
    return 3 * sum(areas[1:]) < areas[0]


def full(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, is_causal=True, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])
