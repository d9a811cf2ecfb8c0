"""Requests whose states lie in one pool: the same answers, pasts that begin alike read once, never too few blocks, and
every block comes back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from test_scheduler import FFN, GREEDY, LAYERS, WAYS, alone, ask, build, prompts, soak, told, writer

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.engine import Engine
from allyouneed.infer.prefix_cache import PrefixCache
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from toy_models import BOS, EOS, PAD, VOCAB


def empty(scheduler: Scheduler) -> bool:
    """Nobody is served any more, and only beginnings are kept; without them everything is free."""
    assert scheduler.blocks is not None and scheduler.idle and not scheduler.active
    pool, prefixes = scheduler.blocks.pool, scheduler.blocks.prefixes
    kept = pool.used == len(prefixes.blocks)
    prefixes.clear()
    return kept and sorted(pool.free) == list(range(1, pool.blocks + 1)) and not any(pool.ref_counts)


def engine_of(model: Any) -> Engine:
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("blocks", [90, 2000])
def test_the_same_answers_from_a_pool_large_or_small(layer: str, blocks: int) -> None:
    engine = engine_of(writer(layer))
    scheduler = Scheduler(engine, rows=40, budget=40, pool=BlockPool(blocks, size=4))
    asked = [(prompt, WAYS[n % len(WAYS)], n) for n, prompt in enumerate(prompts(18))]
    states = []
    for prompt, way, place in asked:
        states.append(ask(scheduler, prompt, way, place))
        scheduler.step()
    scheduler.run()
    for state, one in zip(states, asked, strict=True):
        assert told(state) == alone(engine, *one)
    assert empty(scheduler)


def test_sources_and_beams_in_a_pool(engine: Engine, sources: list[list[int]]) -> None:
    scheduler = Scheduler(engine, rows=24, budget=64, pool=BlockPool(3000))
    states = []
    for place, source in enumerate(sources):
        decoding = WAYS[place % len(WAYS)]
        states.append(scheduler.submit(Request([BOS], decoding.limit(len(source)), (place,), source), decoding))
    scheduler.run()
    for place, (state, source) in enumerate(zip(states, sources, strict=True)):
        (found,) = engine.generate([source], WAYS[place % len(WAYS)], sample_keys=[[place]])
        assert told(state) == [h.tokens for h in found]
    assert empty(scheduler)


def test_who_is_put_aside_goes_on_where_it_was() -> None:
    """Far fewer blocks than everyone together needs; the urgent are not the ones who wait."""
    engine = engine_of(writer())
    long = [way.model_copy(update={"max_length": 30, "min_length": 25}) for way in WAYS]
    scheduler = Scheduler(engine, rows=60, pool=BlockPool(60, size=4))
    asked = [(prompt, long[n % len(long)], n) for n, prompt in enumerate(prompts(14, longest=8))]
    states = [ask(scheduler, *one, priority=int(one[2] == 5)) for one in asked]
    order: list[RequestState] = []
    while not scheduler.idle:
        scheduler.step()
        assert scheduler.blocks is not None and scheduler.blocks.pool.used <= 60
        order += [state for state in states if state.finished and state not in order]
    assert scheduler.preemptions > 3 and order.index(states[5]) < 4
    for state, one in zip(states, asked, strict=True):
        assert told(state) == alone(engine, *one)
    assert empty(scheduler)


def test_what_could_never_fit_is_refused() -> None:
    scheduler = Scheduler(engine_of(writer()), pool=BlockPool(10, size=4))
    with pytest.raises(UserError, match="blocks of state, the pool has 10"):
        ask(scheduler, [BOS] * 40)
    assert scheduler.idle


def test_a_beginning_that_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(writer())
    scheduler = Scheduler(engine, pool=BlockPool(200, size=4))
    read, advance = [], engine.model.advance

    def watched(new: Any, states: Any, last: bool = False) -> Any:
        read.append(new.tokens.numel() if last else 0)
        return advance(new, states, last)

    monkeypatch.setattr(engine.model, "advance", watched)
    begin = [BOS, *range(3, 25)]
    sizes = []
    for rest in ([], [7], [8, 9], []):
        read.clear()
        state = ask(scheduler, [*begin, *rest])
        scheduler.run()
        sizes.append(sum(read))
        assert told(state) == alone(engine, [*begin, *rest], GREEDY)
    assert sizes == [23, 4, 5, 3]  # of 23 tokens, five full blocks are known: 20
    assert empty(scheduler)


def test_the_longest_unused_beginning_goes_first_and_its_end_before_it() -> None:
    pool = BlockPool(6, size=2)
    prefixes = PrefixCache(pool)
    for prompt in ([1, 2, 3, 4], [5, 6, 7, 8]):
        blocks = pool.allocate(2)
        prefixes.keep(prompt, blocks)
        pool.release(blocks)
    assert pool.used == 4
    pool.release(prefixes.find([1, 2, 3, 4, 9]))
    assert prefixes.evict() and prefixes.evict()
    assert prefixes.find([5, 6, 7, 8, 9]) == [] and len(prefixes.find([1, 2, 3, 4, 9])) == 2
    assert not pool.release(prefixes.find([1, 2, 9, 9, 9])) and len(prefixes.blocks) == 2


def test_constant_states_live_in_the_same_pool() -> None:
    """By the size their config declares: no more of them at once than there is room for."""
    engine = engine_of(writer("retention"))
    scheduler = Scheduler(engine, rows=40, pool=BlockPool(3))
    states = [ask(scheduler, [BOS, 5]) for _ in range(8)]
    crowd = 0
    while not scheduler.idle:
        scheduler.step()
        crowd = max(crowd, len(scheduler.active))
    assert crowd == 3 and all(state.answer for state in states) and empty(scheduler)


def test_little_is_reserved_that_holds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = {"kind": "decoder", "decoder": [{"wiring": "pre-norm", "channel": FFN} | LAYERS["kv"]]}
    dice, scheduler = Random(0), Scheduler(engine_of(build(mixed)), rows=48, budget=512, pool=BlockPool(2000))
    for place in range(120):
        way = dice.choice(WAYS[:4]).model_copy(update={"max_length": dice.randrange(8, 40), "min_length": 8})
        ask(scheduler, [BOS, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(20, 300)))], way, place)
    wastes = []
    while not scheduler.idle:
        scheduler.step()
        wastes.append(scheduler.waste())
    print(f"blocks in use that hold nothing: {100 * sum(wastes) / len(wastes):.1f}%")
    assert 0 < sum(wastes) / len(wastes) < 0.04 and empty(scheduler)


def soak_the_pool(count: int, seed: int) -> None:
    dice, scheduler = (
        Random(seed),
        Scheduler(engine_of(writer(vocab=23)), rows=48, budget=96, pool=BlockPool(100, size=4)),
    )
    begins = [[BOS, *(dice.randrange(3, 23) for _ in range(n))] for n in (1, 9, 14)]
    soak(scheduler, count, seed, begins, rare=0.3, most=24)
    assert scheduler.preemptions and empty(scheduler)


def test_two_thousand_who_come_and_go_leave_nothing_behind() -> None:
    soak_the_pool(2_000, seed=1)


@pytest.mark.slow
def test_twenty_thousand_who_come_and_go_leave_nothing_behind() -> None:
    soak_the_pool(20_000, seed=2)
