"""A prefill of a recurring size runs as one graph, rounded up, and leaves the states of the plain prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import parse, preset_tree
from allyouneed.infer.cuda_graph import prefill as captured_prefill
from allyouneed.infer.cuda_graph import runner
from allyouneed.infer.cuda_graph.prefill import FIRST, InputGraph, PrefillRunner, PrefillSize, pack_inputs
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.models.base import Model
from allyouneed.runtime.cuda.capture import can_capture_prefill
from graph_runner import (
    DECODINGS,
    MODELS,
    decode_alone,
    decode_in_slots,
    engine_of,
    few_slots,
    make_requests,
    prefill_sizes,
    token_lists,
)
from property_tests import THOROUGH
from shrink import shrink
from tape_graph import capture_on_cpu


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_slots(monkeypatch)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[PrefillSize]:
    """Sizes of the prefills that ran as one graph."""
    return prefill_sizes(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_repeated_calls_decode_the_same(name: str, sizes: list[PrefillSize]) -> None:
    """Every model with beams; a decoder and an encoder-decoder with the other methods, too."""
    engine = engine_of(name)
    methods = ("greedy", "beam", "draws") if THOROUGH or name in ("gpt2", "translation") else ("beam",)
    for decoding in methods:
        requests = [Request(r.prompt, 11, r.sample_key, r.source) for r in make_requests(engine)]
        plain = engine.decode(requests, DECODINGS[decoding])
        for _ in range(3):
            found = decode_in_slots(engine, requests, DECODINGS[decoding])
            assert token_lists(found) == token_lists(plain)
    # padding would evict tokens from a window, and stay in a carry
    whole = name not in ("window", "wide-window", "prefix", "retention", "rwkv", "infini")
    assert bool(sizes) == whole
    if whole:
        assert {size.rows for size in sizes} >= {4, 8} if name == "translation" else len(sizes) > 2 * len(methods)


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_gets_new_inputs_each_time_and_a_failed_capture_falls_back(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on a GPU, with a stand-in for the graph."""
    given: dict[PrefillSize, Tensor] = {}
    replayed: list[PrefillSize] = []

    def capture(self: PrefillRunner, numbers: Tensor, size: PrefillSize) -> InputGraph:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        given[size] = numbers

        def replay() -> None:
            replayed.append(size)
            self.fill_slots(given[size], size)

        return InputGraph(numbers, replay)

    begin = PrefillRunner.__init__

    def on_a_gpu(self: PrefillRunner, *parts: Any) -> None:
        begin(self, *parts)
        self.captures = True

    monkeypatch.setattr(PrefillRunner, "__init__", on_a_gpu)
    monkeypatch.setattr(PrefillRunner, "capture", capture)
    monkeypatch.setattr(captured_prefill, "KEPT", 2)
    engine = engine_of("translation")
    for turn in range(3):
        requests = [Request(r.prompt, 11, r.sample_key, r.source) for r in make_requests(engine, 9 + 2 * turn)]
        plain = engine.decode(requests, DECODINGS["beam"])
        for _ in range(2):
            found = decode_in_slots(engine, requests, DECODINGS["beam"])
            assert token_lists(found) == token_lists(plain)
    assert bool(replayed) != fails
    assert all(len(kept.prefill_runner.graphs) <= 2 for kept in engine.graphs.kept.values())


def test_prompts_of_a_translation_are_prefilled_too(sizes: list[PrefillSize]) -> None:
    engine = engine_of("translation")
    requests = [
        Request([*r.prompt, 7, 9][: 1 + n % 3], 11, r.sample_key, r.source)
        for n, r in enumerate(make_requests(engine, 9))
    ]
    plain = engine.decode(requests, DECODINGS["beam"])
    for _ in range(3):
        found = decode_in_slots(engine, requests, DECODINGS["beam"])
        assert token_lists(found) == token_lists(plain)
    assert {(bool(size.sources), bool(size.prompts)) for size in sizes} == {(True, True), (True, False)}


def test_long_prompts_and_position_limits_use_the_plain_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(engine: Engine, length: int, rows: int = 1) -> PrefillSize | None:
        requests = [Request([1] * (length + 1), 5, (0,)) for _ in range(rows)]
        decode_in_slots(engine, requests, DECODINGS["greedy"])
        (kept,) = engine.graphs.kept.values()
        engine.graphs.kept.clear()
        return kept.prefill_runner.size(in_progress(engine, requests))

    engine = engine_of("llama")
    assert size(engine, 1) == PrefillSize(1, 0, 32) and size(engine, 17, 3) == PrefillSize(4, 0, 32)
    assert size(engine, 0) is None  # nothing to read
    monkeypatch.setattr(captured_prefill, "FLOOR", 32)
    monkeypatch.setattr(captured_prefill, "LONGEST", 64)
    monkeypatch.setattr(captured_prefill, "TOKENS", 100)
    assert size(engine, 64) == PrefillSize(1, 0, 64) and size(engine, 65) is None
    assert size(engine, 20, 3) is None  # 4 · 32 tokens
    learned = engine_of("gpt2")  # has 40 positions
    assert size(learned, 32) == PrefillSize(1, 0, 32) and size(learned, 33) is None


def test_prompts_of_new_lengths_replay_a_graph_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row takes as long with 256 tokens as with fewer. A larger batch runs as one that costs half as much again."""
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(runner, "MIN_CAPACITY", 512)
    engine, plain = engine_of("llama"), engine_of("llama")
    captured: list[PrefillSize] = []
    capture = PrefillRunner.capture
    monkeypatch.setattr(
        PrefillRunner,
        "capture",
        lambda self, inputs, size: (captured.append(size), capture(self, inputs, size))[1],
    )
    read = count_prefills(monkeypatch, engine)

    def ask(*lengths: int) -> None:
        requests = [Request([1, *(3 + (n + k) % 40 for k in range(n))], 9, (n,)) for n in lengths]
        expected = [decode_alone(plain, request, DECODINGS["greedy"])[0] for request in requests]
        assert token_lists(decode_in_slots(engine, requests, DECODINGS["greedy"])) == expected

    ask(20)
    ask(20)
    assert captured == [PrefillSize(1, 0, 256)] and len(read) == 1
    for length in (3, 200, 255, 1, 64):
        ask(length)
    assert len(captured) == 1 and len(read) == 1
    ask(*range(60, 68))
    ask(*range(60, 68))
    assert captured[1:] == [PrefillSize(8, 0, 80)] and len(read) == 2
    ask(*range(50, 58))
    assert len(captured) == 2 and len(read) == 2
    ask(*range(10, 18))  # would cost more than half as much again
    assert len(read) == 3


def count_prefills(patch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """The rows of each prefill that is not captured, from now on."""
    found: list[int] = []
    start = engine.runner.start
    patch.setattr(
        engine.runner, "start", lambda requests, model: (found.append(len(requests)), start(requests, model))[1]
    )
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["gpt2", "translation", "t5"])
def test_a_rounded_prefill_leaves_the_answers_alone(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests, read at the sizes that are chosen, and exactly."""
    capture_on_cpu(monkeypatch)
    engine = engine_of(name)
    requests = [Request(r.prompt, 9, r.sample_key, r.source) for r in make_requests(engine, rows)]
    found = []
    for floor in (captured_prefill.FLOOR, 1):
        monkeypatch.setattr(captured_prefill, "FLOOR", floor)
        engine.graphs.kept.clear()
        found += [token_lists(decode_in_slots(engine, requests, DECODINGS["greedy"])) for _ in range(3)]
    assert all(one == found[0] for one in found)


def in_progress(engine: Engine, requests: list[Request]) -> list[RequestState]:
    return [RequestState(request, engine.runner.spec(DECODINGS["greedy"]), request.limit) for request in requests]


def test_spare_rows_repeat_the_first() -> None:
    spec = DecodingSpec(DECODINGS["greedy"], 2)
    requests = [Request([1, 8, 9], 5, (n,), [5] * (n + 2)) for n in range(3)]
    states = [RequestState(request, spec, limit) for request, limit in zip(requests, (5, 6, 7), strict=True)]
    found = pack_inputs(PrefillSize(4, 16, 16), states, [2, 0, 3])
    assert found[:, :FIRST].tolist() == [[2, 5, 9, 2, 2], [0, 6, 9, 2, 3], [3, 7, 9, 2, 4], [2, 5, 9, 2, 2]]
    assert found[2, FIRST : FIRST + 5].tolist() == [5, 5, 5, 5, 0]
    assert found[1, FIRST + 16 : FIRST + 19].tolist() == [1, 8, 0]


@pytest.mark.parametrize(("name", "alike"), [("bart-base", True), ("t5-small", True), ("mistral-7b", False)])
def test_which_presets_support_captured_prefill(name: str, alike: bool) -> None:
    with torch.device("meta"):
        model = shrink(parse(Model, preset_tree(name))).build()  # type: ignore[type-abstract]
    assert can_capture_prefill(model) == alike
