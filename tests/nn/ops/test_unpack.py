"""Rows laid out as sentences and back: every token once, in order, gradients too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.unpack import UnpackedRows, unpack_rows
from any_part import pack, sentence

several = st.lists(sentence, min_size=1, max_size=6)
spread = st.lists(st.integers(0, 2), min_size=6, max_size=6)


def features(rows):
    return torch.randn(*rows.tokens.shape, 2, 3, dtype=torch.double, requires_grad=True)


@given(several, spread, spread)
def test_packed_rows_round_trip(texts, lines, gaps):
    rows, places = pack(texts, lines[: len(texts)], gaps[: len(texts)])
    x, found = features(rows), UnpackedRows.of(TokenLayout.of(rows))
    lined = found.gather(x)
    assert sorted(map(int, found.real.sum(1))) == sorted(map(len, texts))
    order = sorted(range(len(texts)), key=lambda n: (places[n][0], places[n][1].start))
    for row, number in enumerate(order):
        line, span = places[number]
        size = len(texts[number])
        assert lined[row, :size].equal(x[line, span]) and not lined[row, size:].any()
        assert found.real[row, :size].all() and not found.real[row, size:].any()
    real = rows.segments > 0
    back = found.scatter(lined, x)
    assert back.equal(x * real[..., None, None])
    (gradient,) = torch.autograd.grad(back.sin().sum(), x)
    torch.testing.assert_close(gradient, x.cos() * real[..., None, None])


@given(several)
def test_left_padded_rows_are_left_aligned(texts):
    rows = Rows.of(texts, side="left")
    x, found = features(rows), UnpackedRows.of(TokenLayout.of(rows))
    lined = found.gather(x)
    for row, text in enumerate(texts):
        assert lined[row, : len(text)].equal(x[row, x.shape[1] - len(text) :])
    real = TokenLayout.of(rows).real
    kept = x if real is None else x * real[..., None, None]
    assert found.scatter(lined, x).equal(kept)


@pytest.mark.parametrize("texts", [[[1, 2, 3]], [[1, 2, 3], [4]]])
def test_left_aligned_rows_are_not_copied(texts):
    rows = Rows.of(texts)
    x, found = features(rows), UnpackedRows.of(TokenLayout.of(rows))
    assert found.gather(x) is x and found.scatter(x, x) is x
    assert (found.real is None) == (len(texts) == 1)


def test_decoding_steps_are_not_rearranged():
    layout = TokenLayout.following([3, 5], Rows.of([[1, 2], [3]]))
    context = Context(layout, slots=TokenLayout(torch.arange(7)[None], start=0))
    x = torch.randn(2, 2, 3)
    assert unpack_rows(context).gather(x) is x
    assert unpack_rows(context) is unpack_rows(context)
    assert unpack_rows(context).real.tolist() == [[True, True], [True, False]]


def test_rows_of_padding_only_have_no_sentences():
    rows = Rows(torch.ones(2, 3, dtype=torch.long), segments=torch.zeros(2, 3, dtype=torch.long))
    x, found = features(rows), UnpackedRows.of(TokenLayout.of(rows))
    assert found.gather(x).shape[0] == 0
    assert not found.scatter(found.gather(x), x).any()
