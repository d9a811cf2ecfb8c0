"""Block-wise argmax and top-k equal torch's."""

from __future__ import annotations

import pytest
import torch

from allyouneed.infer.decoding.topk import (
    MIN_SIZE,
    MaskedColumns,
    argmax,
    greedy_tokens,
    token_log_probs,
    topk,
    topk_log_probs,
    uses_blocks,
)
from allyouneed.kernels.cpu import build as native

VOCABS = [1, 100, 12345, 16000, 50257]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_block_wise_topk_equals_torchs(vocab: int, count: int) -> None:
    scores = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    count = min(count, vocab)
    assert uses_blocks(scores, count) == (scores.numel() >= MIN_SIZE and vocab >= 512 * count)
    top, places = topk(scores, count)
    expected = scores.topk(count)
    assert torch.equal(top, expected.values) and torch.equal(places, expected.indices)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kinds", [3, 10**6])
def test_argmax_returns_the_first_of_equal_ones(vocab: int, kinds: int) -> None:
    scores = torch.randint(kinds, (9, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    assert torch.equal(argmax(scores), scores.argmax(-1))


def test_the_last_block_may_be_short() -> None:
    scores = torch.zeros(9, 12345)
    scores[:, -1] = 1
    assert argmax(scores).tolist() == [12344] * 9
    assert topk(scores, 1)[1].flatten().tolist() == [12344] * 9


def test_topk_works_with_almost_all_tokens_banned() -> None:
    scores = torch.full((9, 12345), -torch.inf)
    scores[:, [7, 5000, 12344]] = torch.tensor([1.0, 3.0, 2.0])
    top, places = topk(scores, 4)
    assert top[0].tolist() == [3.0, 2.0, 1.0, -torch.inf]
    assert places[:, :3].tolist() == [[5000, 12344, 7]] * 9


def test_log_probs_are_those_of_the_softmax() -> None:
    scores = torch.randn(2, 3, 50)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 49]])
    torch.testing.assert_close(
        token_log_probs(scores, tokens), scores.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    )


def test_masked_columns_are_restored() -> None:
    scores = torch.randn(2, 5)
    before = scores.clone()
    with MaskedColumns(scores, torch.tensor([0, 4])):
        assert scores[:, [0, 4]].eq(-torch.inf).all() and torch.equal(scores[:, 1:4], before[:, 1:4])
    assert torch.equal(scores, before)
    with MaskedColumns(scores, None):
        assert torch.equal(scores, before)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("machine", [True, False])
def test_greedy_tokens_and_their_log_probs(
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
            continue  # no token is left
        tokens, log_probs = greedy_tokens(scores, banned)
        allowed = before if banned is None else before.index_fill(1, banned, -torch.inf)
        assert torch.equal(tokens, allowed.argmax(-1)) and torch.equal(scores, before)
        expected = before.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [1, 3, 8])
@pytest.mark.parametrize("vocab", VOCABS[1:])
@pytest.mark.parametrize("machine", [True, False])
def test_top_tokens_and_their_log_probs(vocab: int, few: int, machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    native.wait_for_build()
    if not machine:
        monkeypatch.setattr(native.NativeLibrary, "loaded", None)
    scores = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    before = scores.clone()
    for banned in (None, scores[0, 0].topk(2).indices, torch.arange(3, vocab)):
        tokens, log_probs = topk_log_probs(scores, few, banned)
        allowed = before if banned is None else before.index_fill(-1, banned, -torch.inf)
        expected = allowed.topk(few)
        real = expected.values.isfinite()
        assert torch.equal(tokens[real], expected.indices[real]) and torch.equal(scores, before)
        assert log_probs[~real].eq(-torch.inf).all()
        chance = before.log_softmax(-1).gather(-1, expected.indices)
        torch.testing.assert_close(log_probs[real], chance[real], rtol=1e-5, atol=1e-5)
