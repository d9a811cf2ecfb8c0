"""A scheduler that decodes in graph runner slots gives each request the answer it gets alone."""

from __future__ import annotations

import pytest

from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.scheduling import admission
from allyouneed.infer.scheduling.admission import POSTPONED, WORTH
from allyouneed.nn.states.paged import BlockPool
from graph_runner import DECODINGS, admit_as_on_a_gpu, decode_alone, engine_of, make_requests, token_lists


@pytest.fixture(autouse=True)
def graphs_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    admit_as_on_a_gpu(monkeypatch)


@pytest.mark.parametrize("name", ["grouped", "translation", "window"])
def test_each_request_gets_the_answer_it_gets_alone(name: str) -> None:
    engine = engine_of(name)
    ways = [*DECODINGS.values(), Decoding(method="greedy", repetition_penalty=1.3)]
    requests = [(request, ways[n % len(ways)]) for n, request in enumerate(make_requests(engine, 24))]
    scheduler = Scheduler(engine.runner, rows=9, budget=20)
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
    scheduler = Scheduler(engine.runner, rows=1)
    first, second, third = (scheduler.submit(request, long) for request in requests)
    while len(first.tokens) < 10:
        scheduler.step()
    assert not second.tokens
    first.cancel()
    second.cancel()
    assert list(scheduler.stream(third)) == third.tokens and len(third.tokens) == 200
    assert first.answer is None and 10 <= len(first.tokens) < 200 and scheduler.idle


def test_a_pool_or_a_memory_limit_excludes_slots() -> None:
    assert Scheduler(engine_of("grouped").runner, memory=1 << 20).slots is None


def test_prompts_are_read_into_blocks_and_leave_them_for_slots() -> None:
    """A pool and graphs: prefixes are shared, and decoding is captured."""
    engine = engine_of("grouped")
    ways = [DECODINGS["greedy"], DECODINGS["beam"], Decoding(method="greedy", repetition_penalty=1.3)]
    begin = [1, *range(5, 16)]
    requests = [(Request([*begin, 5 + n % 4], 9, (n,)), ways[n % 3]) for n in range(12)]
    scheduler = Scheduler(engine.runner, rows=9, budget=20, pool=BlockPool(300, size=4), graphs=engine.graphs)
    states = [scheduler.submit(*one) for one in requests]
    scheduler.run()
    for state, (request, decoding) in zip(states, requests, strict=True):
        assert state.answer is not None
        assert token_lists([state.answer]) == decode_alone(engine, request, decoding)
    assert scheduler.slots is not None and scheduler.slots.batches
    blocks = scheduler.blocks
    assert blocks is not None and blocks.prefixes.hits > 0
    assert blocks.pool.used == blocks.pool.evictable == len(blocks.prefixes.blocks)


LONG = Decoding(method="greedy", min_length=40, max_length=40)


def prompts_of(count: int, first: int = 0) -> list[tuple[Request, Decoding]]:
    """Three different ones, again and again."""
    return [(Request([1, 5 + n % 3, 6], 40, (n,)), LONG) for n in range(first, first + count)]


def steps_until_admitted(scheduler: Scheduler, state: RequestState) -> int:
    count = 0
    while not state.admitted:
        scheduler.step()
        count += 1
    return count


@pytest.mark.parametrize("paged", [True, False])
def test_few_prompts_wait_for_others_while_many_rows_decode(paged: bool) -> None:
    """A prefill that is postponed changes no answer."""
    engine = engine_of("grouped")
    pool = BlockPool(400, size=4) if paged else None
    scheduler = Scheduler(engine.runner, rows=WORTH + 6, budget=500, pool=pool, graphs=engine.graphs)
    asked = prompts_of(WORTH + 4)
    states = scheduler.submit_all(asked[:WORTH])
    scheduler.step()
    states.append(scheduler.submit(*asked[WORTH]))
    assert steps_until_admitted(scheduler, states[-1]) == 1
    states.append(scheduler.submit(*asked[WORTH + 1]))  # more than `WORTH` decode: it waits for a second one
    assert steps_until_admitted(scheduler, states[-1]) == 2  # none has come
    states.append(scheduler.submit(*asked[WORTH + 2]))
    scheduler.step()
    states.append(scheduler.submit(*asked[WORTH + 3]))  # which is here
    assert not states[-2].admitted and steps_until_admitted(scheduler, states[-2]) == 1
    assert all(state.admitted for state in states)
    scheduler.run()
    expected = [decode_alone(engine, *one) for one in asked[:3]]
    for number, state in enumerate(states):
        assert state.answer is not None and token_lists([state.answer]) == expected[number % 3]
    assert scheduler.idle and (pool is None or pool.used == pool.evictable)


def test_no_request_waits_longer_because_others_arrive_or_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill is postponed by a fixed number of steps at most."""
    monkeypatch.setattr(admission, "WORTH", 2)  # so few are never enough
    engine = engine_of("grouped")
    scheduler = Scheduler(engine.runner, rows=40, budget=500)
    scheduler.submit_all(prompts_of(2 * POSTPONED + 4))
    scheduler.step()
    came: list[tuple[int, RequestState]] = []
    waits: list[int] = []
    for turn in range(3 * POSTPONED):  # one at each step, and later every third leaves at once
        state = scheduler.submit(*prompts_of(1, turn)[0])
        came.append((scheduler.steps, state))
        if turn > POSTPONED and turn % 3 == 2:
            state.cancel()
        before = [one for one in came if not one[1].admitted]
        scheduler.step()
        waits += [scheduler.steps - at for at, one in before if one.admitted]
    assert max(waits) == 1 + POSTPONED and len(waits) >= POSTPONED
    scheduler.run()
    assert all(one.done or one.cancelled for _, one in came)


def test_rows_that_become_free_one_by_one_are_filled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are waiting, and answers end at different steps."""
    monkeypatch.setattr(admission, "WORTH", 4)
    engine, prefills = engine_of("grouped"), []
    scheduler = Scheduler(engine.runner, rows=16, budget=500)
    asked = [(Request([1, 5 + n % 3, 6], 20 + 4 * (n % 8), (n,)), Decoding(method="greedy")) for n in range(24)] * 2
    expected = [decode_alone(engine, *one) for one in asked[:24]] * 2
    states, seen = scheduler.submit_all(asked), 0
    while not scheduler.idle:
        scheduler.step()
        admitted = sum(state.admitted for state in states)
        prefills += [admitted - seen] * (admitted > seen)
        seen = admitted
    assert len(prefills) <= 12 and [token_lists([state.answer]) for state in states if state.answer] == expected


def test_no_prefill_is_postponed_while_few_rows_decode_or_none_is_free() -> None:
    engine = engine_of("grouped")
    scheduler = Scheduler(engine.runner, rows=WORTH, budget=500)
    states = [scheduler.submit(*one) for one in prompts_of(WORTH)]
    scheduler.step()
    late = scheduler.submit(*prompts_of(1)[0])
    scheduler.step()
    assert not late.admitted and not scheduler.postponement.steps
    states[0].cancel()
    while states[0] in scheduler.active:
        scheduler.step()
    assert steps_until_admitted(scheduler, late) == 1
    scheduler.close()
