"""A text that says the same again and again is stopped and said so: at the same place, whoever writes it and beside
whom; what repeats itself for good reason is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_prefix_cache import empty
from test_promises import uses
from test_scheduler import ask, prompts, told, writer

import allyouneed as ayn
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import LEAST, LONGEST, LOOK, cut, cycle, echoes, looked, looks, looping
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.translator import Translator
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.speculative.drafts import Lookup
from allyouneed.nn.states.paged import BlockPool
from graph_runner import decode_in_slots
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
    return Engine(writer(vocab=17), BOS, EOS, PAD, forbidden=[PAD, BOS, EOS])


def few(count: int = 8) -> list[list[int]]:
    return [[token % 14 + 3 for token in prompt] for prompt in prompts(count, longest=9)]


# --- what a loop is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, LONGEST + 1))
def test_so_many_times_and_for_so_many_tokens_and_not_one_fewer(size: int) -> None:
    for loops in (2, 8):
        needed = max(LEAST, loops * size)
        said = [*range(100, 150), *(n % size for n in range(needed))]
        assert cycle(said, loops) == size and cycle([*said[:50], *said[51:]], loops) == 0
        broken = [*said[:-3], 99, *said[-2:]] if size > 3 else [*said[:-size], 99, *said[len(said) - size + 1 :]]
        assert cycle(broken, loops) == 0
    assert cycle([*range(LONGEST + 1)] * 50, 8) == 0 and cycle([], 8) == cycle([1], 8) == 0


def test_one_looks_now_and_then_and_never_before_the_least_length() -> None:
    way = Decoding(method="greedy")
    assert [n for n in range(100) if looping([7] * n, way)] == [32, 48, 64, 80, 96]
    assert cut([7] * 100, way) == 32 and cut([*range(20), *[7] * 80], way) == 64 and cut([*range(99)], way) is None
    late = Decoding(method="greedy", min_length=48)
    assert cut([7] * 100, late) == 64 and cut([7] * 100, Decoding(loops=None)) is None
    assert Decoding(loops=0).loops is None and LEAST % LOOK == 0
    with pytest.raises(UserError, match="loops"):
        Decoding.of({}, loops=1)


# --- where it stops -------------------------------------------------------------------------------------------------


def stopped(free: Hypothesis, way: Decoding) -> tuple[list[int], bool]:
    end = cut(free.tokens, way)
    return free.tokens[:end], end is not None


@pytest.mark.parametrize("name", ["greedy", "sample", "draws"])
def test_it_is_the_beginning_of_what_it_would_have_said(speaker: Engine, name: str) -> None:
    way = WAYS[name]
    free = speaker.complete(few(), way.model_copy(update={"loops": None}))
    found = speaker.complete(few(), way)
    for ours, theirs in zip(found, free, strict=True):
        expected = sorted(stopped(one, way) for one in theirs)
        assert sorted((one.tokens, one.repeats) for one in ours) == expected
        assert all(len(one.log_probs) == len(one.tokens) and not one.finished for one in ours)
    assert sum(one.repeats for best in found for one in best) > 3, "or it proves nothing"


def test_a_beam_search_ends_with_its_best(speaker: Engine) -> None:
    found = speaker.complete(few(), WAYS["beam"])
    free = speaker.complete(few(), WAYS["beam"].model_copy(update={"loops": None}))
    assert sum(best[0].repeats for best in found) > 3
    for ours, theirs in zip(found, free, strict=True):
        if ours[0].repeats:
            assert len(ours[0].tokens) < len(theirs[0].tokens) == 150 and len(ours) == 2
            assert looping(ours[0].tokens, WAYS["beam"])
            assert ours[0].score >= ours[1].score


@pytest.mark.parametrize("name", WAYS)
def test_the_same_among_strangers_in_a_pool_in_seats_and_with_guesses(speaker: Engine, name: str) -> None:
    way = WAYS[name]
    expected = [[(h.tokens, h.repeats) for h in speaker.complete([p], way, first=n)[0]] for n, p in enumerate(few())]
    scheduler = Scheduler(speaker, rows=12, budget=16, pool=BlockPool(400, size=4))
    states = []
    for number, prompt in enumerate(few()):
        states.append(ask(scheduler, prompt, way, number))
        for _ in range(number * 3):
            scheduler.step()
    scheduler.run()
    assert [[(h.tokens, h.repeats) for h in state.answer or ()] for state in states] == expected
    assert all(state.tokens == told(state)[0] for state in states if way.rows == 1) and empty(scheduler)
    requests = [Request(prompt, 150, (number,)) for number, prompt in enumerate(few())]
    if speaker.graphs.suits(speaker.spec(way)):
        found = decode_in_slots(speaker, requests, way)
        assert [[(h.tokens, h.repeats) for h in best] for best in found] == expected
    if name == "greedy":
        guessed = speaker.complete(few(), way, draft=Lookup(4))
        assert [[(h.tokens, h.repeats) for h in best] for best in guessed] == expected


def test_seats_stop_translations_too() -> None:
    engine = seated_engine("translation")
    sources = [[*range(3, 3 + n), EOS] for n in range(2, 9)]
    for way in (Decoding(beam=3, best=2, max_length=100), Decoding(method="greedy", max_length=100)):
        requests = [Request([BOS], 100, (n,), source) for n, source in enumerate(sources)]
        found = decode_in_slots(engine, requests, way)
        assert [[h.tokens for h in best] for best in found] == [
            [h.tokens for h in best] for best in engine.decode(requests, way)
        ]


def test_a_stream_ends_where_the_text_does(speaker: Engine) -> None:
    for number, prompt in enumerate(few(4)):
        ((whole,),) = speaker.complete([prompt], WAYS["greedy"], first=number)
        assert list(speaker.stream(prompt, WAYS["greedy"], number)) == whole.tokens


# --- what is said about it ------------------------------------------------------------------------------------------


def test_generate_says_so(tokenizer: Tokenizer) -> None:
    generate: Any = uses(tokenizer)["generate"]
    model = generate.__self__
    (full,) = model.generate_full(["the cat"], method="greedy", max_length=300)
    said = full.candidates[0].tokens
    assert any(
        note == f"'the cat': repeats itself; stopped after {said} tokens (loops=0 lets it go on)" for note in full.notes
    )
    (free,) = model.generate_full(["the cat"], method="greedy", max_length=300, loops=None)
    assert free.candidates[0].tokens == 300 and free.text.startswith(full.text) and said < 300
    assert not any("stopped" in note for note in free.notes)


@pytest.mark.parametrize("name", ["translate", "seq2seq"])
def test_translate_and_seq2seq_say_so(tokenizer: Tokenizer, name: str) -> None:
    model = uses(tokenizer)[name].__self__  # type: ignore[attr-defined]
    ask_full: Callable[..., Any] = getattr(model, f"{name}_full")
    for method in ("greedy", "beam"):
        (full,) = ask_full(["the lazy dog"], method=method, extra=300)
        assert [note for note in full.notes if "'the lazy dog': repeats itself; stopped after" in note], full.notes


def test_what_repeats_itself_may_be_translated_so(echo: Callable[..., Folder], tokenizer: Tokenizer) -> None:
    laughter = "ha " * 60
    (full,) = Translator(echo(tokenizer), max_tokens=500, together=500).translate_full([laughter, "ha ha, a dog"])[:1]
    assert full.text == laughter and not full.notes
    assert echoes([5, 6] * 4, 8) and not echoes([5, 6] * 3, 8) and not echoes(range(60), 8) and not echoes([], 8)


def test_a_text_that_ends_because_there_are_no_more_places_says_so(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    layer = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 16}}
    embed = {"positions": {"kind": "learned", "length": 20}}
    module = ayn.build({"kind": "decoder", "vocab": tokenizer.size, "width": 16, "embed": embed, "decoder": [layer]})
    both = Vocabularies(tokenizer, tokenizer)
    model = Generator(Folder(module.eval(), both, task={"kind": "causal-lm"}, max_tokens=20))
    (full,) = model.generate_full(["the cat"], method="greedy", max_length=300)
    assert any("for the model has places for 20" in note for note in full.notes) and full.candidates[0].tokens < 21
    (short,) = model.generate_full(["the cat"], method="greedy", max_length=5)
    assert not short.notes
    with pytest.raises(UserError, match="the model has places for 20; shorten it"):
        model.generate_full(["the cat " * 30])


@given(st.integers(0, 200), st.integers(0, 40), st.sampled_from([None, 3]), st.integers(0, 120))
def test_one_looks_at_many_as_at_one(before: int, more: int, loops: int | None, least: int) -> None:
    decoding = Decoding(loops=loops, min_length=least)
    found = looked(np.array([before]), np.array([before + more]), decoding)
    assert found.tolist() == [bool(looks(before, before + more, decoding))]
