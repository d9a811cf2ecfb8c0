"""Options are checked, and one step of decoding is the arithmetic its definition says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding, draw, expand, keep_likely


def test_defaults_are_the_papers() -> None:
    decoding = Decoding()
    assert (decoding.method, decoding.beam, decoding.length_penalty, decoding.limit(10)) == ("beam", 4, 0.6, 60)
    assert decoding.normalise(7) == pytest.approx(2**0.6)  # ((5 + 7) / 6)^α
    assert Decoding(penalty="power").normalise(7) == pytest.approx(7**0.6)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"best": 5}, "a beam of 4 finds at most 4"),
        ({"method": "greedy", "best": 2}, "greedy finds one hypothesis"),
        ({"top_k": 5}, "top_k: only for method 'sample'"),
        ({"min_length": 9, "max_length": 5}, "min_length=9 is more than max_length=5"),
        ({"beam": 0}, "beam"),
        ({"beam": 1001}, "beam"),
        ({"method": "sample", "top_p": 1.5}, "top_p"),
        ({"beams": 5}, "did you mean 'beam'"),
        ({"method": "bean"}, "'beam', 'greedy' or 'sample'"),
    ],
)
def test_impossible_options_are_refused_with_a_reason(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(Decoding, tree)


def test_options_survive_being_written_down() -> None:
    for decoding in (Decoding(), Decoding(method="greedy"), Decoding(method="sample", top_k=3, best=9)):
        assert parse(Decoding, tree_of(decoding)) == decoding == parse(Decoding, tree_of(decoding, full=False))


def test_a_request_changes_a_models_defaults() -> None:
    defaults = {"method": "sample", "top_k": 5, "best": 3, "length_penalty": 1.0}
    assert Decoding.of(defaults, seed=7) == Decoding(method="sample", top_k=5, best=3, length_penalty=1.0, seed=7)
    assert Decoding.of(defaults, method="greedy") == Decoding(method="greedy", length_penalty=1.0)


def test_length_limits() -> None:
    assert Decoding(extra=3).limit(4) == 7
    assert Decoding(extra=3, max_length=5).limit(4) == 5
    assert Decoding(extra=0, min_length=9).limit(4) == 9
    assert Decoding(extra=0).limit(0) == 1


@pytest.mark.parametrize("vocab", [3, 11])
@pytest.mark.parametrize("banned", [None, [1, 2]])
def test_a_beam_step_is_the_best_of_all_continuations(vocab: int, banned: list[int] | None) -> None:
    torch.manual_seed(0)
    logits, scores, count = torch.randn(3, 2, vocab), torch.randn(3, 2), 4
    ids = None if banned is None else torch.tensor(banned)
    found = expand(logits, scores, count, ids)
    for source in range(3):
        gains = logits[source].log_softmax(-1)
        ways = [
            (float(scores[source, beam] + gains[beam, token]), beam, token)
            for beam in range(2)
            for token in range(vocab)
            if token not in (banned or [])
        ]
        ways = sorted(ways, reverse=True)[:count]
        n = len(ways)
        assert found.parents[source, :n].tolist() == [beam for _, beam, _ in ways]
        assert found.tokens[source, :n].tolist() == [token for _, _, token in ways]
        assert found.scores[source, :n].tolist() == pytest.approx([score for score, _, _ in ways], abs=1e-5)
        assert found.gains[source, :n].tolist() == pytest.approx([float(gains[b, t]) for _, b, t in ways], abs=1e-5)
        assert found.scores[source, n:].tolist() == [-torch.inf] * (count - n)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()

    def kept(**options: Any) -> list[int]:
        return keep_likely(logits, **options)[0].isfinite().nonzero()[:, 0].tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=99) == kept(top_p=1.0) == [0, 1, 2, 3]
    assert kept(top_p=0.4) == [1]
    assert kept(top_p=0.7) == [1, 3]
    assert kept(top_p=1e-6) == [1]
    assert kept(top_k=3, top_p=0.9) == [1, 2, 3]


def test_drawing_follows_the_distribution_and_never_takes_what_is_ruled_out() -> None:
    chances = torch.tensor([0.0, 0.1, -torch.inf, 0.3, 0.6]).exp()
    chances[0] = 0
    logits = chances.log().expand(10_000, -1)
    even = (torch.arange(10_000).double() + 0.5) / 10_000
    share = draw(logits, even).bincount(minlength=5) / 10_000
    torch.testing.assert_close(share, chances / chances.sum(), atol=2e-4, rtol=0)
    assert draw(logits[:1], torch.zeros(1).double()).item() == 1


def test_an_option_that_the_method_does_not_know_is_refused():
    with pytest.raises(UserError, match="beam: only for method 'beam', this is 'greedy'"):
        Decoding.of({}, method="greedy", beam=5)
    with pytest.raises(UserError, match="seed: only for method 'sample', this is 'beam'"):
        Decoding.of({}, seed=3)
    assert Decoding.of({"beam": 5}, method="greedy").method == "greedy"  # a model's own default is no request
