"""Decoding options: defaults, validation, limits."""

from __future__ import annotations

from typing import Any

import pytest

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding


def test_defaults_are_the_papers() -> None:
    decoding = Decoding()
    assert (decoding.method, decoding.beam, decoding.length_penalty, decoding.limit(10)) == ("beam", 4, 0.6, 60)
    assert decoding.length_divisor(7) == pytest.approx(2**0.6)  # ((5 + 7) / 6)^α
    assert Decoding(penalty="power").length_divisor(7) == pytest.approx(7**0.6)


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


def test_options_round_trip() -> None:
    for decoding in (Decoding(), Decoding(method="greedy"), Decoding(method="sample", top_k=3, best=9)):
        assert parse(Decoding, tree_of(decoding)) == decoding == parse(Decoding, tree_of(decoding, full=False))


def test_a_request_changes_a_models_defaults() -> None:
    defaults = {"method": "sample", "top_k": 5, "best": 3, "length_penalty": 1.0}
    assert Decoding.of(defaults, seed=7) == Decoding(method="sample", top_k=5, best=3, length_penalty=1.0, seed=7)
    assert Decoding.of(defaults, method="greedy") == Decoding(method="greedy", length_penalty=1.0)


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 7}])
def test_a_sampling_option_selects_sampling(change: dict[str, Any]) -> None:
    assert Decoding.of({"beam": 5, "early": True}, **change) == Decoding(method="sample", beam=5, **change)
    assert Decoding.of({"method": "greedy"}, **change).method == "sample"
    with pytest.raises(UserError, match="only for method 'sample', this is 'beam'"):
        Decoding.of({}, method="beam", **change)


def test_length_limits() -> None:
    assert Decoding(extra=3).limit(4) == 7
    assert Decoding(extra=3, max_length=5).limit(4) == 5
    assert Decoding(extra=0, min_length=9).limit(4) == 9
    assert Decoding(extra=0).limit(0) == 1


def test_an_option_that_the_method_does_not_know_is_refused():
    with pytest.raises(UserError, match="beam: only for method 'beam', this is 'greedy'"):
        Decoding.of({}, method="greedy", beam=5)
    with pytest.raises(UserError, match="seed: only for method 'sample', this is 'beam'"):
        Decoding.of({}, method="beam", seed=3)
    assert Decoding.of({"beam": 5}, method="greedy").method == "greedy"  # a model's default is dropped silently
