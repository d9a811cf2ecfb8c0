"""Prompts are read into blocks by passes of few sizes, and each request gets the answer it gets alone."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch

from allyouneed.infer.cuda_graph import paged_prefill
from allyouneed.infer.cuda_graph.paged_prefill import (
    LENGTHS,
    SCORES,
    TOKENS,
    PagedPrefill,
    PassSize,
    PrefillChunk,
    plan,
    split,
)
from allyouneed.infer.cuda_graph.slot_loader import SlotLoader
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from graph_runner import (
    DECODINGS,
    admit_as_on_a_gpu,
    decode_alone,
    engine_of,
    make_requests,
    prefill_sizes,
    token_lists,
)
from host_sync import NoHostSync

GREEDY = Decoding(method="greedy", max_length=6)


def without_the_host(function: Any) -> Any:
    """A method that is captured: it does not wait for the host, but for the first time, when the pool is allocated."""

    def called(self: Any, *args: Any) -> Any:
        with NoHostSync() if self.pool.storage else nullcontext():
            return function(self, *args)

    return called


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs admit requests, and passes are replayed: on a CPU, computed anew from the inputs of the graph."""
    admit_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(PagedPrefill, "enabled", True)
    for owner, name in ((PagedPrefill, "compute"), (SlotLoader, "copy")):
        monkeypatch.setattr(owner, name, without_the_host(getattr(owner, name)))
    monkeypatch.setattr(paged_prefill, "LENGTHS", (4, 8, 16))
    monkeypatch.setattr(paged_prefill, "WARM_LENGTHS", (8, 16))
    monkeypatch.setattr(paged_prefill, "WARM_SUFFIXES", ((16, 64),))
    monkeypatch.setattr(paged_prefill, "FLOOR", 16)
    monkeypatch.setattr(paged_prefill, "MIN_END", 16)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[PassSize]:
    """The sizes that ran."""
    found: list[PassSize] = []
    run = PagedPrefill.run
    monkeypatch.setattr(
        PagedPrefill,
        "run",
        lambda self, states, chunks, graph: (found.append(graph.size), run(self, states, chunks, graph))[1],
    )
    return found


def scheduler_of(engine: Engine, blocks: int = 400, budget: int = 64, rows: int = 8) -> Scheduler:
    return Scheduler(engine.runner, rows=rows, budget=budget, pool=BlockPool(blocks, size=4), graphs=engine.graphs)


def prompts_of(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths; some begin alike."""
    dice = Random(seed)
    common = [dice.randrange(5, 30) for _ in range(longest)]
    found = []
    for number in range(count):
        length = dice.randint(1, longest)
        same = dice.randint(0, length) if number % 2 else 0
        found.append([*common[:same], *(dice.randrange(5, 30) for _ in range(length - same))])
    return found


def serve(engine: Engine, scheduler: Scheduler, requests: list[Request], ways: list[Decoding]) -> None:
    """Decode requests that arrive a few at a time, and compare each with its answer alone."""
    asked = [(request, ways[n % len(ways)]) for n, request in enumerate(requests)]
    states = []
    for number, one in enumerate(asked):
        states.append(scheduler.submit(*one))
        if number % 5 == 4:
            scheduler.step()
    scheduler.run()
    for state, (request, decoding) in zip(states, asked, strict=True):
        assert state.answer is not None
        assert token_lists([state.answer]) == decode_alone(engine, request, decoding)


def cached_prompts(scheduler: Scheduler) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """What the prefix cache holds: keys and values of each block, by the tokens up to its end."""
    assert scheduler.blocks is not None
    texts: dict[int, tuple[int, ...]] = {0: ()}
    left = dict(scheduler.blocks.prefixes.blocks)
    while left:
        key = next(key for key in left if key[0] in texts)
        texts[left.pop(key)] = texts[key[0]] + key[1]
    storage = scheduler.blocks.pool.storage.values()
    return {text: [one[block] for both in storage for one in both] for block, text in texts.items() if block}


@pytest.mark.parametrize("name", ["grouped", "gpt2", "alibi", "mla"])
def test_answers_and_cached_prefixes_are_those_of_the_plain_prefill(
    name: str, passes: list[PassSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(name)
    requests = [Request(prompt, 6, (n,)) for n, prompt in enumerate(prompts_of(16, 30))]
    ways = [GREEDY, DECODINGS["beam"], DECODINGS["sample"]]
    scheduler = scheduler_of(engine)
    assert scheduler.prefill.captured is not None
    scheduler.prefill.captured.warm_up(64)
    serve(engine, scheduler, requests, ways)
    assert passes and scheduler.blocks is not None and scheduler.blocks.prefixes.hits
    assert {size.end > size.tokens for size in passes} == {True, False}
    assert scheduler.slots is not None and scheduler.slots.batches
    assert scheduler.blocks.pool.used == scheduler.blocks.pool.evictable

    monkeypatch.setattr(PagedPrefill, "enabled", False)
    plain, count = scheduler_of(engine), len(passes)
    serve(engine, plain, requests, ways)
    assert len(passes) == count
    found, expected = cached_prompts(scheduler), cached_prompts(plain)
    assert found.keys() == expected.keys()
    for text, tensors in expected.items():
        for ours, theirs in zip(found[text], tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_long_prompts_are_read_in_parts_or_in_the_plain_way(
    passes: list[PassSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_prefill, "LONGEST", 40)
    engine = engine_of("llama")
    for length, is_captured in ((40, True), (41, False)):
        scheduler = scheduler_of(engine)
        prompts = [[5 + n, *range(5, 4 + length)] for n in range(3)]
        for turn in range(2):  # a size is captured when it recurs
            requests = [Request(prompt[turn:], 6, (n,)) for n, prompt in enumerate([*prompts, [7, 8, 9]])]
            serve(engine, scheduler, requests, [GREEDY])
            passes[: 0 if turn else None] = []
        assert bool(passes) is is_captured
        if is_captured:
            assert {size.end for size in passes} >= {16, 32, 64}  # parts of 16 tokens over growing pasts


def test_cancelled_requests_and_small_pools_leave_slots_and_blocks_to_the_others(passes: list[PassSize]) -> None:
    """A pool that is too small for all, prompts in several chunks, and cancelled requests."""
    engine = engine_of("grouped")
    long = Decoding(method="greedy", min_length=20, max_length=20)
    requests = [Request(prompt, 20, (n,)) for n, prompt in enumerate(prompts_of(14, 40, seed=3))]
    scheduler = scheduler_of(engine, blocks=34, budget=24, rows=3)
    assert scheduler.prefill.captured is not None and scheduler.blocks is not None
    scheduler.prefill.captured.warm_up(24)
    states = [scheduler.submit(request, long) for request in requests]
    for turn, state in enumerate(states[::3]):
        state.cancel() if turn % 2 else scheduler.step()
    scheduler.run()
    for state, request in zip(states, requests, strict=True):
        if not state.cancelled:
            assert state.answer is not None
            assert token_lists([state.answer]) == decode_alone(engine, request, long)
    assert passes and any(state.cancelled for state in states)
    assert scheduler.idle and scheduler.blocks.pool.used == scheduler.blocks.pool.evictable
    assert scheduler.slots is not None
    assert all(len(batch.runner.free) == 3 for batch in scheduler.slots.batches.values())


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_leaves_the_plain_prefill(
    error: Exception, passes: list[PassSize], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(PagedPrefill, "_capture", fail)
    engine = engine_of("llama")
    scheduler = scheduler_of(engine)
    is_memory = isinstance(error, torch.OutOfMemoryError)
    with nullcontext() if is_memory else pytest.warns(UserWarning, match="operation not permitted"):
        scheduler.warm_up([(Request([5, 6], 3, ()), GREEDY)])
    serve(engine, scheduler, [Request(prompt, 6, (n,)) for n, prompt in enumerate(prompts_of(10, 12))], [GREEDY])
    assert not passes and scheduler.prefill.captured is not None
    assert scheduler.prefill.captured.fits is is_memory


def test_after_a_warm_up_requests_run_in_captured_sizes(passes: list[PassSize]) -> None:
    engine = engine_of("grouped")
    scheduler = scheduler_of(engine)
    scheduler.warm_up([(Request([5, 6, 7], 3, ()), GREEDY)])
    assert scheduler.prefill.captured is not None and scheduler.blocks is not None and scheduler.slots is not None
    captured = set(scheduler.prefill.captured.graphs)
    assert PassSize(8, 8, 8) in captured and PassSize(1, 16, 64) in captured and scheduler.slots.batches
    assert not scheduler.blocks.pool.used and not scheduler.blocks.prefixes.prompt_tokens
    del passes[:]
    serve(engine, scheduler, [Request(prompt, 6, (n,)) for n, prompt in enumerate(prompts_of(20, 16))], [GREEDY])
    assert passes and set(passes) <= captured == set(scheduler.prefill.captured.graphs)
    before = list(scheduler.prefill.captured.graphs.values())
    for weight in engine.model.parameters():  # as after `model.to(...)`: graphs hold other addresses
        weight.data = weight.data.clone()
    serve(engine, scheduler, [Request(prompt, 6, (n,)) for n, prompt in enumerate(prompts_of(4, 16, seed=9))], [GREEDY])
    assert not any(old is new for old in before for new in scheduler.prefill.captured.graphs.values())


def test_a_plan_covers_all_tokens_with_little_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real sizes
    dice = Random(1)
    for _ in range(60):
        lengths = [dice.choice((1, 7, 8, 100, 128, 300, 513, 2000)) for _ in range(dice.randint(1, 200))]
        chunks = [PrefillChunk(row, dice.choice((0, 0, 8, 640)), range(n)) for row, n in enumerate(lengths)]
        read: dict[int, list[int]] = {row: [] for row in range(len(lengths))}
        cost = 0
        for part in split(chunks):
            for group, size in plan(part, rows=64):
                assert len(group) <= size.rows <= 64 and size.rows * size.tokens <= TOKENS and size.tokens in LENGTHS
                assert size.rows * size.tokens * size.end <= SCORES or size.rows == 1
                for row, seen, tokens in group:
                    assert seen == chunks[row].seen + len(read[row]) and len(tokens) <= size.tokens
                    assert seen + len(tokens) <= size.end and (not seen or size.end > size.tokens)
                    read[row] += tokens
                cost += size.rows * size.tokens
        assert read == {row: list(range(n)) for row, n in enumerate(lengths)}
        assert cost <= 2.5 * sum(lengths) + 4096 + 8 * len(lengths)


def test_sources_are_read_straight_into_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pool, as an encoder-decoder is served, a recurring size runs as one graph."""
    found = prefill_sizes(monkeypatch)
    engine = engine_of("translation")
    scheduler = Scheduler(engine.runner, rows=12, budget=60)
    serve(engine, scheduler, make_requests(engine, 24), [GREEDY, DECODINGS["beam"]])
    assert found
