"""Block-sparse attention against the dense mask: any pattern, odd lengths, every score_mod; outputs and gradients,
fp64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention import flex
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.ops.attention.block_mask import BlockLayout, disjoint_alternatives
from allyouneed.nn.ops.attention.block_sparse import BlockSparse
from allyouneed.nn.ops.attention.dense import DenseAttention, ScoreMod, dense_mask
from allyouneed.nn.patterns.core import Causal, Pattern
from any_layout import random_layout
from any_part import atoms, patterns

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 8
TABLE = torch.randn(HEADS, 301, generator=torch.Generator().manual_seed(3), dtype=torch.double).requires_grad_()


def learned(q, queries, keys, scale):
    """A learned bias by distance, like T5's."""
    far = (keys[:, None, :] - queries[:, :, None]).clamp(-150, 150) + 150
    return TABLE[:, far].transpose(0, 1)


def turned(q, k, queries, keys):
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


def shifted(weights, queries, keys):
    return (weights * (queries[:, None, :, None] - keys[:, None, None, :])).sum(-1, keepdim=True) / 50


MANNERS = {
    "plain": ScoreMod(0.4),
    "bias": ScoreMod(0.4, bias=learned),
    "shared bias": ScoreMod(0.4, bias=learned, static="learned"),
    "cap": ScoreMod(0.4, cap=1.5),
    "own score": ScoreMod(1.0, score=turned, bias=learned),
    "values": ScoreMod(0.4, values=shifted),
}


def tensors(batch, queries, keys, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, HEADS, queries), (batch, kv_heads, keys), (batch, kv_heads, keys)]
    return [torch.randn(*s, HEAD_WIDTH, generator=generator, dtype=torch.double).requires_grad_() for s in shapes]


def compare(execute, pattern, queries, keys, score_mod, batch, kv_heads=KV_HEADS):
    inputs = tensors(batch, queries.time, keys.time, kv_heads)
    real = torch.ones(1, queries.time, dtype=torch.bool) if queries.real is None else queries.real
    real = real[:, None, :, None]
    noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.double) * real
    wanted = [*inputs, TABLE] if score_mod.bias is not None else inputs
    results = []
    for way in (execute, DenseAttention(dense_mask(pattern, queries, keys), queries.positions, keys.positions)):
        out = way(*inputs, 0.0, score_mod)
        gradients = torch.autograd.grad((out * noise).sum(), wanted, materialize_grads=True)
        results.append([out * real, *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    patterns(),
    st.sampled_from([1, 5, 63, 100, 129]),
    st.sampled_from([3, 8, 32]),
    st.sampled_from(list(MANNERS)),
    st.integers(0, 99),
    st.booleans(),
)
@example(Pattern.from_text("causal & (window(7) | strided(7))"), 129, 8, "plain", 0, True)
@example(Pattern.from_text("causal & (window(7) | strided(7))"), 129, 8, "bias", 0, True)
@example(Pattern.from_text("causal & (window(7) | strided(7))"), 100, 8, "values", 0, True)
@example(Pattern.from_text("dilated(4, 3) | strided(6) | global(5)"), 63, 8, "cap", 0, True)
@example(~Pattern.from_text("full"), 63, 8, "bias", 0, False)
def test_block_sparse_matches_the_dense_mask(pattern, time, block, score_mod, seed, split):
    layout = random_layout(time, seed)
    parts = [
        BlockLayout(one, layout, layout, block) for one in (disjoint_alternatives(pattern) if split else [pattern])
    ]
    compare(BlockSparse(parts), pattern, layout, layout, MANNERS[score_mod], batch=2)


@settings(max_examples=20, deadline=None)
@given(patterns(), st.integers(0, 99), st.sampled_from(list(MANNERS)))
def test_block_sparse_over_packed_rows(pattern, seed, score_mod):
    layout = random_layout(60, seed, packed=True)
    compare(
        BlockSparse([BlockLayout(pattern, layout, layout, 8)]), pattern, layout, layout, MANNERS[score_mod], batch=2
    )


@pytest.mark.parametrize("score_mod", MANNERS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_equal_rows_and_grouped_query_heads(score_mod, kv_heads):
    pattern = Pattern.from_text("causal & (window(9) | prefix(2))")
    layout = TokenLayout.of(Rows(torch.zeros(3, 70, dtype=torch.long)))
    compare(
        BlockSparse([BlockLayout(pattern, layout, layout, 16)]),
        pattern,
        layout,
        layout,
        MANNERS[score_mod],
        3,
        kv_heads,
    )


@pytest.mark.parametrize("score_mod", ["plain", "bias"])
def test_block_sparse_cross_attention_matches_the_dense_mask(score_mod):
    queries = TokenLayout.of(Rows(torch.zeros(2, 50, dtype=torch.long), torch.tensor([50, 20]), side="left"))
    keys = TokenLayout.of(Rows(torch.zeros(2, 75, dtype=torch.long), torch.tensor([33, 75])))
    pattern = Pattern.from_text("window(6) | strided(5)")
    parts = [BlockLayout(one, queries, keys, 8) for one in disjoint_alternatives(pattern)]
    compare(BlockSparse(parts), pattern, queries, keys, MANNERS[score_mod], batch=2)


def test_dropout_drops_weights_and_keeps_their_mean():
    pattern, layout = Pattern.from_text("causal & (window(20) | strided(20))"), random_layout(80, 0)
    q, k, v = tensors(2, 80, 80)
    tiled = BlockSparse([BlockLayout(one, layout, layout, 16) for one in disjoint_alternatives(pattern)])
    torch.manual_seed(0)
    plain = tiled(q, k, v, 0.0, MANNERS["plain"])
    many = torch.stack([tiled(q, k, v, 0.3, MANNERS["plain"]) for _ in range(200)])
    assert not torch.equal(many[0], many[1])
    assert (many.mean(0) - plain).abs().mean() < 4 * (many.std(0).mean() / 200**0.5)


@pytest.mark.parametrize("text", ["causal & (window(20) | strided(40))", "window(9) | chosen", "dilated(5, 3)"])
def test_flex_with_the_same_blocks(text, monkeypatch):
    """FlexAttention's eager definition, forward only, on sorted and padded tokens."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda: flex_attention)
    pattern = Pattern.from_text(text)
    for layout in (random_layout(300, 1), TokenLayout.of(Rows(torch.zeros(2, 300, dtype=torch.long)))):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 2, 300, 16, generator=generator) for _ in range(3))
        parts = [
            BlockLayout(one, layout, layout, flex.FLEX_BLOCK // 2, rounded=True)
            for one in disjoint_alternatives(pattern)
        ]
        assert (parts[0].query.used, parts[0].query.blocks) == (5, 6)
        found = flex.Flex(parts, lambda: attend.full)(q, k, v, 0.0, ScoreMod(0.25))
        expected = DenseAttention(dense_mask(pattern, layout, layout), layout.positions, layout.positions)(
            q, k, v, 0.0, ScoreMod(0.25)
        )
        real = 1.0 if layout.real is None else layout.real[:, None, :, None]
        torch.testing.assert_close(found * real, expected * real, atol=1e-5, rtol=1e-5)


# each reads other fields or other operations; the rest is compiled in `make test-all`
TRACED = (
    "window(3)",
    "same-segment",
    "dilated(3, 2)",
    "segment-dilated(3, 2, 3)",
    "random-blocks(3, 2, 3)",
    "chosen",
    "permuted",
)


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(one, marks=() if str(one) in TRACED else pytest.mark.slow) for one in atoms()],
    ids=str,
)
def test_every_pattern_can_be_compiled(pattern, monkeypatch):
    """FlexAttention traces `allowed`: only integer and boolean tensor operations."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda: flex_attention)
    torch._dynamo.reset()
    layout = random_layout(20, 1)
    q, k, v = (torch.randn(2, 1, 20, 16) for _ in range(3))
    found = flex.Flex([BlockLayout(Causal() & ~pattern, layout, layout, flex.FLEX_BLOCK)], lambda: attend.full)
    dense = DenseAttention(dense_mask(Causal() & ~pattern, layout, layout), layout.positions, layout.positions)
    real = layout.real[:, None, :, None]
    score_mod = ScoreMod(0.25)
    torch.testing.assert_close(
        found(q, k, v, 0.0, score_mod) * real, dense(q, k, v, 0.0, score_mod) * real, atol=1e-5, rtol=0
    )


def test_a_kernel_is_compiled_once_for_a_pattern_and_a_length(monkeypatch):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(flex_attention, backend="eager", dynamic=False)
    monkeypatch.setattr(flex, "_compiled_flex", lambda: compiled)
    for seed in range(3):
        layout = random_layout(40, seed)
        q, k, v = (torch.randn(2, 1, 40, 16) for _ in range(3))
        part = BlockLayout(Pattern.from_text("window(9) | chosen"), layout, layout, flex.FLEX_BLOCK)
        flex.Flex([part], lambda: attend.full)(q, k, v, 0.0, ScoreMod(0.25))
    assert counters["stats"]["unique_graphs"] == 1


# --- the choice -----------------------------------------------------------------------------------------------------


def whole_row(time):
    return TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long)))


@pytest.mark.parametrize(
    ("text", "time", "path"),
    [
        ("causal & window(64)", 2048, BlockSparse),
        ("causal & window(64)", 300, DenseAttention),  # too short to be worth it
        ("causal & window(1500)", 2048, DenseAttention),  # too wide
        ("full & causal", 2048, DenseAttention),
        ("causal & (window(32) | strided(32))", 2048, BlockSparse),
        ("window(64) | global(0)", 2048, BlockSparse),
        ("~window(64)", 2048, DenseAttention),
    ],
)
def test_sparse_patterns_select_block_sparse(text, time, path):
    layout = whole_row(time)
    assert type(attend.select_attention(Pattern.from_text(text), layout, layout, ScoreMod(1.0))) is path


def test_long_sentences_in_packed_rows_use_block_sparse():
    segments = torch.cat([torch.full((1, 1500), 1), torch.full((1, 20), 2)], 1)
    layout = TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))
    pattern = Pattern.from_text("causal & window(40)")
    q, k, v = (x.detach() for x in tensors(1, 1520, 1520))
    found = attend.select_attention(pattern, layout, layout, MANNERS["plain"])(q, k, v, 0.0, MANNERS["plain"])
    dense = DenseAttention(dense_mask(pattern, layout, layout), layout.positions, layout.positions)
    torch.testing.assert_close(found, dense(q, k, v, 0.0, MANNERS["plain"]), atol=1e-9, rtol=1e-9)


def test_saved_memory_does_not_grow_with_the_window():
    """Block-sparse attention saves q, k, v, out and lse, not the gathered keys."""
    layout = whole_row(1024)
    q, k, v = tensors(1, 1024, 1024, HEADS)
    sizes = []
    for window in (16, 256):
        kept = []
        tiled = BlockSparse([BlockLayout(Pattern.from_text(f"causal & window({window})"), layout, layout, 64)])

        def keep(x, kept=kept):
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            tiled(q, k, v, 0.0, ScoreMod(1.0))
        sizes.append(sum(kept))
    assert sizes[0] == sizes[1] <= 4.2 * q.numel()


def test_a_causal_sentence_uses_is_causal():
    layout = whole_row(2048)
    assert attend.select_attention(Causal(), layout, layout, ScoreMod(1.0)) is attend.causal
