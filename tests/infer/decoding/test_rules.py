"""The decoding rules against their definitions, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.rules import (
    Candidates,
    TokenRules,
    add_finished,
    beam_candidates,
    beam_step,
    can_improve,
    choose_tokens,
    close_request,
    expand_beams,
    find_short,
    force_eos_at_limit,
)
from allyouneed.infer.decoding.sampling import filter_logits
from allyouneed.infer.request import Request

SAMPLE, CPU, EOS = Decoding(method="sample"), torch.device("cpu"), 2


@pytest.mark.parametrize("vocab", [3, 11])
@pytest.mark.parametrize("banned", [None, [1, 2]])
def test_a_beam_step_is_the_best_of_all_continuations(vocab: int, banned: list[int] | None) -> None:
    torch.manual_seed(0)
    logits, scores, count = torch.randn(3, 2, vocab), torch.randn(3, 2), 4
    ids = None if banned is None else torch.tensor(banned)
    found = expand_beams(logits, scores, count, ids)
    for source in range(3):
        log_probs = logits[source].log_softmax(-1)
        best = [
            (float(scores[source, beam] + log_probs[beam, token]), beam, token)
            for beam in range(2)
            for token in range(vocab)
            if token not in (banned or [])
        ]
        best = sorted(best, reverse=True)[:count]
        n = len(best)
        assert found.parents[source, :n].tolist() == [beam for _, beam, _ in best]
        assert found.tokens[source, :n].tolist() == [token for _, _, token in best]
        assert found.scores[source, :n].tolist() == pytest.approx([score for score, _, _ in best], abs=1e-5)
        assert found.log_probs[source, :n].tolist() == pytest.approx(
            [float(log_probs[b, t]) for _, b, t in best], abs=1e-5
        )
        assert found.scores[source, n:].tolist() == [-torch.inf] * (count - n)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()

    def kept(**options: Any) -> list[int]:
        return filter_logits(logits, **options)[0].isfinite().nonzero()[:, 0].tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=99) == kept(top_p=1.0) == [0, 1, 2, 3]
    assert kept(top_p=0.4) == [1]
    assert kept(top_p=0.7) == [1, 3]
    assert kept(top_p=1e-6) == [1]
    assert kept(top_k=3, top_p=0.9) == [1, 2, 3]


def test_sampling_follows_the_distribution_and_never_draws_a_banned_token() -> None:
    probs = torch.tensor([0.0, 0.1, -torch.inf, 0.3, 0.6]).exp()
    probs[0] = 0
    logits = probs.log().expand(10_000, -1)
    even = (torch.arange(10_000).double() + 0.5) / 10_000
    share = choose_tokens(logits, SAMPLE, even).bincount(minlength=5) / 10_000
    torch.testing.assert_close(share, probs / probs.sum(), atol=2e-4, rtol=0)
    assert choose_tokens(logits[:1], SAMPLE, torch.zeros(1).double()).item() == 1


def rules(least: int = 0, forbidden: tuple[int, ...] = (0, 1), **more: Any) -> TokenRules:
    return TokenRules(DecodingSpec(Decoding(min_length=least), EOS, forbidden, **more), CPU)


@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("forbidden", [(), (0, 1), (0, EOS)])
def test_banned_tokens_and_eos_of_short_texts(least: int, forbidden: tuple[int, ...]) -> None:
    logits, lengths = torch.randn(4, 7), torch.tensor([0, 2, 3, 9])
    found = rules(least, forbidden, extra_eos=(5,)).ban_tokens(logits, lengths)
    for row, length in enumerate(lengths.tolist()):
        banned = {*forbidden} - {EOS} | ({EOS, 5} if length < least else set())
        assert {n for n in range(7) if found[row, n] == -torch.inf} == banned
        kept = [n for n in range(7) if n not in banned]
        assert torch.equal(found[row, kept], logits[row, kept])


def test_a_prompt_that_counts_makes_the_minimum_smaller() -> None:
    assert rules(5, counted_prompt=2).min_tokens == 3
    assert [find_short(n, 3) for n in ([0, 2], [2, 3], [3, 9], [])] == ["all", "some", "none", "none"]
    assert find_short([0], 0) == "none"


def test_eos_is_forced_at_the_limit_at_no_cost() -> None:
    tokens, log_probs = torch.tensor([5, 6]), torch.tensor([-1.0, -2.0])
    found = force_eos_at_limit(tokens, log_probs, torch.tensor([3, 3]), torch.tensor([4, 9]), EOS)
    assert [part.tolist() for part in found] == [[EOS, 6], [0.0, -2.0]]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("force_eos", [False, True])
@pytest.mark.parametrize("least", [0, 4])
def test_candidates_obey_all_rules_at_once(least: int, force_eos: bool, normalised: bool) -> None:
    torch.manual_seed(1)
    logits, scores, lengths, limits = torch.randn(3, 2, 9), torch.randn(3, 2), torch.tensor([1, 3, 5]), [4, 4, 9]
    logits = logits.log_softmax(-1) if normalised else logits
    own, short = rules(least), find_short(lengths.tolist(), least)
    found = beam_candidates(logits, scores, 4, lengths, torch.tensor(limits), own, force_eos, short, normalised)
    for source, (length, limit) in enumerate(zip(lengths.tolist(), limits, strict=True)):
        log_probs = logits[source].log_softmax(-1)
        if force_eos and limit == length + 1:
            log_probs = torch.full_like(log_probs, -torch.inf).index_fill(1, torch.tensor([EOS]), 0.0)
        log_probs[:, [0, 1, EOS] if length < least else [0, 1]] = -torch.inf
        expected = (scores[source][:, None] + log_probs).flatten().sort(descending=True).values[:4]
        torch.testing.assert_close(found.scores[source], expected)


def test_a_beam_step_finishes_the_first_half_and_continues_with_the_rest() -> None:
    found = Candidates(
        torch.tensor([[-1.0, -2.0, -3.0, -torch.inf]]),
        torch.tensor([[1, 0, 1, 0]]),
        torch.tensor([[EOS, 5, 6, EOS]]),
        torch.tensor([[-0.1, -0.2, -0.3, -0.4]]),
    )
    step = beam_step(found, found.tokens == EOS, 2)
    assert step.finished.tolist() == [[True, False]]
    assert (step.parents.tolist(), step.tokens.tolist(), step.scores.tolist()) == ([[0, 1]], [[5, 6]], [[-2.0, -3.0]])


def test_a_search_is_over_when_no_running_hypothesis_can_be_among_the_best() -> None:
    spec = DecodingSpec(Decoding(beam=2, length_penalty=0.0), EOS)
    request = RequestState(Request([1], 9, (0,)), spec, 9)
    assert can_improve(request, spec, -50.0, 3) and not can_improve(request, spec, float("-inf"), 3)
    for score in (-3.0, -1.0, -2.0):
        add_finished(request, Hypothesis([5], score, score, [score], True), 2)
    assert [h.score for h in request.hypotheses] == [-1.0, -2.0]
    assert can_improve(request, spec, -1.9, 3) and not can_improve(request, spec, -2.1, 3)
    early = DecodingSpec(Decoding(beam=2, length_penalty=0.0, early=True), EOS)
    assert not can_improve(request, early, -0.1, 3)
    close_request(request, 1)
    assert request.done and [h.score for h in request.hypotheses] == [-1.0]
