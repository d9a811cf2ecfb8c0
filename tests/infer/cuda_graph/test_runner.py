"""A batch of a fixed shape, in which the device goes on and the host listens later, says what the plain engine says. On
a GPU the same code runs with kernels and captured graphs (bench/check_kernels.py, bench/check_gpu.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.infer.cuda_graph import runner as seats
from allyouneed.infer.decoding.base import Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine, Request
from allyouneed.nn.models.base import Model
from allyouneed.runtime.cuda.capture import can_capture
from graph_runner import MODELS, WAYS, asked, engine_of, said
from shrink import quantize
from toy_models import BOS


def both(engine: Engine, decoding: Decoding, requests: list[Request]) -> tuple[Any, Any]:
    longest = decoding.max_length or 20
    requests = [Request(r.prompt, longest - n % 4, r.place, r.source) for n, r in enumerate(requests)]
    plain = engine._answers(requests, decoding, None)
    found: list[list[Hypothesis]] = [[] for _ in requests]
    assert engine.room.suits(decoding)
    engine.room.answer(requests, found, decoding)
    return plain, found


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(seats, "ROWS", 8)  # so that seats change hands
    monkeypatch.setattr(seats, "SMALLEST", 32)
    yield


@pytest.mark.parametrize("name", MODELS)
def test_says_what_the_plain_engine_says(name: str) -> None:
    engine = engine_of(name)
    for way in ("greedy", "beam", "sample"):
        plain, found = both(engine, WAYS[way], asked(engine))
        assert said(found) == said(plain)
        for ours, theirs in zip(found, plain, strict=True):
            assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
            assert ours[0].log_probs == pytest.approx(theirs[0].log_probs, abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way(sources: list[list[int]], way: str) -> None:
    engine = engine_of("translation")
    requests = [Request([BOS], 20, (n,), source) for n, source in enumerate(sources)]
    plain, found = both(engine, WAYS[way], requests)
    assert said(found) == said(plain)
    assert len({len(one.tokens) for hypotheses in plain for one in hypotheses}) > 2
    assert way == "least" or any(one.finished for hypotheses in plain for one in hypotheses)
    writer = engine_of("grouped")
    plain, found = both(writer, WAYS[way], asked(writer, 19))
    assert said(found) == said(plain)


def test_a_window_that_has_turned_while_the_prompt_was_read() -> None:
    engine = engine_of("window")
    requests = [Request([BOS, *(3 + (7 * n + k) % 50 for k in range(n))], 9, (n,)) for n in (2, 40, 100, 151)]
    for way in ("greedy", "beam"):
        plain, found = both(engine, WAYS[way], requests)
        assert said(found) == said(plain)


def test_a_forced_end_counts_for_nothing() -> None:
    for way in ("greedy", "beam"):
        engine = engine_of("translation", ended=True, counted=1)
        plain, found = both(engine, WAYS[way], asked(engine))
        assert said(found) == said(plain)
        assert [h[0].score for h in found] == pytest.approx([h[0].score for h in plain], abs=1e-4)


def test_places_that_run_out_end_a_text_as_they_always_do() -> None:
    engine = engine_of("gpt2")
    requests = [Request([BOS, *range(3, 3 + n)], 99, (n,)) for n in (1, 20, 38, 39)]
    plain, found = both(engine, Decoding(method="greedy", max_length=99), requests)
    assert said(found) == said(plain)


def test_a_stop_that_is_heard_later_cuts_what_was_said_meanwhile() -> None:
    class Stop:
        reach = 2

        def __call__(self, tokens: Any) -> bool:
            return sum(tokens[-2:]) % 7 == 3

    engine = engine_of("llama")
    requests, decoding = asked(engine), WAYS["greedy"]
    plain = engine._answers(requests, decoding, None, Stop())
    found: list[list[Hypothesis]] = [[] for _ in requests]
    engine.room.answer(requests, found, decoding, Stop())
    assert said(found) == said(plain)
    assert any(one[0].finished for one in found)


def test_who_listens_hears_every_token_once_and_may_leave() -> None:
    engine, decoding = engine_of("llama"), Decoding(method="greedy", min_length=24, max_length=25)
    heard: dict[int, list[int]] = {n: [] for n in range(3)}
    requests = asked(engine, 3)
    ones = [RequestState(25, (n,), r.prompt, on_token=heard[n].append) for n, r in enumerate(requests)]
    with torch.inference_mode():
        for number, _ in enumerate(engine.room.rounds(engine.way(decoding), list(zip(requests, ones, strict=True)))):
            if number == 0:
                ones[1].cancelled = True
    assert heard[0] == ones[0].hypotheses[0].tokens and heard[2] == ones[2].hypotheses[0].tokens
    assert ones[0].done and not ones[1].done and 0 < len(heard[1]) < 25


def test_seats_are_kept_for_the_next_call_and_made_anew_when_the_weights_move() -> None:
    engine = engine_of("llama")
    requests, found = asked(engine), [[] for _ in range(11)]  # type: ignore[var-annotated]
    engine.room.answer(requests, found, WAYS["greedy"])
    (first,) = engine.room.kept.values()
    engine.room.answer(requests[:9], found, WAYS["greedy"])
    assert list(engine.room.kept.values()) == [first] and sorted(first.free) == list(range(8))
    engine.model = engine.model.double()
    plain, again = both(engine, WAYS["greedy"], requests)
    assert said(again) == said(plain) and len(engine.room.kept) == 2


def test_seats_that_were_left_early_serve_the_next_as_well() -> None:
    engine = engine_of("translation")
    for way in ("greedy", "beam", "draws", "greedy", "beam", "draws"):
        plain, found = both(engine, WAYS[way], asked(engine, 5))
        assert said(found) == said(plain)
    assert len(engine.room.kept) == 3


def test_two_who_ask_at_once_get_seats_of_their_own() -> None:
    engine, decoding = engine_of("llama"), WAYS["greedy"]
    (request, other), way = asked(engine, 2), engine.way(decoding)
    plain = engine._answers([request, other], decoding, None)
    one, two = RequestState(20, (0,), request.prompt), RequestState(20, (1,), other.prompt)
    with torch.inference_mode():
        for _ in engine.room.rounds(way, [(request, one)]):
            for _ in engine.room.rounds(way, [(other, two)] if not two.done else []):
                pass
    assert said([one.hypotheses, two.hypotheses]) == said(plain)


def test_what_has_no_fixed_shape_is_left_to_the_plain_path() -> None:
    engine = engine_of("llama")
    assert not engine.room.open([], WAYS["greedy"])  # no GPU here
    assert not engine.room.suits(Decoding(method="greedy", repetition_penalty=1.2))
    assert not engine.room.suits(Decoding(method="greedy", no_repeat=2))


FIT = "gpt2 llama-7b mistral-7b bloom-560m t5-small marian bart-base transformer-base transformer-big deepnet residual"
DO_NOT = "mixtral-8x7b retnet-1.3b rwkv-4-169m infini universal-transformer deepseek-v2-lite retro yoco-3b convs2s"
PRESETS = [*((name, True) for name in FIT.split()), *((name, False) for name in DO_NOT.split())]


@pytest.mark.parametrize(("name", "fits"), PRESETS)
def test_which_presets_fit(name: str, fits: bool) -> None:
    model: Any = quantize(parse(Model, preset_tree(name))).build()  # type: ignore[type-abstract]
    assert can_capture(model) == fits
