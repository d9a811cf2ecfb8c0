"""Attention over tiles against the dense mask: any pattern, odd lengths, every manner; outputs and gradients, fp64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Facts
from allyouneed.nn.ops.attention import flex
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.ops.attention.block_mask import Tiling, apart
from allyouneed.nn.ops.attention.block_sparse import Tiled
from allyouneed.nn.ops.attention.dense import Dense, Manner, dense_mask
from allyouneed.nn.patterns.core import Causal, Pattern
from any_layout import some_facts
from any_part import atoms, patterns

HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 8
TABLE = torch.randn(HEADS, 301, generator=torch.Generator().manual_seed(3), dtype=torch.double).requires_grad_()


def learned(q, queries, keys, scale):
    """A bias by distance with parameters of its own, as T5's."""
    far = (keys[:, None, :] - queries[:, :, None]).clamp(-150, 150) + 150
    return TABLE[:, far].transpose(0, 1)


def turned(q, k, queries, keys):
    return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


def shifted(weights, queries, keys):
    return (weights * (queries[:, None, :, None] - keys[:, None, None, :])).sum(-1, keepdim=True) / 50


MANNERS = {
    "plain": Manner(0.4),
    "bias": Manner(0.4, bias=learned),
    "shared bias": Manner(0.4, bias=learned, static="learned"),
    "cap": Manner(0.4, cap=1.5),
    "own score": Manner(1.0, score=turned, bias=learned),
    "values": Manner(0.4, values=shifted),
}


def tensors(batch, queries, keys, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, HEADS, queries), (batch, kv_heads, keys), (batch, kv_heads, keys)]
    return [torch.randn(*s, HEAD_WIDTH, generator=generator, dtype=torch.double).requires_grad_() for s in shapes]


def compare(execute, pattern, queries, keys, manner, batch, kv_heads=KV_HEADS):
    inputs = tensors(batch, queries.time, keys.time, kv_heads)
    real = torch.ones(1, queries.time, dtype=torch.bool) if queries.real is None else queries.real
    real = real[:, None, :, None]
    noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.double) * real
    wanted = [*inputs, TABLE] if manner.bias is not None else inputs
    results = []
    for way in (execute, Dense(dense_mask(pattern, queries, keys), queries.positions, keys.positions)):
        out = way(*inputs, 0.0, manner)
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
def test_tiles_are_the_dense_mask(pattern, time, block, manner, seed, split):
    facts = some_facts(time, seed)
    parts = [Tiling(one, facts, facts, block) for one in (apart(pattern) if split else [pattern])]
    compare(Tiled(parts), pattern, facts, facts, MANNERS[manner], batch=2)


@settings(max_examples=20, deadline=None)
@given(patterns(), st.integers(0, 99), st.sampled_from(list(MANNERS)))
def test_tiles_of_packed_rows(pattern, seed, manner):
    facts = some_facts(60, seed, packed=True)
    compare(Tiled([Tiling(pattern, facts, facts, 8)]), pattern, facts, facts, MANNERS[manner], batch=2)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_rows_that_are_alike_and_heads_that_share_keys(manner, kv_heads):
    pattern = Pattern.from_text("causal & (window(9) | prefix(2))")
    facts = Facts.of(Rows(torch.zeros(3, 70, dtype=torch.long)))
    compare(Tiled([Tiling(pattern, facts, facts, 16)]), pattern, facts, facts, MANNERS[manner], 3, kv_heads)


@pytest.mark.parametrize("manner", ["plain", "bias"])
def test_queries_and_keys_of_two_sentences(manner):
    queries = Facts.of(Rows(torch.zeros(2, 50, dtype=torch.long), torch.tensor([50, 20]), side="left"))
    keys = Facts.of(Rows(torch.zeros(2, 75, dtype=torch.long), torch.tensor([33, 75])))
    pattern = Pattern.from_text("window(6) | strided(5)")
    parts = [Tiling(one, queries, keys, 8) for one in apart(pattern)]
    compare(Tiled(parts), pattern, queries, keys, MANNERS[manner], batch=2)


def test_dropout_drops_weights_and_keeps_their_mean():
    pattern, facts = Pattern.from_text("causal & (window(20) | strided(20))"), some_facts(200, 0)
    q, k, v = tensors(2, 200, 200)
    tiled = Tiled([Tiling(one, facts, facts, 16) for one in apart(pattern)])
    torch.manual_seed(0)
    plain = tiled(q, k, v, 0.0, MANNERS["plain"])
    many = torch.stack([tiled(q, k, v, 0.3, MANNERS["plain"]) for _ in range(200)])
    assert not torch.equal(many[0], many[1])
    assert (many.mean(0) - plain).abs().mean() < 4 * (many.std(0).mean() / 200**0.5)


@pytest.mark.parametrize("text", ["causal & (window(20) | strided(40))", "window(9) | chosen", "dilated(5, 3)"])
def test_flex_over_the_same_tiles(text, monkeypatch):
    """FlexAttention's own eager definition, forward only, on tokens sorted, filled up and joined again."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda: flex_attention)
    pattern = Pattern.from_text(text)
    for facts in (some_facts(300, 1), Facts.of(Rows(torch.zeros(2, 300, dtype=torch.long)))):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 2, 300, 16, generator=generator) for _ in range(3))
        parts = [Tiling(one, facts, facts, flex.FLEX_BLOCK // 2, rounded=True) for one in apart(pattern)]
        assert (parts[0].query.used, parts[0].query.blocks) == (5, 6)
        found = flex.Flex(parts, lambda: attend.whole)(q, k, v, 0.0, Manner(0.25))
        expected = Dense(dense_mask(pattern, facts, facts), facts.positions, facts.positions)(
            q, k, v, 0.0, Manner(0.25)
        )
        real = 1.0 if facts.real is None else facts.real[:, None, :, None]
        torch.testing.assert_close(found * real, expected * real, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", atoms(), ids=str)
def test_every_pattern_can_be_compiled(pattern, monkeypatch):
    """FlexAttention traces `allowed`: whole-number and boolean operations on places, nothing that builds a pattern."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda: flex_attention)
    torch._dynamo.reset()
    facts = some_facts(20, 1)
    q, k, v = (torch.randn(2, 1, 20, 16) for _ in range(3))
    found = flex.Flex([Tiling(Causal() & ~pattern, facts, facts, flex.FLEX_BLOCK)], lambda: attend.whole)
    dense = Dense(dense_mask(Causal() & ~pattern, facts, facts), facts.positions, facts.positions)
    real = facts.real[:, None, :, None]
    manner = Manner(0.25)
    torch.testing.assert_close(
        found(q, k, v, 0.0, manner) * real, dense(q, k, v, 0.0, manner) * real, atol=1e-5, rtol=0
    )


def test_a_kernel_is_compiled_once_for_a_pattern_and_a_length(monkeypatch):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(flex_attention, backend="eager", dynamic=False)
    monkeypatch.setattr(flex, "_compiled_flex", lambda: compiled)
    for seed in range(3):
        facts = some_facts(40, seed)
        q, k, v = (torch.randn(2, 1, 40, 16) for _ in range(3))
        part = Tiling(Pattern.from_text("window(9) | chosen"), facts, facts, flex.FLEX_BLOCK)
        flex.Flex([part], lambda: attend.whole)(q, k, v, 0.0, Manner(0.25))
    assert counters["stats"]["unique_graphs"] == 1


# --- the choice -----------------------------------------------------------------------------------------------------


def whole_row(time):
    return Facts.of(Rows(torch.zeros(1, time, dtype=torch.long)))


@pytest.mark.parametrize(
    ("text", "time", "path"),
    [
        ("causal & window(64)", 2048, Tiled),
        ("causal & window(64)", 300, Dense),  # too short to be worth it
        ("causal & window(1500)", 2048, Dense),  # too wide
        ("full & causal", 2048, Dense),
        ("causal & (window(32) | strided(32))", 2048, Tiled),
        ("window(64) | global(0)", 2048, Tiled),
        ("~window(64)", 2048, Dense),
    ],
)
def test_tiles_are_chosen_where_there_is_little_to_see(text, time, path):
    facts = whole_row(time)
    assert type(attend.plan(Pattern.from_text(text), facts, facts, Manner(1.0))) is path


def test_a_long_sentence_in_a_packed_row_gets_tiles_too():
    segments = torch.cat([torch.full((1, 1500), 1), torch.full((1, 20), 2)], 1)
    facts = Facts.of(Rows(torch.zeros_like(segments), segments=segments))
    pattern = Pattern.from_text("causal & window(40)")
    q, k, v = (x.detach() for x in tensors(1, 1520, 1520))
    found = attend.plan(pattern, facts, facts, MANNERS["plain"])(q, k, v, 0.0, MANNERS["plain"])
    dense = Dense(dense_mask(pattern, facts, facts), facts.positions, facts.positions)
    torch.testing.assert_close(found, dense(q, k, v, 0.0, MANNERS["plain"]), atol=1e-9, rtol=1e-9)


def test_what_is_kept_for_backward_does_not_grow_with_the_window():
    """Plain attention over tiles keeps q, k, v, the result and its denominators, not the gathered keys."""
    facts = whole_row(1024)
    q, k, v = tensors(1, 1024, 1024, HEADS)
    sizes = []
    for window in (16, 256):
        kept = []
        tiled = Tiled([Tiling(Pattern.from_text(f"causal & window({window})"), facts, facts, 64)])

        def keep(x, kept=kept):
            kept.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            tiled(q, k, v, 0.0, Manner(1.0))
        sizes.append(sum(kept))
    assert sizes[0] == sizes[1] <= 4.2 * q.numel()


def test_a_causal_sentence_still_takes_the_kernel():
    facts = whole_row(2048)
    assert attend.plan(Causal(), facts, facts, Manner(1.0)) is attend.causal
