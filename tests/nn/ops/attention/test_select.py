"""Every way to execute attention against softmax written out in double precision: outputs and gradients."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention import flex
from allyouneed.nn.ops.attention import select as attend
from allyouneed.nn.ops.attention.block_mask import BlockLayout
from allyouneed.nn.ops.attention.dense import DenseAttention, ScoreMod, dense_mask
from allyouneed.nn.patterns import sparse
from allyouneed.nn.patterns.core import Causal, Full, Pattern, Window
from any_part import patterns
from host_sync import NoHostSync

SIZES = [1, 3, 63, 100]
HEADS, HEAD_WIDTH = 2, 16
PLAIN = ScoreMod(HEAD_WIDTH**-0.5)
SOME_PATTERNS = [Full(), Causal(), Causal() & Window(size=5), Pattern.from_text("causal & window(3) | prefix(2)")]


def dense(pattern, queries, keys):
    return DenseAttention(dense_mask(pattern, queries, keys), queries.positions, keys.positions)


def by_flex(pattern, queries, keys):
    parts = attend.block_layouts(pattern, queries, keys, flex.FLEX_BLOCK)
    return flex.Flex(parts, lambda: dense(pattern, queries, keys))


def path(name, pattern, queries, keys):
    return {"dense": dense, "flex": by_flex, "grouped": by_groups}[name](pattern, queries, keys)


def planned(pattern, queries, keys):
    return attend.select_attention(pattern, queries, keys, PLAIN)


def by_groups(pattern, queries, keys):
    return attend.attend_packed(lambda q, k: planned(pattern, q, k), queries, keys)


def following(seen, time):
    return TokenLayout.following([seen], Rows(torch.zeros(1, time, dtype=torch.long)))


def written_out(q, k, v, sees):
    """softmax(QK^T / √head_width) V (eq. 1), one query at a time over the keys it sees; `sees[b][i]` lists them."""
    out = 0 * (q + k.sum() + v.sum())
    for row, queries in enumerate(sees):
        for query, keys in enumerate(queries):
            if keys:
                scores = torch.einsum("hd,hkd->hk", q[row, :, query], k[row][:, keys]) / math.sqrt(q.shape[-1])
                weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
                out[row, :, query] = torch.einsum("hk,hkd->hd", weights, v[row][:, keys])
    return out


def visible(pattern, queries, keys):
    """For each row and real query, its allowed keys, from segments and positions in plain Python."""
    rows = [layout.positions if layout.segments is None else layout.segments for layout in (queries, keys)]
    mask = pattern.mask(256, 256).tolist()

    def places(layout, row):
        positions = layout.positions[row if len(layout.positions) > 1 else 0].tolist()
        segments = [1] * len(positions) if layout.segments is None else layout.segments[row].tolist()
        return list(zip(positions, segments, strict=True))

    return [
        [
            [n for n, (kp, ks) in enumerate(places(keys, row)) if ks and ks == qs and mask[qp][kp]] if qs else []
            for qp, qs in places(queries, row)
        ]
        for row in range(max(map(len, rows)))
    ]


def tensors(batch, queries, keys):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, HEADS, time, HEAD_WIDTH) for time in (queries, keys, keys)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def compare(execute, pattern, queries, keys, batch, gradients=True):
    """A path agrees with the definition on every query that sees anything; the rest stays finite and harmless."""
    q, k, v = (tensor.requires_grad_(gradients) for tensor in tensors(batch, queries.time, keys.time))
    sees = visible(pattern, queries, keys)
    sees = sees * batch if len(sees) == 1 else sees
    real = torch.tensor([[bool(keys) for keys in row] for row in sees])[:, None, :, None]
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    found, expected = execute(q, k, v, 0.0, PLAIN), written_out(*exact, sees)
    assert found.isfinite().all()
    torch.testing.assert_close(found * real, (expected * real).float(), atol=1e-5, rtol=1e-5)
    if not gradients:
        return
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(9)) * real
    ours = torch.autograd.grad((found * weights).sum(), [q, k, v])
    true = torch.autograd.grad((expected * weights).sum(), exact)
    for one, other in zip(ours, true, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


def padded(lengths, side="right"):
    return TokenLayout.of(
        Rows(torch.zeros(len(lengths), max(lengths), dtype=torch.long), torch.tensor(lengths), side=side)
    )


def whole_row(time):
    return TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long)))


def packed(rows, tail=0):
    """Rows of sentences of the given lengths, then padding."""
    longest = max(map(sum, rows)) + tail
    segments = [[n for n, size in enumerate(row, 1) for _ in range(size)] for row in rows]
    segments = torch.tensor([row + [0] * (longest - len(row)) for row in segments])
    return TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))


def eager_flex(monkeypatch):
    """FlexAttention's eager definition on the same block mask, forward only: the kernel needs a GPU."""
    monkeypatch.setattr(flex, "_compiled_flex", lambda: flex_attention)


@pytest.mark.parametrize("size", SIZES)
def test_full_attention_matches_the_definition(size):
    compare(attend.full, Full(), whole_row(size), whole_row(7), batch=2)
    assert planned(Full(), whole_row(size), whole_row(7)) is attend.full


@pytest.mark.parametrize("size", SIZES)
def test_causal_attention_matches_the_definition(size):
    layout = whole_row(size)
    assert planned(Causal(), layout, layout) is attend.causal
    compare(attend.causal, Causal(), layout, layout, batch=2)


@pytest.mark.parametrize("size", SIZES)
def test_causal_needs_no_mask_for_padding_on_the_right(size):
    layout = padded([size, (size + 1) // 2, 1])
    compare(planned(Causal(), layout, layout), Causal(), layout, layout, batch=3)


@pytest.mark.parametrize("pattern", SOME_PATTERNS, ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", SIZES)
def test_dense_masks_match_the_definition(pattern, side, size):
    layout = padded([size, (size + 1) // 2, 1], side)
    compare(dense(pattern, layout, layout), pattern, layout, layout, batch=3)


@pytest.mark.parametrize("pattern", SOME_PATTERNS, ids=str)
@pytest.mark.parametrize("rows", [[[1]], [[3], [1, 1]], [[20, 1, 42], [63]], [[1] * 40 + [7] * 5 + [25], [50, 50]]])
@pytest.mark.parametrize("way", ["grouped", "dense", "flex"])
def test_packed_rows_match_the_definition(way, pattern, rows, monkeypatch):
    eager_flex(monkeypatch)
    layout = packed(rows, tail=3)
    compare(path(way, pattern, layout, layout), pattern, layout, layout, len(rows), gradients=way != "flex")


@pytest.mark.parametrize("way", ["grouped", "dense", "flex"])
def test_packed_rows_in_cross_attention_match_the_definition(way, monkeypatch):
    """Each target sentence attends to its own source sentence of another length."""
    eager_flex(monkeypatch)
    queries, keys = packed([[5, 1, 30], [2, 61]], tail=2), packed([[1, 9, 20], [70, 3]], tail=1)
    compare(path(way, Full(), queries, keys), Full(), queries, keys, batch=2, gradients=way != "flex")


@settings(max_examples=30)
@given(
    patterns(),
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_selected_attention_for_packed_rows_matches_the_definition(pattern, rows, tail):
    """Any pattern, any number of sentences."""
    layout = packed(rows, tail)
    compare(planned(pattern, layout, layout), pattern, layout, layout, len(rows))


facts_of_one_side = st.one_of(
    st.lists(st.integers(1, 9), min_size=2, max_size=2).map(padded),
    st.lists(st.integers(1, 9), min_size=2, max_size=2).map(lambda lengths: padded(lengths, "left")),
    st.integers(1, 9).map(whole_row),
)


@settings(max_examples=60)
@given(patterns(), facts_of_one_side, facts_of_one_side, st.booleans())
@example(Causal(), padded([5, 4]), padded([5, 2]), False)  # as long as the queries, and yet padded
@example(Causal(), whole_row(5), padded([5, 2]), False)
@example(Causal(), following(2, 3), whole_row(3), False)  # a later chunk, as long
@example(Causal(), following(4, 1), padded([5, 2]), False)  # the newest token
def test_selected_attention_matches_the_definition(pattern, queries, keys, to_itself):
    """Self-attention and cross-attention by any pattern, padded on either side."""
    keys = queries if to_itself else keys
    compare(planned(pattern, queries, keys), pattern, queries, keys, batch=2)


@settings(max_examples=40)
@given(patterns(), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3))
def test_flex_mask_mod_matches_the_dense_mask(pattern, rows):
    """For any token order, and for empty, partial and full blocks of the block mask."""
    queries = packed(rows, tail=2)
    keys = packed([row[::-1] for row in rows], tail=1)
    part = BlockLayout(pattern, queries, keys, 4)
    rule, blocks = flex.mask_mod(part), flex.block_mask(part)
    head, steps = torch.zeros((), dtype=torch.long), [torch.arange(side.blocks * 4) for side in (part.query, part.key)]
    said = torch.stack([rule(torch.tensor(b), head, steps[0][:, None], steps[1]) for b in range(len(rows))])
    whole = torch.zeros(said.shape, dtype=torch.bool)
    asked = torch.zeros_like(whole)
    for found, counts, indices in (
        (asked, blocks.kv_num_blocks, blocks.kv_indices),
        (whole, blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        for b in range(len(rows)):
            for q, count in enumerate(counts[b, 0].tolist()):
                for k in indices[b, 0, q, :count].tolist():
                    found[b, 4 * q : 4 * q + 4, 4 * k : 4 * k + 4] = True
    seen = whole | (asked & said)
    truth = dense_mask(pattern, queries, keys)[:, 0] & (queries.segments > 0)[:, :, None]
    for b in range(len(rows)):
        at = [side.slots.view(len(rows), -1)[b] - b * side.blocks * 4 for side in (part.query, part.key)]
        assert torch.equal(seen[b][at[0]][:, at[1]] & (queries.segments[b] > 0)[:, None], truth[b])
        beyond = torch.ones(part.key.blocks * 4, dtype=torch.bool)
        beyond[at[1]] = False
        assert not seen[b][:, beyond].any()


SPARSE = [
    "causal",
    "causal & window(100)",
    "causal & (window(32) | strided(32))",
    "causal & (block(64) | fixed(64, 4))",
    "block-window(64, 2) | global-prefix(64) | random-blocks(64, 2, 0)",
]


@pytest.mark.parametrize("text", SPARSE)
def test_plans_of_packed_rows_are_made_without_the_host(text, monkeypatch):
    """A captured training step makes them anew for each batch: whether a pattern has several token orders follows from
    the lengths of rows."""
    eager_flex(monkeypatch)
    monkeypatch.setattr(sparse, "_can_read", lambda x: False)  # as on a GPU
    pattern = Pattern.from_text(text)

    def plan(rows):
        layout = packed(rows)
        with NoHostSync() if guarded else nullcontext():
            parts = attend.block_layouts(pattern, layout, layout, flex.FLEX_BLOCK, rounded=True)
            return layout, flex.Flex(parts, lambda: dense(pattern, layout, layout))

    guarded = False
    plan([[384]])  # the warm-up of a capture
    guarded = True
    for rows in ([[100, 200, 84], [30, 1, 353]], [[384], [17] * 22]):
        layout, found = plan(rows)
        given = [x.detach() for x in tensors(2, 384, 384)]
        real = layout.real[:, None, :, None]
        ours, expected = (way(*given, 0.0, PLAIN).where(real, 0) for way in (found, dense(pattern, layout, layout)))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "time", "several"),
    [
        ("causal & (window(32) | strided(32))", 256, False),
        ("causal & (window(128) | strided(128))", 16384, True),
        ("causal & (window(64) | prefix(4))", 4096, False),
    ],
)
def test_packed_rows_have_several_token_orders_where_whole_rows_save_much_by_them(text, time, several):
    pattern = Pattern.from_text(text)
    layouts = [packed([[time // 2, time - time // 2]]), packed([[time - 1, 1]])]
    for layout in layouts:
        parts = attend.block_layouts(pattern, layout, layout, flex.FLEX_BLOCK)
        assert (len(parts) > 1) == several


def test_flex_falls_back_to_dense(monkeypatch):
    def kernel():
        raise AssertionError("the kernel was asked")

    monkeypatch.setattr(flex, "_compiled_flex", kernel)
    layout = packed([[3, 4]], tail=1)
    q, k, v = (tensor[..., :12] for tensor in tensors(1, layout.time, layout.time))
    found = by_flex(Causal(), layout, layout)(q, k, v, 0.0, PLAIN)
    expected = dense(Causal(), layout, layout)(q, k, v, 0.0, PLAIN)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pattern", SOME_PATTERNS, ids=str)
def test_rows_of_padding_only_are_finite(pattern):
    segments = torch.tensor([[1, 1, 2], [0, 0, 0]])
    layout = TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))
    empty = TokenLayout.of(Rows(torch.zeros(2, 3, dtype=torch.long), lengths=torch.tensor([3, 0])))
    for places in (layout, empty):
        q, k, v = tensors(2, 3, 3)
        for execute in (planned(pattern, places, places), dense(pattern, places, places)):
            found = execute(q, k, v, 0.0, PLAIN)
            gradients = torch.autograd.grad(found.square().sum(), [q, k, v])
            assert found.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def test_packed_attention_cost_is_not_quadratic_in_the_row():
    """The reason for `attend_packed`: 40 sentences of 5 in a row cost 40 · 5², not 200²."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    layout = packed([[5] * 40])
    q, k, v = (tensor.detach() for tensor in tensors(1, 200, 200))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        path("grouped", Full(), layout, layout)(q, k, v, 0.0, PLAIN)
    assert counter.get_total_flops() == 4 * HEADS * HEAD_WIDTH * 40 * 5**2


def test_positions_restart_with_each_sentence():
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [0, 1, 2, 2, 2, 2, 3]])
    layout = TokenLayout.of(Rows(torch.zeros_like(segments), segments=segments))
    real = segments > 0
    assert layout.positions[0][real[0]].tolist() == [0, 1, 2, 0, 1]
    assert layout.positions[1][real[1]].tolist() == [0, 0, 1, 2, 3, 0]
    left = padded([2, 4], "left")
    assert left.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert left.segments.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
