"""A text that loops is cut and reported: at the same token in any batch and on any decoding path. A source that repeats
itself may be translated by a text that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_prefix_cache import is_empty
from test_promises import uses
from test_scheduler import decoder_model, prompts, submit, tokens_of

import allyouneed as ayn
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import (
    CHECK_EVERY,
    MAX_PERIOD,
    MIN_LOOP_TOKENS,
    find_loop,
    has_check,
    has_repeats,
    is_check_due,
    is_looping,
    loop_period,
)
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.nn.states.paged import BlockPool
from graph_runner import decode_in_slots, with_graphs
from graph_runner import engine_of as seated_engine
from toy_models import BOS, EOS, PAD

WAYS = {
    "greedy": Decoding(method="greedy", max_length=150),
    "sample": Decoding(method="sample", top_k=3, temperature=0.05, seed=4, max_length=150),
    "draws": Decoding(method="sample", top_k=2, temperature=0.05, seed=4, best=2, max_length=150),
    "beam": Decoding(beam=3, best=2, max_length=150),
}


@pytest.fixture(scope="module")
def speaker() -> Engine:
    return with_graphs(Engine(decoder_model(vocab=17), BOS, EOS, PAD, forbidden=[PAD, BOS, EOS]))


def few(count: int = 8) -> list[list[int]]:
    return [[token % 14 + 3 for token in prompt] for prompt in prompts(count, longest=9)]


# --- what a loop is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, MAX_PERIOD + 1))
def test_a_loop_needs_enough_repeats_and_enough_tokens(size: int) -> None:
    for loops in (2, 8):
        needed = max(MIN_LOOP_TOKENS, loops * size)
        said = [*range(100, 150), *(n % size for n in range(needed))]
        assert loop_period(said, loops) == size and loop_period([*said[:50], *said[51:]], loops) == 0
        broken = [*said[:-3], 99, *said[-2:]] if size > 3 else [*said[:-size], 99, *said[len(said) - size + 1 :]]
        assert loop_period(broken, loops) == 0
    assert loop_period([*range(MAX_PERIOD + 1)] * 50, 8) == 0 and loop_period([], 8) == loop_period([1], 8) == 0


def test_checks_come_at_fixed_lengths_after_the_minimum() -> None:
    way = Decoding(method="greedy")
    assert [n for n in range(100) if is_looping([7] * n, way)] == [32, 48, 64, 80, 96]
    assert (
        find_loop([7] * 100, way) == 32
        and find_loop([*range(20), *[7] * 80], way) == 64
        and find_loop([*range(99)], way) is None
    )
    late = Decoding(method="greedy", min_length=48)
    assert find_loop([7] * 100, late) == 64 and find_loop([7] * 100, Decoding(loops=None)) is None
    assert Decoding(loops=0).loops is None and MIN_LOOP_TOKENS % CHECK_EVERY == 0
    with pytest.raises(UserError, match="loops"):
        Decoding.of({}, loops=1)


# --- where it is cut -------------------------------------------------------------------------------------------------


def expected_cut(free: Hypothesis, way: Decoding) -> tuple[list[int], bool]:
    end = find_loop(free.tokens, way)
    return free.tokens[:end], end is not None


@pytest.mark.parametrize("name", ["greedy", "sample", "draws"])
def test_a_cut_text_is_a_prefix_of_the_uncut_one(speaker: Engine, name: str) -> None:
    way = WAYS[name]
    free = speaker.complete(few(), way.model_copy(update={"loops": None}))
    found = speaker.complete(few(), way)
    for ours, theirs in zip(found, free, strict=True):
        expected = sorted(expected_cut(one, way) for one in theirs)
        assert sorted((one.tokens, one.repeats) for one in ours) == expected
        assert all(len(one.log_probs) == len(one.tokens) and not one.finished for one in ours)
    assert sum(one.repeats for best in found for one in best) > 3, "the test needs loops"


def test_a_beam_search_ends_with_its_best_hypothesis(speaker: Engine) -> None:
    found = speaker.complete(few(), WAYS["beam"])
    free = speaker.complete(few(), WAYS["beam"].model_copy(update={"loops": None}))
    assert sum(best[0].repeats for best in found) > 3
    for ours, theirs in zip(found, free, strict=True):
        if ours[0].repeats:
            assert len(ours[0].tokens) < len(theirs[0].tokens) == 150 and len(ours) == 2
            assert is_looping(ours[0].tokens, WAYS["beam"])
            assert ours[0].score >= ours[1].score


@pytest.mark.parametrize("name", WAYS)
def test_the_same_in_a_batch_with_paged_states_in_slots_and_with_a_draft(speaker: Engine, name: str) -> None:
    way = WAYS[name]
    expected = [[(h.tokens, h.repeats) for h in speaker.complete([p], way, first=n)[0]] for n, p in enumerate(few())]
    scheduler = Scheduler(speaker.runner, rows=12, budget=16, pool=BlockPool(400, size=4))
    states = []
    for number, prompt in enumerate(few()):
        states.append(submit(scheduler, prompt, way, number))
        for _ in range(number * 3):
            scheduler.step()
    scheduler.run()
    assert [[(h.tokens, h.repeats) for h in state.answer or ()] for state in states] == expected
    assert all(state.tokens == tokens_of(state)[0] for state in states if way.rows == 1) and is_empty(scheduler)
    requests = [Request(prompt, 150, (number,)) for number, prompt in enumerate(few())]
    if speaker.graphs.suits(speaker.runner.spec(way)):
        found = decode_in_slots(speaker, requests, way)
        assert [[(h.tokens, h.repeats) for h in best] for best in found] == expected
    if name == "greedy":
        guessed = speaker.complete(few(), way, draft=PromptLookup(4))
        assert [[(h.tokens, h.repeats) for h in best] for best in guessed] == expected


def test_slots_cut_translations_too() -> None:
    engine = seated_engine("translation")
    sources = [[*range(3, 3 + n), EOS] for n in range(2, 9)]
    for way in (Decoding(beam=3, best=2, max_length=100), Decoding(method="greedy", max_length=100)):
        requests = [Request([BOS], 100, (n,), source) for n, source in enumerate(sources)]
        found = decode_in_slots(engine, requests, way)
        assert [[h.tokens for h in best] for best in found] == [
            [h.tokens for h in best] for best in engine.decode(requests, way)
        ]


def test_a_stream_ends_where_the_text_is_cut(speaker: Engine) -> None:
    for number, prompt in enumerate(few(4)):
        ((whole,),) = speaker.complete([prompt], WAYS["greedy"], first=number)
        assert list(speaker.stream(prompt, WAYS["greedy"], number)) == whole.tokens


# --- how it is reported ------------------------------------------------------------------------------------------


def test_generate_reports_it(tokenizer: Tokenizer) -> None:
    generate: Any = uses(tokenizer)["generate"]
    model = generate.__self__
    (full,) = model.generate_full(["the cat"], method="greedy", max_length=300)
    said = full.candidates[0].tokens
    assert any(
        note == f"'the cat': stopped after {said} tokens because it repeats itself; loops=0 disables this"
        for note in full.notes
    )
    (free,) = model.generate_full(["the cat"], method="greedy", max_length=300, loops=None)
    assert free.candidates[0].tokens == 300 and free.text.startswith(full.text) and said < 300
    assert not any("stopped" in note for note in free.notes)


@pytest.mark.parametrize("name", ["translate", "seq2seq"])
def test_translate_and_seq2seq_report_it(tokenizer: Tokenizer, name: str) -> None:
    model = uses(tokenizer)[name].__self__  # type: ignore[attr-defined]
    ask_full: Callable[..., Any] = getattr(model, f"{name}_full")
    for method in ("greedy", "beam"):
        (full,) = ask_full(["the lazy dog"], method=method, extra=300)
        assert [note for note in full.notes if "'the lazy dog': stopped after" in note and "repeats itself" in note], (
            full.notes
        )


def test_a_repeating_source_may_have_a_repeating_translation(echo: Callable[..., Folder], tokenizer: Tokenizer) -> None:
    laughter = "ha " * 60
    (full,) = Translator(echo(tokenizer), max_tokens=500, together=500).translate_full([laughter, "ha ha, a dog"])[:1]
    assert full.text == laughter and not full.notes
    assert (
        has_repeats([5, 6] * 4, 8)
        and not has_repeats([5, 6] * 3, 8)
        and not has_repeats(range(60), 8)
        and not has_repeats([], 8)
    )


def test_a_text_that_runs_out_of_positions_reports_it(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    layer = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 16}}
    embed = {"positions": {"kind": "learned", "length": 20}}
    module = ayn.build({"kind": "decoder", "vocab": tokenizer.size, "width": 16, "embed": embed, "decoder": [layer]})
    both = Vocabularies(tokenizer, tokenizer)
    model = Generator(Folder(module.eval(), both, task={"kind": "causal-lm"}, max_tokens=20))
    (full,) = model.generate_full(["the cat"], method="greedy", max_length=300)
    assert any("at the model's limit of 20" in note for note in full.notes) and full.candidates[0].tokens < 21
    (short,) = model.generate_full(["the cat"], method="greedy", max_length=5)
    assert not short.notes
    with pytest.raises(UserError, match="more than the model's 20; shorten it"):
        model.generate_full(["the cat " * 30])


@given(st.integers(0, 200), st.integers(0, 40), st.sampled_from([None, 3]), st.integers(0, 120))
def test_checks_of_many_rows_are_those_of_one(before: int, more: int, loops: int | None, least: int) -> None:
    options = Decoding(loops=loops, min_length=least)
    found = has_check(np.array([before]), np.array([before + more]), options)
    assert found.tolist() == [any(is_check_due(length, options) for length in range(before + 1, before + more + 1))]
