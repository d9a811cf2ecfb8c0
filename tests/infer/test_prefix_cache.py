"""Requests with paged states: the same answers, common prefixes prefilled once, never too few blocks, and every block
released."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from test_scheduler import (
    DECODINGS,
    FFN,
    GREEDY,
    LAYERS,
    build,
    check,
    check_sources,
    decode_alone,
    decoder_model,
    prompts,
    soak,
    submit,
    tokens_of,
)

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.engine import Engine
from allyouneed.infer.prefix_cache import PrefixCache
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from toy_models import BOS, EOS, PAD, VOCAB


def is_empty(scheduler: Scheduler) -> bool:
    """Only cached prefixes are left in the pool; without them every block is free."""
    assert scheduler.blocks is not None and scheduler.idle and not scheduler.active
    pool, prefixes = scheduler.blocks.pool, scheduler.blocks.prefixes
    kept = pool.used == len(prefixes.blocks)
    prefixes.clear()
    return kept and sorted(pool.free) == list(range(1, pool.blocks + 1)) and not any(pool.ref_counts)


def engine_of(model: Any) -> Engine:
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("blocks", [90, 2000])
def test_the_same_answers_from_a_large_and_a_small_pool(layer: str, blocks: int) -> None:
    engine = engine_of(decoder_model(layer))
    scheduler = Scheduler(engine.runner, rows=40, budget=40, pool=BlockPool(blocks, size=4))
    check(engine, scheduler, 18)
    assert is_empty(scheduler)


def test_sources_and_beams_in_a_pool(engine: Engine, sources: list[list[int]]) -> None:
    scheduler = Scheduler(engine.runner, rows=24, budget=64, pool=BlockPool(3000))
    check_sources(engine, scheduler, sources)
    assert is_empty(scheduler)


def test_a_preempted_request_resumes_where_it_was() -> None:
    """Far fewer blocks than all requests need together; the urgent one is not preempted."""
    engine = engine_of(decoder_model())
    long = [decoding.model_copy(update={"max_length": 30, "min_length": 25}) for decoding in DECODINGS]
    scheduler = Scheduler(engine.runner, rows=60, pool=BlockPool(60, size=4))
    cases = [(prompt, long[n % len(long)], n) for n, prompt in enumerate(prompts(14, longest=8))]
    states = [submit(scheduler, *one, priority=int(one[2] == 5)) for one in cases]
    order: list[RequestState] = []
    while not scheduler.idle:
        scheduler.step()
        assert scheduler.blocks is not None and scheduler.blocks.pool.used <= 60
        order += [state for state in states if state.finished and state not in order]
    assert scheduler.preemptions > 3 and order.index(states[5]) < 4
    for state, one in zip(states, cases, strict=True):
        assert tokens_of(state) == decode_alone(engine, *one)
    assert is_empty(scheduler)


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(engine_of(decoder_model()).runner, pool=BlockPool(10, size=4))
    with pytest.raises(UserError, match="blocks of state, the pool has 10"):
        submit(scheduler, [BOS] * 40)
    assert scheduler.idle


def test_a_cached_prefix_is_not_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(decoder_model())
    scheduler = Scheduler(engine.runner, pool=BlockPool(200, size=4))
    read, advance = [], engine.model.advance

    def watched(new: Any, states: Any, last: bool = False) -> Any:
        read.append(new.tokens.numel() if last else 0)
        return advance(new, states, last)

    monkeypatch.setattr(engine.model, "advance", watched)
    begin = [BOS, *range(3, 25)]
    sizes = []
    for rest in ([], [7], [8, 9], []):
        read.clear()
        state = submit(scheduler, [*begin, *rest])
        scheduler.run()
        sizes.append(sum(read))
        assert tokens_of(state) == decode_alone(engine, [*begin, *rest], GREEDY)
    assert sizes == [23, 4, 5, 3]  # of 23 tokens, five full blocks are known: 20
    assert is_empty(scheduler)


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
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


def test_constant_states_are_reserved_in_the_pool() -> None:
    """By the size their config declares: no more requests at once than fit."""
    engine = engine_of(decoder_model("retention"))
    scheduler = Scheduler(engine.runner, rows=40, pool=BlockPool(3))
    states = [submit(scheduler, [BOS, 5]) for _ in range(8)]
    at_once = 0
    while not scheduler.idle:
        scheduler.step()
        at_once = max(at_once, len(scheduler.active))
    assert at_once == 3 and all(state.answer for state in states) and is_empty(scheduler)


def test_little_of_the_allocated_blocks_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = {"kind": "decoder", "decoder": [{"wiring": "pre-norm", "channel": FFN} | LAYERS["kv"]]}
    dice, scheduler = Random(0), Scheduler(engine_of(build(mixed)).runner, rows=48, budget=512, pool=BlockPool(2000))
    for key in range(120):
        decoding = dice.choice(DECODINGS[:4]).model_copy(update={"max_length": dice.randrange(8, 40), "min_length": 8})
        submit(scheduler, [BOS, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(20, 300)))], decoding, key)
    wastes = []
    while not scheduler.idle:
        scheduler.step()
        wastes.append(scheduler.waste())
    print(f"allocated but empty: {100 * sum(wastes) / len(wastes):.1f}%")
    assert 0 < sum(wastes) / len(wastes) < 0.04 and is_empty(scheduler)


def soak_the_pool(count: int, seed: int) -> None:
    dice, engine = Random(seed), engine_of(decoder_model(vocab=23))
    scheduler = Scheduler(engine.runner, rows=48, budget=96, pool=BlockPool(100, size=4))
    begins = [[BOS, *(dice.randrange(3, 23) for _ in range(n))] for n in (1, 9, 14)]
    soak(engine, scheduler, count, seed, begins, rare=0.3, most=24)
    assert scheduler.preemptions and is_empty(scheduler)


def test_five_hundred_requests_release_every_block() -> None:
    soak_the_pool(500, seed=1)


@pytest.mark.slow
def test_twenty_thousand_requests_release_every_block() -> None:
    soak_the_pool(20_000, seed=2)


@pytest.mark.parametrize("pages", [True, False])
def test_equal_prompts_are_prefilled_once(pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any decoding options, also if some of them are cancelled meanwhile."""
    engine = engine_of(decoder_model())
    scheduler = Scheduler(engine.runner, rows=40, budget=6, pool=BlockPool(200, size=4) if pages else None)
    read, prefill = [], engine.runner.prefill_chunk

    def watched(states: Any, chunks: Any, *rest: Any) -> Any:
        read.append(sum(map(len, chunks)))
        return prefill(states, chunks, *rest)

    monkeypatch.setattr(engine.runner, "prefill_chunk", watched)
    prompt, other = [BOS, *range(3, 14)], [BOS, 7, 8]
    wanted = [(prompt, DECODINGS[n % len(DECODINGS)], n) for n in range(8)] + [(other, GREEDY, 9)]
    states = scheduler.submit_all([(Request(p, d.continuation_limit(), (key,)), d) for p, d, key in wanted])
    scheduler.step()
    states[0].cancel()
    scheduler.run()
    assert sum(read) == len(prompt) + len(other) and max(read) <= 6
    for state, one in list(zip(states, wanted, strict=True))[1:]:
        assert tokens_of(state) == decode_alone(engine, *one)
    assert is_empty(scheduler) if pages else scheduler.idle
