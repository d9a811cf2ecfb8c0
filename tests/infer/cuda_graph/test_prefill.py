"""A reading of a size that came before is done as a whole, rounded up, and leaves what the plain reading leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import parse, preset_tree
from allyouneed.infer.cuda_graph import prefill as intake
from allyouneed.infer.cuda_graph import runner as seats
from allyouneed.infer.cuda_graph.prefill import FIRST, Graph, PrefillRunner, Size, numbered
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.engine import Engine, Request
from allyouneed.nn.models.base import Model
from allyouneed.runtime.cuda.capture import can_capture_prefill
from graph_runner import MODELS, WAYS, asked, engine_of, said
from shrink import quantize


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(seats, "ROWS", 8)  # so that seats change hands
    monkeypatch.setattr(seats, "SMALLEST", 32)
    yield


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[Size]:
    """Of the readings that were done as a whole."""
    found: list[Size] = []
    lay = PrefillRunner.lay
    monkeypatch.setattr(PrefillRunner, "lay", lambda self, given, size: (found.append(size), lay(self, given, size))[1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_says_the_same_when_it_is_asked_again(name: str, sizes: list[Size]) -> None:
    engine = engine_of(name)
    for way in ("greedy", "beam", "draws"):
        requests = [Request(r.prompt, 11, r.place, r.source) for r in asked(engine)]
        plain = engine._answers(requests, WAYS[way], None)
        for _ in range(3):
            found: list[list[Hypothesis]] = [[] for _ in requests]
            engine.room.answer(requests, found, WAYS[way])
            assert said(found) == said(plain)
    whole = name not in ("window", "wide-window", "prefix")  # a ring: padding would push out what is still to be seen
    assert bool(sizes) == whole
    if whole:
        assert {size.rows for size in sizes} >= {4, 8} if name == "translation" else len(sizes) > 6


@pytest.mark.parametrize("fails", [False, True])
def test_a_graph_gets_new_numbers_each_time_and_one_that_fails_is_none(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """As on a GPU, with a graph that is none."""
    given: dict[Size, Tensor] = {}
    replayed: list[Size] = []

    def captured(self: PrefillRunner, numbers: Tensor, size: Size) -> Graph:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        given[size] = numbers

        def replay() -> None:
            replayed.append(size)
            self.lay(given[size], size)

        return Graph(numbers, replay)

    begin = PrefillRunner.__init__

    def on_a_gpu(self: PrefillRunner, *parts: Any) -> None:
        begin(self, *parts)
        self.captures = True

    monkeypatch.setattr(PrefillRunner, "__init__", on_a_gpu)
    monkeypatch.setattr(PrefillRunner, "captured", captured)
    monkeypatch.setattr(intake, "KEPT", 2)
    engine = engine_of("translation")
    for turn in range(3):
        requests = [Request(r.prompt, 11, r.place, r.source) for r in asked(engine, 9 + 2 * turn)]
        plain = engine._answers(requests, WAYS["beam"], None)
        for _ in range(2):
            found: list[list[Hypothesis]] = [[] for _ in requests]
            engine.room.answer(requests, found, WAYS["beam"])
            assert said(found) == said(plain)
    assert bool(replayed) != fails
    assert all(len(kept.intake.graphs) <= 2 for kept in engine.room.kept.values())


def test_prompts_of_a_translation_are_read_as_well(sizes: list[Size]) -> None:
    engine = engine_of("translation")
    requests = [Request([*r.prompt, 7, 9][: 1 + n % 3], 11, r.place, r.source) for n, r in enumerate(asked(engine, 9))]
    plain = engine._answers(requests, WAYS["beam"], None)
    for _ in range(3):
        found: list[list[Hypothesis]] = [[] for _ in requests]
        engine.room.answer(requests, found, WAYS["beam"])
        assert said(found) == said(plain)
    assert {(bool(size.sources), bool(size.prompts)) for size in sizes} == {(True, True), (True, False)}


def test_what_is_long_or_has_no_places_is_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(engine: Engine, length: int, rows: int = 1) -> Size | None:
        requests = [Request([1] * (length + 1), 5, (0,)) for _ in range(rows)]
        found: list[list[Hypothesis]] = [[] for _ in requests]
        engine.room.answer(requests, found, WAYS["greedy"])
        (kept,) = engine.room.kept.values()
        engine.room.kept.clear()
        return kept.intake.size(requests)

    engine = engine_of("llama")
    assert size(engine, 1) == Size(1, 0, 16) and size(engine, 17, 3) == Size(4, 0, 32)
    assert size(engine, 0) is None  # nothing to read
    monkeypatch.setattr(intake, "LONGEST", 64)
    monkeypatch.setattr(intake, "TOKENS", 100)
    assert size(engine, 64) == Size(1, 0, 64) and size(engine, 65) is None
    assert size(engine, 20, 3) is None  # 4 · 32 tokens
    learned = engine_of("gpt2")  # has 40 places
    assert size(learned, 32) == Size(1, 0, 32) and size(learned, 33) is None


def test_rows_that_nobody_asked_for_repeat_the_first() -> None:
    requests = [Request([1, 8, 9], 5, (n,), [5] * (n + 2)) for n in range(3)]
    found = numbered(Size(4, 16, 16), requests, [5, 6, 7], [2, 0, 3])
    assert found[:, :FIRST].tolist() == [[2, 5, 9, 2, 2], [0, 6, 9, 2, 3], [3, 7, 9, 2, 4], [2, 5, 9, 2, 2]]
    assert found[2, FIRST : FIRST + 5].tolist() == [5, 5, 5, 5, 0]
    assert found[1, FIRST + 16 : FIRST + 19].tolist() == [1, 8, 0]


@pytest.mark.parametrize(("name", "alike"), [("bart-base", True), ("t5-small", True), ("mistral-7b", False)])
def test_which_presets_are_read_as_a_whole(name: str, alike: bool) -> None:
    with torch.device("meta"):
        model = quantize(parse(Model, preset_tree(name))).build()  # type: ignore[type-abstract]
    assert can_capture_prefill(model) == alike
