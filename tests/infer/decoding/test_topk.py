"""The largest scores, found piece by piece, are the largest scores."""

from __future__ import annotations

import pytest
import torch

from allyouneed.infer.decoding.topk import WORTH, Without, best, best_few, best_place, in_pieces, likeliest, log_chance
from allyouneed.kernels.cpu import build as native

VOCABS = [1, 100, 12345, 16000, 50257]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_as_topk(vocab: int, count: int) -> None:
    scores = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    count = min(count, vocab)
    assert in_pieces(scores, count) == (scores.numel() >= WORTH and vocab >= 512 * count)
    top, places = likeliest(scores, count)
    expected = scores.topk(count)
    assert torch.equal(top, expected.values) and torch.equal(places, expected.indices)


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
    top, places = likeliest(scores, 4)
    assert top[0].tolist() == [3.0, 2.0, 1.0, -torch.inf]
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


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("machine", [True, False])
def test_the_best_of_each_row_and_its_chance(
    vocab: int, rows: int, machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.wait_for_build()
    if not machine:
        monkeypatch.setattr(native.NativeLibrary, "loaded", None)
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    scores[:, -1] = scores[:, vocab // 2] = 30  # the first of equal ones
    before = scores.clone()
    for banned in (None, torch.tensor([vocab // 2]), torch.tensor([vocab // 2, vocab - 1])):
        if banned is not None and len(banned) >= vocab:
            continue  # there is nothing left to say
        tokens, chances = best(scores, banned)
        allowed = before if banned is None else before.index_fill(1, banned, -torch.inf)
        assert torch.equal(tokens, allowed.argmax(-1)) and torch.equal(scores, before)
        expected = before.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(chances, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [1, 3, 8])
@pytest.mark.parametrize("vocab", VOCABS[1:])
@pytest.mark.parametrize("machine", [True, False])
def test_the_best_few_of_each_row(vocab: int, few: int, machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    native.wait_for_build()
    if not machine:
        monkeypatch.setattr(native.NativeLibrary, "loaded", None)
    scores = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    before = scores.clone()
    for banned in (None, scores[0, 0].topk(2).indices, torch.arange(3, vocab)):
        tokens, chances = best_few(scores, few, banned)
        allowed = before if banned is None else before.index_fill(-1, banned, -torch.inf)
        expected = allowed.topk(few)
        real = expected.values.isfinite()
        assert torch.equal(tokens[real], expected.indices[real]) and torch.equal(scores, before)
        assert chances[~real].eq(-torch.inf).all()
        chance = before.log_softmax(-1).gather(-1, expected.indices)
        torch.testing.assert_close(chances[real], chance[real], rtol=1e-5, atol=1e-5)
