"""Requests that restrict their tokens choose as if all other logits were -inf, however they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.infer.cuda_graph.refusal import refusal
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.nn.models.precision import to_int8
from toy_models import BOS, EOS, PAD, VOCAB

GREEDY = Decoding(method="greedy", max_length=12)
DECODINGS = [
    GREEDY,
    Decoding(method="greedy", min_length=5, max_length=12),
    Decoding(method="greedy", max_length=10, repetition_penalty=1.5, no_repeat=2),
    Decoding(method="sample", temperature=2.0, seed=5, best=2, max_length=10),
    Decoding(beam=3, best=2, max_length=10),
]


def build(bias: bool = True, stored: str | None = None) -> Engine:
    torch.manual_seed(0)
    attention = {"kind": "attention", "heads": 2, "pattern": "causal"}
    block = {"wiring": "pre-norm", "repeat": 2, "mixer": attention, "channel": {"kind": "ffn", "hidden": 24}}
    tree = {"kind": "decoder", "vocab": VOCAB, "width": 16, "decoder": [block], "head": {"bias": bias}}
    model: Any = ayn.build(tree | {"embed": {"tied": False}}).eval()
    with torch.no_grad():
        for parameter in (model.embed.tokens.weight, *model.head.parameters()):
            parameter.normal_()
    if stored is None:
        model.double()
    else:
        to_int8(model)
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build()


def make_requests(count: int, limit: int = 12, allowed: bool = True) -> list[Request]:
    dice, found = Random(3), []
    for number in range(count):
        prompt = [BOS, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(6)))]
        tokens = [BOS, EOS, *dice.sample(range(3, VOCAB), dice.randrange(1, VOCAB // 3))]
        found.append(Request(prompt, limit, (number,), allowed=tokens if allowed else None))
    return found


def masked(tokens: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def process(logits: Tensor, past: Tensor) -> Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[:, list(tokens)] = logits[:, list(tokens)]
        return kept

    return process


def by_definition(engine: Engine, request: Request, decoding: Decoding) -> list[Hypothesis]:
    spec = replace(engine.runner.spec(decoding), logits_processor=masked(request.allowed))
    return engine.decode([request._replace(allowed=None)], spec)[0]


def assert_equal(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert one.score == pytest.approx(other.score, abs=1e-5)


@contextmanager
def logit_counts(engine: Engine) -> Iterator[list[int]]:
    """How many logits the head computes for each row, pass by pass."""
    counts: list[int] = []
    hook = engine.model.head.register_forward_hook(lambda head, inputs, found: counts.append(found.shape[-1]))
    yield counts
    hook.remove()


@pytest.mark.parametrize("decoding", DECODINGS, ids=lambda one: f"{one.method}-{one.beam}-{one.min_length}")
@pytest.mark.parametrize("stored", [None, "int8"])
def test_together_and_alone_requests_choose_among_their_tokens(decoding: Decoding, stored: str | None) -> None:
    engine = build(stored=stored)
    requests = make_requests(9, decoding.max_length or 0)
    together = engine.decode(requests, decoding)
    assert len({tuple(one[0].tokens) for one in together}) > 4
    for request, found in zip(requests, together, strict=True):
        assert {token for one in found for token in one.tokens} <= set(request.allowed or ())
        assert_equal(found, by_definition(engine, request, decoding))
        assert_equal(found, engine.decode([request], decoding)[0])


def test_only_logits_of_allowed_tokens_are_computed(engine: Engine) -> None:
    requests = make_requests(3)
    union = {token for request in requests for token in request.allowed or ()}
    for decoding in DECODINGS:
        with logit_counts(engine) as counts:
            engine.decode(requests, decoding)
        assert counts and max(counts) <= len(union) < VOCAB
    with logit_counts(engine) as counts:
        engine.decode([*requests, *make_requests(1, allowed=False)], GREEDY)
    assert set(counts) == {VOCAB}


@pytest.mark.parametrize("bias", [True, False])
def test_rows_join_and_leave(bias: bool) -> None:
    """Requests with tokens of their own, and without, of several specifications, arrive step by step."""
    engine = build(bias)
    restricted, free = make_requests(10), make_requests(3, allowed=False)
    work = [(request, GREEDY) for request in restricted[:4]] + [(free[0], GREEDY)]
    work += [(restricted[4], DECODINGS[4]), (restricted[5], GREEDY), (free[1], DECODINGS[1])]
    work += [(request, GREEDY) for request in restricted[6:]]
    scheduler, states = engine.scheduler(rows=16), []
    for number, (request, decoding) in enumerate(work):
        states.append(scheduler.submit(request._replace(limit=3 + 2 * number % 9), decoding))
        scheduler.step()
    scheduler.run()
    for (_, decoding), state in zip(work, states, strict=True):
        request = state.request
        assert state.answer is not None
        plain = request._replace(allowed=None if request.allowed is None else list(map(int, request.allowed)))
        expected = (
            engine.decode([plain], decoding)[0] if plain.allowed is None else by_definition(engine, plain, decoding)
        )
        assert_equal(state.answer, expected)


def test_drafts_are_verified_among_allowed_tokens(engine: Engine) -> None:
    for request in make_requests(4):
        repeated = request._replace(prompt=[BOS, *list(request.allowed or ())[2:5] * 4])
        spec = engine.runner.spec(GREEDY, draft=PromptLookup(3))
        assert_equal(engine.decode([repeated], spec)[0], by_definition(engine, repeated, GREEDY))


def test_captured_graphs_refuse_them(engine: Engine) -> None:
    spec, (request,) = engine.runner.spec(GREEDY), make_requests(1)
    assert "own tokens" in (refusal(engine.runner, spec, [request]) or "")
    assert refusal(engine.runner, spec, [request._replace(allowed=None)]) is None


@pytest.mark.parametrize(
    ("allowed", "told"),
    [([VOCAB], "outside"), ([-1], "outside"), ([], "no token"), ([PAD, BOS], "no token"), ("ab", "list of token ids")],
)
def test_tokens_that_cannot_be_chosen_are_refused(engine: Engine, allowed: Any, told: str) -> None:
    (request,) = make_requests(1)
    with pytest.raises(UserError, match=f"allowed: .*{told}"):
        engine.decode([request._replace(allowed=allowed)], GREEDY)


def test_heads_that_cannot_be_narrowed_compute_all(engine: Engine) -> None:
    class Whole(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(x)
            return found

    other = build()
    other.model.head = Whole(other.model.head)
    requests = make_requests(4)
    for one, expected in zip(other.decode(requests, GREEDY), engine.decode(requests, GREEDY), strict=True):
        assert_equal(one, expected)
