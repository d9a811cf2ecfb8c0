"""A request gets the same tokens alone and among others that come and go, for any parts of the model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from any_part import CASES, VOCAB, case

REMEMBERS = ("mixer", "cross", "channel", "layers")  # what has a state; encoders, norms and wirings have none
DECODES = [name for name in CASES if name.startswith(REMEMBERS)]
DECODINGS = [
    Decoding(method="greedy", max_length=7),
    Decoding(method="sample", max_length=9, seed=4, top_k=8),
    Decoding(beam=3, best=2, max_length=6),
    Decoding(method="sample", best=2, max_length=5, seed=1, temperature=1.3),
    Decoding(method="greedy", max_length=8, repetition_penalty=1.4, min_length=3),
]


def requests(count: int) -> list[tuple[Request, Decoding]]:
    dice, found = Random(0), []
    for number in range(count):
        source = [dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 9))]
        prompt = [1, *(dice.randrange(1, VOCAB) for _ in range(dice.randrange(0, 6)))]
        found.append((Request(prompt, DECODINGS[number % 5].max_length or 0, (number,), source), DECODINGS[number % 5]))
    return found


def one_in(count: int, first: int) -> list[Any]:
    """All kinds are tried in infer/test_promises.py, all options in `make test-all`."""
    return [
        name if number % count == first else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(DECODES)
    ]


def check_answers(engine: Engine, states: list[RequestState], cases: list[tuple[Request, Decoding]]) -> None:
    """Each answer is the one that the request gets alone."""
    for state, (request, decoding) in zip(states, cases, strict=True):
        (alone,) = engine.generate(
            [request.source or ()], decoding, [request.prompt[1:]], sample_keys=[request.sample_key]
        )
        assert state.answer is not None
        assert [h.tokens for h in state.answer] == [h.tokens for h in alone]
        torch.testing.assert_close([h.score for h in state.answer], [h.score for h in alone], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", one_in(6, 0))
def test_the_answer_does_not_depend_on_other_requests(name: str) -> None:
    engine = Engine(case(name), 1, 2, 0)
    cases = requests(6)
    busy, states = Scheduler(engine.runner, rows=7, budget=7), []
    for number, (request, decoding) in enumerate(cases):
        states.append(busy.submit(request, decoding))
        other = busy.submit(*cases[number - 1]) if number % 3 == 2 else None
        for _ in range(number % 3):
            busy.step()
        if other is not None:
            other.cancel()
    busy.run()
    check_answers(engine, states, cases)
    assert busy.idle and not busy.active


@pytest.mark.parametrize("name", one_in(12, 3))
def test_the_answer_does_not_depend_on_other_requests_with_paged_states(name: str) -> None:
    engine, cases = Engine(case(name), 1, 2, 0), requests(6)
    pool = BlockPool(blocks=800, size=2)  # a source summed up is large beside a token
    busy, states = Scheduler(engine.runner, rows=9, budget=7, pool=pool), []
    for request, decoding in cases:
        states.append(busy.submit(request, decoding))
        busy.step()
    busy.run()
    check_answers(engine, states, cases)
    assert pool.used == 0 and busy.idle and not busy.active
