"""The largest scores, found piece by piece, are the largest scores."""

from __future__ import annotations

import pytest
import torch

from allyouneed.infer.likeliest import WORTH, Without, best_place, in_pieces, likeliest, log_chance

VOCABS = [1, 100, 12345, 16000, 50257]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_as_topk(vocab: int, count: int) -> None:
    scores = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    count = min(count, vocab)
    assert in_pieces(scores, count) == (scores.numel() >= WORTH and vocab >= 512 * count)
    best, places = likeliest(scores, count)
    expected = scores.topk(count)
    assert torch.equal(best, expected.values) and torch.equal(places, expected.indices)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kinds", [3, 10**6])
def test_as_argmax_the_first_of_equal_ones(vocab: int, kinds: int) -> None:
    scores = torch.randint(kinds, (9, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    assert torch.equal(best_place(scores), scores.argmax(-1))


def test_the_last_piece_may_be_a_short_one() -> None:
    scores = torch.zeros(9, 12345)
    scores[:, -1] = 1
    assert best_place(scores).tolist() == [12344] * 9
    assert likeliest(scores, 1)[1].flatten().tolist() == [12344] * 9


def test_where_almost_nothing_is_allowed() -> None:
    scores = torch.full((9, 12345), -torch.inf)
    scores[:, [7, 5000, 12344]] = torch.tensor([1.0, 3.0, 2.0])
    best, places = likeliest(scores, 4)
    assert best[0].tolist() == [3.0, 2.0, 1.0, -torch.inf]
    assert places[:, :3].tolist() == [[5000, 12344, 7]] * 9


def test_chances_are_those_of_the_softmax() -> None:
    scores = torch.randn(2, 3, 50)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 49]])
    torch.testing.assert_close(log_chance(scores, tokens), scores.log_softmax(-1).gather(-1, tokens[..., None])[..., 0])


def test_what_is_banned_comes_back() -> None:
    scores = torch.randn(2, 5)
    before = scores.clone()
    with Without(scores, torch.tensor([0, 4])):
        assert scores[:, [0, 4]].eq(-torch.inf).all() and torch.equal(scores[:, 1:4], before[:, 1:4])
    assert torch.equal(scores, before)
    with Without(scores, None):
        assert torch.equal(scores, before)
