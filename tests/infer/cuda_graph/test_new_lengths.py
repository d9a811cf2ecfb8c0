"""A prompt of a length not seen before costs no capture: one runner has room for many lengths, where a step takes no
longer for it, and what recurs is captured when it recurs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allyouneed.infer.cuda_graph import prefill, runner, shape
from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.runtime.cuda.capture import reads_past_tokens_only
from graph_runner import DECODINGS, drafts_of, engine_of
from tape_graph import capture_nothing, capture_on_cpu

NEW = 16  # tokens of an answer
GREEDY = Decoding(method="greedy", min_length=NEW, max_length=NEW)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is captured, by name, on a device of a terabyte."""
    found: list[str] = []

    def capture(step: Callable[[], None], *options: Any, **more: Any) -> Any:
        name = getattr(step, "__name__", "")
        found.append({"_step": "step", "_run": "run"}.get(name, "prefill"))
        return capture_nothing(step, *options, **more)

    capture_on_cpu(monkeypatch, capture)
    monkeypatch.setattr(shape, "device_memory", lambda device: 1 << 40)
    monkeypatch.setattr(runner, "WORTH", 1)
    return found


def ask(engine: Engine, length: int, rows: int = 1) -> None:
    engine.complete([[1, *(3 + n % 40 for n in range(length - 1))]] * rows, GREEDY)


@pytest.mark.parametrize("name", ["llama", "alibi", "retention", "rwkv"])
def test_prompts_of_new_lengths_capture_no_step(name: str, captures: list[str]) -> None:
    engine = engine_of(name)
    for _ in range(3):
        ask(engine, 20)
    captures.clear()
    for length in (50, 100, 37, 200):
        ask(engine, length)
        assert not captures, f"a prompt of {length} tokens"
    assert len(engine.graphs.kept) == 1


def test_the_first_call_captures_one_step_and_what_recurs_follows(captures: list[str]) -> None:
    engine = engine_of("llama")
    found = []
    for _ in range(4):
        captures.clear()
        ask(engine, 20)
        found.append(sorted(captures))
    assert found == [["step"], ["prefill", "run"], [], []]


def test_a_step_is_run_once_before_it_is_captured(monkeypatch: pytest.MonkeyPatch, captures: list[str]) -> None:
    tries: list[int] = []
    warm_up = prefill.warm_up
    monkeypatch.setattr(
        prefill, "warm_up", lambda step, count, *more: (tries.append(count), warm_up(step, count, *more))
    )
    engine = engine_of("llama")
    for _ in range(3):
        ask(engine, 20)
    assert sorted(tries) == [0, 1, 1]  # a run of steps, a step, a prefill


def test_room_takes_a_small_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_of("llama").model
    assert shape.room(model, 1) == 0  # a CPU captures nothing
    each = model.config.cost(1024).state_bytes(1024, 4, captured=True) / 1024
    for rows in (1, 8):
        for capacity in (128, 512, 1024):
            monkeypatch.setattr(shape, "device_memory", lambda _, size=rows * capacity: size * each * shape.SHARE)
            assert shape.room(model, rows) == capacity
    monkeypatch.setattr(shape, "device_memory", lambda device: 1 << 40)
    assert shape.room(model, 64) == shape.ROOM


@pytest.mark.parametrize(
    ("name", "spares"),
    [("llama", True), ("grouped", True), ("window", True), ("alibi", True), ("t5", True), ("retention", True),
     ("rwkv", True), ("infini", True), ("qk-norm", False), ("interleaved", False), ("mla", False)],
)  # fmt: skip
def test_models_whose_steps_read_only_the_tokens_there_are_have_room(name: str, spares: bool) -> None:
    assert reads_past_tokens_only(engine_of(name).model) == spares


def test_searches_that_keep_something_for_each_position_have_no_room(captures: list[str]) -> None:
    engine = engine_of("llama")
    graphs: GraphRunnerCache = engine.graphs
    spec = engine.runner.spec

    def capacity(decoding: Decoding, **more: Any) -> int:
        given = spec(decoding, **more)
        return graphs.shape([RequestState(Request([1, 5], 20, (0,)), given, 20)]).capacity

    assert capacity(DECODINGS["greedy"]) == capacity(DECODINGS["sample"]) == shape.ROOM
    tight = ("beam", "draws", "penalties", "penalties-beam")
    assert {capacity(DECODINGS[name]) for name in tight} == {runner.MIN_CAPACITY}
    for draft in drafts_of(engine).values():
        assert capacity(DECODINGS["greedy"], draft=draft) == runner.MIN_CAPACITY


@pytest.mark.parametrize("name", ["llama", "alibi", "window", "retention", "infini"])
def test_room_changes_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[Any]:
        engine, found = engine_of(name), []
        for length in (3, 9, 40, 9, 40):
            with torch.inference_mode():
                ((one,),) = engine.complete([[1, *range(3, 2 + length)]], GREEDY)
            found.append((one.tokens, pytest.approx(one.score, rel=1e-5)))
        return found

    plain = answers()
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(runner, "WORTH", 1)
    monkeypatch.setattr(shape, "device_memory", lambda device: 1 << 40)
    assert answers() == plain


def test_no_memory_to_spare_leaves_all_slots(captures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama")
    monkeypatch.setattr(runner, "rows_in_memory", lambda model, capacity: 8 * 64 // capacity)
    spec = engine.runner.spec(GREEDY)
    found = engine.graphs.shape([RequestState(Request([1, 5], 20, (n,)), spec, 20) for n in range(8)])
    assert (found.slots, found.capacity) == (8, 64)
