"""What the host does while a GPU decodes by captured graphs: a GPU that has finished waits for it. Calls are counted,
since seconds depend on the machine."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from allyouneed.infer.cuda_graph.device_search import make_hypotheses
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, make_hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from tape_graph import capture_nothing, capture_on_cpu
from toy_models import BOS, EOS, PAD, random_model


def calls(engine: Engine, texts: int, tokens: int) -> int:
    """Python calls of one call of the engine whose graphs exist."""
    sources = [[5 + n % 20 + k for k in range(8 + n % 20)] + [EOS] for n in range(texts)]
    decoding = Decoding(method="greedy", min_length=tokens, max_length=tokens)
    for _ in range(3):
        engine.generate(sources, decoding)
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.generate(sources, decoding)
    finally:
        sys.setprofile(before)
    return count


def test_a_request_and_a_step_cost_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls of a step: a run of eight is one launch, one wait and one look at the record."""
    capture_on_cpu(monkeypatch, capture_nothing)
    engine = Engine(random_model(), BOS, EOS, PAD, budget=1 << 16)
    few, many, long = calls(engine, 64, 32), calls(engine, 256, 32), calls(engine, 64, 192)
    assert (many - few) / 192 <= 26, "calls per request"
    assert (long - few) / 160 <= 8, "calls per step"
    assert few - 64 * 26 <= 800, "calls per call of the engine"


class Stop:
    reach = 2

    def __call__(self, tokens: Any) -> bool:
        if tokens[-1] == 13:
            raise ValueError("13")
        return tokens[-1] % 5 == 0


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("loops", [None, 3])
def test_hypotheses_made_together_are_those_made_alone(loops: int | None, counted: int) -> None:
    """Texts of unequal length, with and without an end token, a loop, a stop condition that is met, is not or fails."""
    dice = np.random.default_rng(3)
    tokens = dice.integers(3, 40, (24, 150)).astype(np.float32)
    tokens[:6, 60:] = 7  # a loop
    counts: NDArray[np.int64] = dice.integers(1, 150, 24)
    counts[:6] = 140
    log_probs = -dice.random((24, 150)).astype(np.float32)
    tokens[np.arange(0, 24, 3), counts[::3] - 1] = EOS
    tokens[23, counts[23] - 1], tokens[22, counts[22] - 1] = 13, 25
    spec = DecodingSpec(Decoding(method="greedy", loops=loops, penalty="power"), EOS, counted_prompt=counted)

    def states() -> list[RequestState]:
        requests = [Request([BOS], 150, (n,), stop=Stop() if n > 20 else None) for n in range(24)]
        return [RequestState(request, spec, 150) for request in requests]

    own, other = states(), states()
    found = list(make_hypotheses(spec, own, tokens, log_probs, counts))
    expected = list[Hypothesis]()
    for state, text, values, count in zip(other, tokens, log_probs, counts.tolist(), strict=True):
        some = values[:count].tolist()
        expected.append(make_hypothesis(spec, state, text[:count].astype(int).tolist(), some, sum(some)))
    assert found == expected
    assert [str(state.error) for state in own] == [str(state.error) for state in other]
    assert {one.finished for one in found} == {True, False}
    assert any(one.repeats for one in found) == (loops is not None)
