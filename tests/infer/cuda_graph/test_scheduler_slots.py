"""A scheduler that decodes in graph runner slots gives each request the answer it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from graph_runner import DECODINGS, engine_of, make_requests, token_lists


@pytest.fixture(autouse=True)
def graphs_admit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU."""
    monkeypatch.setattr(
        GraphRunnerCache, "admits", lambda self, some: self.suits(some[0].spec, [state.request for state in some])
    )
    yield


def decode_alone(engine: Engine, request: Request, decoding: Decoding) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphRunnerCache, "admits", lambda *_: False)
        return token_lists(engine.decode([request], decoding))


@pytest.mark.parametrize("name", ["grouped", "translation", "window"])
def test_each_request_gets_the_answer_it_gets_alone(name: str) -> None:
    engine = engine_of(name)
    ways = [*DECODINGS.values(), Decoding(method="greedy", repetition_penalty=1.3)]
    requests = [(request, ways[n % len(ways)]) for n, request in enumerate(make_requests(engine, 24))]
    scheduler = Scheduler(engine, rows=9, budget=20)
    states = [
        scheduler.submit(request._replace(priority=n % 2, client=str(n % 3)), decoding)
        for n, (request, decoding) in enumerate(requests)
    ]
    scheduler.run()
    for state, (request, decoding) in zip(states, requests, strict=True):
        assert state.answer is not None
        assert token_lists([state.answer]) == decode_alone(engine, request, decoding)
        assert state.tokens == state.answer[0].tokens
    assert scheduler.slots is not None and scheduler.slots.batches
    runners = [batch.runner for batch in scheduler.slots.batches.values()]
    assert not scheduler.active and all(len(runner.free) == runner.states.slot_count for runner in runners)


def test_a_cancelled_request_frees_its_slot() -> None:
    engine = engine_of("grouped")
    long = Decoding(method="greedy", min_length=200, max_length=200)
    requests = [Request([1, 5, 6], 200, (n,)) for n in range(3)]
    scheduler = Scheduler(engine, rows=1)
    first, second, third = (scheduler.submit(request, long) for request in requests)
    while len(first.tokens) < 10:
        scheduler.step()
    assert not second.tokens
    first.cancel()
    second.cancel()
    assert list(scheduler.stream(third)) == third.tokens and len(third.tokens) == 200
    assert first.answer is None and 10 <= len(first.tokens) < 200 and scheduler.idle


def test_a_pool_or_a_memory_limit_excludes_slots() -> None:
    assert Scheduler(engine_of("grouped"), memory=1 << 20).slots is None


def test_prompts_are_read_into_blocks_and_leave_them_for_slots() -> None:
    """A pool and graphs: prefixes are shared, and decoding is captured."""
    engine = engine_of("grouped")
    ways = [DECODINGS["greedy"], DECODINGS["beam"], Decoding(method="greedy", repetition_penalty=1.3)]
    begin = [1, *range(5, 16)]
    requests = [(Request([*begin, 5 + n % 4], 9, (n,)), ways[n % 3]) for n in range(12)]
    scheduler = Scheduler(engine, rows=9, budget=20, pool=BlockPool(300, size=4), graphs=engine.graphs)
    states = [scheduler.submit(*one) for one in requests]
    scheduler.run()
    for state, (request, decoding) in zip(states, requests, strict=True):
        assert state.answer is not None
        assert token_lists([state.answer]) == decode_alone(engine, request, decoding)
    assert scheduler.slots is not None and scheduler.slots.batches
    blocks = scheduler.blocks
    assert blocks is not None and blocks.prefixes.hits > 0
    assert blocks.pool.used == blocks.pool.evictable == len(blocks.prefixes.blocks)
