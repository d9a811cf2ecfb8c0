"""A scheduler whose requests are written in seats gives everyone the answer they would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine, Request
from allyouneed.infer.scheduler import Scheduler
from graph_runner import WAYS, asked, engine_of, said


@pytest.fixture(autouse=True)
def open_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU."""
    monkeypatch.setattr(
        GraphRunnerCache, "open", lambda self, requests, decoding, stops=None: self.suits(decoding, stops)
    )
    yield


def alone(engine: Engine, request: Request, decoding: Decoding) -> Any:
    room, engine.room.open = engine.room.open, lambda *_: False  # type: ignore[method-assign]
    try:
        return said(engine._answers([request], decoding, None))
    finally:
        engine.room.open = room  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["grouped", "translation", "window"])
def test_everyone_gets_what_they_would_get_alone(name: str) -> None:
    engine = engine_of(name)
    ways = [*WAYS.values(), Decoding(method="greedy", repetition_penalty=1.3)]
    requests = [(request, ways[n % len(ways)]) for n, request in enumerate(asked(engine, 24))]
    scheduler = Scheduler(engine, rows=9, budget=20)
    tickets = [
        scheduler.submit(request, way, priority=n % 2, client=str(n % 3)) for n, (request, way) in enumerate(requests)
    ]
    scheduler.run()
    for ticket, (request, way) in zip(tickets, requests, strict=True):
        assert ticket.answer is not None
        assert said([ticket.answer]) == alone(engine, request, way)
        assert ticket.tokens == ticket.answer[0].tokens
    assert scheduler.seating is not None and scheduler.seating.batches
    assert not scheduler.held and all(len(b.free) == b.states.slot_count for b in scheduler.seating.batches.values())


def test_who_is_cancelled_leaves_the_seat_to_the_next() -> None:
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


def test_a_pool_or_a_bound_on_memory_has_no_seats() -> None:
    assert Scheduler(engine_of("grouped"), memory=1 << 20).seating is None
