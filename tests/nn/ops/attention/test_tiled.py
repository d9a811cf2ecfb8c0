"""Plans of our attention kernels (the kernels themselves: bench/check/attention.py): their tables and masks allow the
pairs of the pattern, seen from the queries and from the keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.dense import ScoreMod, dense_mask
from allyouneed.nn.ops.attention.select import block_layouts, dense
from allyouneed.nn.ops.attention.tiled import Tiled
from allyouneed.nn.patterns.core import Causal, Full
from any_part import patterns

BLOCK = 8
FIELDS = 6


def whole(time):
    return TokenLayout.of(Rows(torch.zeros(2, time, dtype=torch.long)))


def packed(*rows):
    longest = max(map(sum, rows)) + 3
    segments = [[n for n, size in enumerate(row, 1) for _ in range(size)] for row in rows]
    segments = torch.tensor([row + [0] * (longest - len(row)) for row in segments])
    return TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))


def padded(side, *lengths):
    return TokenLayout.of(Rows(torch.zeros(len(lengths), max(lengths)).long(), torch.tensor(lengths), side=side))


def pairs(plan, time, computed, near=99):
    """How often each pair of tokens is visited, from either side: (rows, queries, keys) each."""
    both = []
    for side in (0, 1):
        seen = None
        for start in range(0, len(plan), FIELDS):
            order, *tables, masks = plan[start : start + FIELDS]
            counts, entries = tables[2 * side : 2 * side + 2]
            _, rows, blocks, _ = entries.shape
            order = order if len(order) else torch.arange(blocks * BLOCK)
            slots = blocks * BLOCK
            grid = torch.zeros(rows, slots, slots, dtype=torch.long)
            for row in range(rows):
                for here in range(blocks):
                    far, full, some = counts[:, row, here].tolist()
                    for n in range(some):
                        there, tile = entries[:, row, here, n].tolist()
                        q, k = (there, here) if side else (here, there)
                        assert (abs(q - k) >= near) == (n < far) or n >= full
                        q_slot, k_slot = (BLOCK * b + torch.arange(BLOCK) for b in (q, k))
                        kept = torch.ones(BLOCK, BLOCK, dtype=torch.long)
                        if n >= full:
                            kept = computed(row, q_slot[:, None], k_slot) if computed else masks[tile].long()
                        grid[row, q * BLOCK : (q + 1) * BLOCK, k * BLOCK : (k + 1) * BLOCK] += kept
            tokens = torch.zeros(rows, time, time, dtype=torch.long)
            at = order[:time].long()
            tokens[:, at[:, None], at] = grid[:, :time, :time]
            seen = tokens if seen is None else seen + tokens
        both.append(seen)
    return both


@settings(max_examples=25)
@given(patterns(), st.integers(1, 40))
def test_stored_tiles_allow_the_pairs_of_the_pattern(pattern, time):
    layout = whole(time)
    plan = Tiled(pattern, block_layouts(pattern, layout, layout, BLOCK), layout, lambda: None)
    if plan.computed:
        return
    truth = dense_mask(pattern, layout, layout)[:, 0].expand(-1, time, time)
    for found in pairs(plan.plan, time, None):
        assert torch.equal(found, truth.long())


@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize(
    "layout", [whole(20), packed([3, 17, 9], [30]), padded("right", 20, 9), padded("left", 20, 9)],
    ids=["whole", "packed", "padded right", "padded left"],
)  # fmt: skip
@pytest.mark.parametrize(("constant_from", "near"), [(1, 1), (2, 2), (9, 2), (10, 3)])
def test_computed_masks_allow_the_pairs_of_the_pattern(pattern, layout, constant_from, near):
    """And full blocks whose pairs are all `constant_from` apart come first."""
    parts, time = block_layouts(pattern, layout, layout, BLOCK), layout.time
    plan = Tiled(pattern, parts, layout, lambda: None, constant_from)
    assert plan.near == near
    rows = 1 if layout.segments is None else len(layout.segments)
    segments = torch.ones(rows, time).int() if plan.segments is None else plan.segments
    segments = torch.nn.functional.pad(segments, (0, BLOCK))

    def computed(row, q, k):
        """As the kernels do."""
        seen = (k < time) & ((k <= q) | (not plan.causal))
        if plan.masked_by:
            seen = seen & (segments[row, k.clamp(max=time)] > 0)
        if plan.masked_by > 1:
            seen = seen & (segments[row, k.clamp(max=time)] == segments[row, q.clamp(max=time)])
        return seen.long()

    real = segments[:, :time, None] > 0  # queries of padding may see anything
    truth = dense_mask(pattern, layout, layout)[:, 0].expand(rows, time, time)
    for found in pairs(plan.plan, time, computed, near):
        assert torch.equal(found * real, (truth & real).long())


def test_without_a_gpu_the_fallback_is_called():
    layout = whole(20)
    plan = Tiled(
        Causal(), block_layouts(Causal(), layout, layout, BLOCK), layout, lambda: dense(Causal(), layout, layout)
    )
    q, k, v = torch.randn(3, 2, 2, 20, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(plan(q, k, v, 0.0, ScoreMod(0.25)), expected)
