"""Each pattern against its paper's definition for single pairs, and against its own block bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.block_mask import BlockedTokens, BlockLayout, BlockRanges, disjoint_alternatives
from allyouneed.nn.patterns.core import Pattern, SameSegment, TokenFields
from any_layout import random_layout
from any_part import atoms, patterns

N = 41

DEFINITIONS = {
    "strided(4)": lambda q, k: (q - k) % 4 == 0,
    "block(5)": lambda q, k: q // 5 == k // 5,
    "block-window(4, 2)": lambda q, k: abs(q // 4 - k // 4) <= 1,
    "dilated(3, 4)": lambda q, k: abs(q - k) in (0, 4, 8),
    "self": lambda q, k: q == k,
    "global(3)": lambda q, k: 3 in (q, k),
    "global-prefix(3)": lambda q, k: q < 3 or k < 3,
    # Child et al. 2019, 4.3: A(1) = {t, t+1, …, i}, t = max(0, i − l); A(2) = {j : (i − j) mod l = 0}
    "causal & (window(8) | strided(8))": lambda i, j: j <= i and (i - j < 8 or (i - j) % 8 == 0),
    # A(1) = {j : ⌊j / l⌋ = ⌊i / l⌋}, A(2) = {j : j mod l ∈ {t, t + 1, …, l − 1}}, t = l − c
    "causal & (block(8) | fixed(8, 2))": lambda i, j: j <= i and (j // 8 == i // 8 or j % 8 in (6, 7)),
}


@pytest.mark.parametrize("text", DEFINITIONS)
def test_masks_match_the_definition(text):
    expected = [[DEFINITIONS[text](q, k) for k in range(N)] for q in range(N)]
    assert Pattern.from_text(text).mask(N, N).tolist() == expected


def test_pictures():
    pictures = {
        "causal & strided(3)": "█····\n·█···\n··█··\n█··█·\n·█··█",
        "block(2) | global(0)": "█████\n██···\n█·██·\n█·██·\n█···█",
        "dilated(2, 2)": "█·█··\n·█·█·\n█·█·█\n·█·█·\n··█·█",
    }
    for text, picture in pictures.items():
        assert Pattern.from_text(text).picture(5) == picture


def test_random_blocks_draw_earlier_blocks_independent_of_length():
    pattern = Pattern.from_text("random-blocks(4, 3, 7)")
    long, short = pattern.mask(400, 400), pattern.mask(90, 90)
    assert torch.equal(long[:90, :90], short)
    assert torch.equal(long, long.T)
    blocks = long[::4, ::4]
    assert torch.equal(blocks.repeat_interleave(4, 0).repeat_interleave(4, 1), long)
    assert not blocks.diagonal().any()
    drawn = blocks.tril().sum(1)[12:]  # beyond the first few, two draws of three rarely meet
    assert drawn.max() == 3 and 2.6 < drawn.double().mean() <= 3


@pytest.mark.parametrize("whole", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "text",
    ["random-blocks(3, 2, 5)", "causal & ~random-blocks(1, 3, 0) | block(4)", "window(3) | random-blocks(7, 1, 9)"],
)
def test_lookup_tables_match_allowed(text, whole):
    """`quick` evaluates single pairs, also with int32 positions."""
    pattern, at = Pattern.from_text(text), torch.arange(50)
    query, key = (TokenFields(x.to(whole), torch.ones_like(x)) for x in (at[:, None], at[None]))
    assert pattern.quick(lambda: 50, at.device)(query, key).equal(pattern.mask(50, 50))
    assert pattern.allowed(query, key).equal(pattern.mask(50, 50))


def test_random_blocks_are_spread_evenly_and_change_with_the_seed():
    one, other = (Pattern.from_text(f"random-blocks(1, 2, {seed})").mask(600, 600) for seed in (0, 1))
    key, query = one.tril().T.nonzero(as_tuple=True)
    where = torch.histc(((key + 0.5) / query)[query > 20], 5, 0, 1)
    assert where.min() > 0.75 * where.mean()
    assert (one & other).sum() < 0.1 * one.sum()


def test_patterns_over_batch_marks():
    order = torch.tensor([[2, 0, 3, 1]])
    chosen, prompt = torch.tensor([[False, True, False, False]]), torch.tensor([[True, True, False, False]])
    here = TokenLayout.of(Rows(torch.zeros(1, 4, dtype=torch.long), chosen=chosen, prompt=prompt, order=order))

    def mask(text):
        return Pattern.from_text(text).allowed(here.fields(1), here.fields(2)).expand(1, 4, 4)[0].tolist()

    yes, places = [1], range(4)
    assert mask("chosen") == [[q in yes or k in yes for k in places] for q in places]
    assert mask("causal | prompt") == [[k <= q or k < 2 for k in places] for q in places]
    said = order[0].tolist()
    assert mask("permuted") == [[said[k] <= said[q] for k in places] for q in places]
    assert mask("permuted & ~self") == [[said[k] < said[q] for k in places] for q in places]


def test_a_batch_without_marks():
    assert not Pattern.from_text("chosen").mask(5, 5).any()
    assert not Pattern.from_text("prompt").mask(5, 5).any()
    assert Pattern.from_text("permuted").mask(5, 5).all()


# --- bounds for tiles -----------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(patterns(), st.integers(1, 40), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_block_bounds_are_conservative(pattern, time, block, seed, packed):
    layout = random_layout(time, seed, packed)
    side = BlockedTokens(pattern, layout, 2, block)
    sides = [torch.arange(2), torch.arange(side.blocks), torch.arange(side.blocks)]
    row, q, k = torch.cartesian_prod(*sides).unbind(1)
    query, key = BlockRanges(side, 0, row, q), BlockRanges(side, 0, row, k)
    shape = (2, time, time)
    truth = pattern.allowed(layout.fields(1), layout.fields(2)).expand(shape).flatten(1)
    where = (side.tokens % time).view(2, side.blocks, block)
    pairs = where[row, q][:, :, None] * time + where[row, k][:, None]  # (tiles, block, block)
    real = side.real.view(2, side.blocks, block)
    counts = (real[row, q][:, :, None] & real[row, k][:, None]).flatten(1)  # padding does not count
    inside = truth[row[:, None, None], pairs].flatten(1)
    some, every = (ask(query, key).expand(len(row)) for ask in (pattern.some, pattern.every))
    assert (some | ~(inside & counts).any(1)).all()
    assert ((inside | ~counts).all(1) | ~every).all()


@pytest.mark.parametrize("pattern", [p for p in atoms() if not isinstance(p, SameSegment)], ids=str)
def test_blocks_of_one_token_are_the_mask(pattern):
    """The bounds of a single token leave nothing open (only `every` of a few may, which costs time, not truth)."""
    layout = random_layout(23, 5)
    part = BlockLayout(pattern, layout, layout, 1)
    found = torch.zeros(2, 23, 23, dtype=torch.bool)
    where = (part.query.tokens % 23).view(2, 23)
    found[part.row, where[part.row, part.q], where[part.row, part.k]] = True
    real = layout.segments > 0
    truth = pattern.allowed(layout.fields(1), layout.fields(2)) & real[:, None] & real[:, :, None]
    assert torch.equal(found, truth)


@given(patterns())
def test_alternatives_partition_the_pattern(pattern):
    masks = [one.mask(17, 17).int() for one in disjoint_alternatives(pattern)]
    assert torch.equal(sum(masks), pattern.mask(17, 17).int())


def test_the_sparse_transformer_is_computed_in_two_orders():
    pattern = Pattern.from_text("causal & (window(16) | strided(16))")
    assert [one.modulus for one in disjoint_alternatives(pattern)] == [1, 16]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("causal & window(32)", 64),
        ("causal & (window(32) | prefix(4))", 96),
        ("window(32) | global(0)", 144),
        ("dilated(8, 16)", 64),
        ("causal & block(32)", 32),
        ("block-window(16, 2) | global-prefix(16) | random-blocks(16, 2, 0)", 16 * 9),
    ],
)
def test_blocks_of_bounded_patterns_grow_linearly(text, most):
    for time in (512, 1024, 4096):
        layout = TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long)))
        assert BlockLayout(Pattern.from_text(text), layout, layout, 16).area <= most * time


def test_marked_tokens_are_sorted_together():
    time = 4096
    chosen = torch.zeros(1, time, dtype=torch.bool)
    chosen[:, ::256] = True  # 16 of them, each in a block of its own
    layout = TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long), chosen=chosen))
    assert BlockLayout(Pattern.from_text("window(16) | chosen"), layout, layout, 16).area < 7 * 16 * time
    fixed = BlockLayout(Pattern.from_text("causal & (block(64) | fixed(64, 1))"), layout, layout, 16)
    assert fixed.area < 2 * 64 * time  # a block of 64, one column in 64 of what lies before, and the rims of tiles
