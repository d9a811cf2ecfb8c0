"""What decoding guarantees for any model and any size of the input."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from random import Random
from typing import Any

import pytest
import torch
from test_prefix_cache import engine_of, is_empty
from test_scheduler import GREEDY, decode_alone, decoder_model, submit, tokens_of

import allyouneed as ayn
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.detokenizer import StopStrings
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BlockPool
from any_part import CASES, case
from any_part import VOCAB as FEW_TOKENS
from toy_models import BOS

Asks = Callable[..., list[str]]
ATTENTION = {"kind": "attention", "heads": 2}
FFN = {"kind": "ffn", "hidden": 24}
CAUSAL = ATTENTION | {"pattern": "causal"}
TREES: dict[str, Any] = {
    "translate": {
        "kind": "encoder-decoder",
        "encoder": [{"mixer": ATTENTION, "channel": FFN}],
        "decoder": [{"mixer": CAUSAL, "cross": ATTENTION, "channel": FFN}],
    },
    "generate": {"kind": "decoder", "decoder": [{"mixer": CAUSAL | {"positions": "rotary"}, "channel": FFN}]},
}
TREES["seq2seq"] = TREES["translate"]
UNICODE = [
    "👩‍👩‍👧‍👦 a family of four, 🏳️‍🌈",
    "e\u0301 and a\u0308\u0323: marks that combine",
    "שלום עולם",
    "مرحبا بالعالم، كيف حالك؟",
    "\u202eright to left\u202c",
    "nul\x00inside",
    "\x00",
    "\ufeffa mark of byte order",
    "𝕬𝖇𝖈 ﬁ a\u200bb \U0010ffff",
    "a tab\there, \x1b[31mand red",
    "<s> </s> <pad> <unk> <mask>",
    "你好，世界。",
]


def uses(tokenizer: Tokenizer) -> dict[str, Asks]:
    """Random models with decisive logits for every task that generates."""
    found: dict[str, Asks] = {}
    for name, tree in TREES.items():
        torch.manual_seed(0)
        model: Any = ayn.build({"vocab": tokenizer.size, "width": 16} | tree).eval()
        with torch.no_grad():
            model.embed.tokens.weight.normal_()
        both = Vocabularies(tokenizer, tokenizer)
        task = {"translate": "translation", "generate": "causal-lm", "seq2seq": "seq2seq"}[name]
        kind: Any = {"translate": Translator, "generate": Generator, "seq2seq": Seq2Seq}[name]
        found[name] = getattr(kind(Folder(model, both, task={"kind": task}, max_tokens=64)), name)
    return found


@pytest.fixture(scope="module", params=TREES)
def writes(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Asks:
    return uses(tokenizer)[request.param]


# --- inputs --------------------------------------------------------------------------------------------------


def test_empty_lists_single_texts_and_empty_texts_are_answered(writes: Asks) -> None:
    assert writes([], max_length=5) == []
    (one,) = writes(["the cat"], max_length=5)
    assert writes("the cat", max_length=5) == one  # type: ignore[comparison-overlap]
    assert writes(["", "the cat", ""], max_length=5)[1] == one, "an empty one changes nothing for the others"


@pytest.mark.parametrize("text", ["", " ", "\t", "\n", "\n\n", " \n \t\n"])
def test_blank_texts_are_returned_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    assert uses(tokenizer)["translate"](text) == text  # type: ignore[comparison-overlap]


def test_ten_thousand_texts_get_the_answers_they_get_alone(tokenizer: Tokenizer) -> None:
    dice, writes = Random(0), uses(tokenizer)["translate"]
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "你好", "ça", "va"]
    kinds = [" ".join(dice.choices(words, k=dice.randrange(1, 6))) for _ in range(40)]
    cases = [dice.choice(kinds) for _ in range(10_000)]
    found = writes(cases, method="greedy", max_length=3)
    single = {text: writes([text], method="greedy", max_length=3)[0] for text in kinds}
    assert found == [single[text] for text in cases] and len(set(found)) > 10


@pytest.mark.parametrize("text", UNICODE)
def test_any_characters_are_kept(echo: Callable[..., Folder], tokenizer: Tokenizer, text: str) -> None:
    assert Translator(echo(tokenizer)).translate(text) == text


def test_any_characters_in_a_prompt(writes: Asks) -> None:
    found = writes(UNICODE, max_length=4, method="greedy")
    assert found == [writes([text], max_length=4, method="greedy")[0] for text in UNICODE]
    with pytest.raises(UserError, match="fix the text"):
        writes(["half a pair: \ud800"])


@pytest.mark.parametrize("huge", ["x" * 5000, "字" * 3000, "👩‍👩‍👧‍👦" * 200, "e\u0301" * 900])
def test_a_huge_word_is_translated_in_parts_and_joined(
    echo: Callable[..., Folder], tokenizer: Tokenizer, huge: str
) -> None:
    translator = Translator(echo(tokenizer), max_tokens=50)
    (full,) = translator.translate_full([f"before {huge} after"], method="greedy")
    assert full.text == f"before {huge} after" and any("split in" in note for note in full.notes)


# --- decoding options ------------------------------------------------------------------------------------


def test_a_beam_wider_than_the_vocabulary_works(writes: Asks, tokenizer: Tokenizer) -> None:
    wide = tokenizer.size + 50
    assert writes(["the cat"], method="beam", beam=wide, max_length=2) == writes(
        ["the cat"], method="beam", beam=tokenizer.size, max_length=2
    )


def test_a_stop_string_is_found_across_tokens(tokenizer: Tokenizer) -> None:
    generate, decoding = (
        uses(tokenizer)["generate"],
        {"method": "sample", "seed": 1, "max_length": 40, "temperature": 1.5},
    )
    (text,) = generate(["the"], **decoding)
    ids, across = tokenizer.encode(text), 0
    for at in range(1, len(text) - 4, 4):
        stop = text[at : at + 4]
        if "\ufffd" in stop or any(stop in tokenizer.decode([token]) for token in ids):
            continue
        across += 1
        assert generate(["the"], stop=[stop], **decoding) == [text[: text.index(stop)]]
    assert across > 3


# --- every part ----------------------------------------------------------------------------------


def one_of_each_kind() -> list[str]:
    """One case of each kind of mixer that has a state, with and without a source."""
    found: dict[tuple[str, ...], str] = {}
    for name in CASES:
        if name.startswith(("mixer", "cross", "layers")):
            found.setdefault(tuple(takewhile(lambda word: "=" not in word, name.split())), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each_kind())
def test_every_mixer_keeps_every_promise(name: str) -> None:
    """Empty and long sources, beams wider than the vocabulary, stops, cancellations, and hardly more blocks than the
    largest request needs: each gets the answer it gets alone, and every block is released."""
    engine, dice = Engine(case(name), 1, 2, 0), Random(4)
    ways = [
        Decoding(method="greedy", max_length=9),
        Decoding(beam=FEW_TOKENS + 3, best=4, max_length=3),
        Decoding(method="sample", best=3, seed=8, max_length=6, temperature=1.5),
        Decoding(beam=2, max_length=7),
    ]
    cases: list[tuple[Request, Decoding]] = []
    for number in range(9):
        decoding = ways[number % 4]
        source = [dice.randrange(3, FEW_TOKENS) for _ in range(0 if number == 5 else dice.randrange(1, 9))]
        prompt = [1, *(dice.randrange(3, FEW_TOKENS) for _ in range(dice.randrange(0, 7)))]
        ends = Ends(dice.randrange(3, FEW_TOKENS)) if number % 3 == 2 else None
        cases.append((Request(prompt, decoding.max_length or 0, (number,), source, ends), decoding))
    expected = [
        engine.generate([r.source or ()], decoding, [r.prompt[1:]], sample_keys=[r.sample_key], stop=r.stop)[0]
        for r, decoding in cases
    ]
    room = Scheduler(engine.runner, rows=40, pool=BlockPool(10**6, size=2))
    assert room.blocks is not None
    most = max(room.blocks.measure(room.submit(r, decoding)) for r, decoding in cases)
    scheduler = Scheduler(engine.runner, rows=40, budget=8, pool=BlockPool(most, size=2))
    states, gone = [], []
    for number, (request, decoding) in enumerate(cases):
        states.append(scheduler.submit(request, decoding))
        if number % 2:
            gone.append(scheduler.submit(*cases[number - 1]))
        scheduler.step()
    for state in gone:
        state.cancel()
        scheduler.step()
    scheduler.run()
    for state, best in zip(states, expected, strict=True):
        assert state.answer is not None
        assert [(h.tokens, h.finished) for h in state.answer] == [(h.tokens, h.finished) for h in best]
    assert all(state.finished for state in gone) and is_empty(scheduler)


class Ends:
    """Stops at any two tokens whose second is this one."""

    reach = 2

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, tokens: Any) -> bool:
        return len(tokens) == 2 and tokens[-1] == self.token


# --- many at once ---------------------------------------------------------------------------------------------------


def test_ten_thousand_requests_at_once_fit_a_small_pool() -> None:
    engine, dice = engine_of(decoder_model(vocab=23)), Random(0)
    kinds = [[BOS, *(dice.randrange(3, 23) for _ in range(dice.randrange(6)))] for _ in range(20)]
    decoding = Decoding(method="greedy", max_length=2)
    scheduler = Scheduler(engine.runner, rows=512, budget=4096, pool=BlockPool(2000, size=4))
    cases = [dice.choice(kinds) for _ in range(10_000)]
    states = [submit(scheduler, prompt, decoding) for prompt in cases]
    scheduler.run()
    single = {tuple(prompt): decode_alone(engine, prompt, decoding) for prompt in kinds}
    assert [tokens_of(state) for state in states] == [single[tuple(prompt)] for prompt in cases] and is_empty(scheduler)


def test_a_new_client_gets_no_credit_for_earlier_grants() -> None:
    decoding, scheduler = (
        Decoding(method="greedy", min_length=4, max_length=4),
        Scheduler(engine_of(decoder_model()).runner, rows=1),
    )
    before = [submit(scheduler, [BOS, 5], decoding, client="old") for _ in range(12)]
    while not before[-2].finished:
        scheduler.step()
    states = {
        f"{client} {n}": submit(scheduler, [BOS, 5], decoding, client=client)
        for client in ("old", "new")
        for n in range(4)
    }
    order: list[str] = []
    while not scheduler.idle:
        scheduler.step()
        order += [name for name, state in states.items() if state.finished and name not in order]
    assert sorted(order[:4]) == ["new 0", "new 1", "old 0", "old 1"], "they alternate from the start"


def test_urgent_requests_do_not_wait_for_preempted_ones() -> None:
    engine = engine_of(decoder_model())
    long = GREEDY.model_copy(update={"max_length": 40, "min_length": 38})
    scheduler = Scheduler(engine.runner, rows=60, pool=BlockPool(40, size=4))
    slow = [submit(scheduler, [BOS, n + 3], long, n) for n in range(12)]
    while not scheduler.preempted:
        scheduler.step()
    urgent = submit(scheduler, [BOS, 9], GREEDY, priority=5)
    while not urgent.finished:
        assert scheduler.preempted, "otherwise this shows nothing"
        scheduler.step()
    scheduler.run()
    assert tokens_of(urgent) == decode_alone(engine, [BOS, 9], GREEDY) and all(state.answer for state in slow)
    assert is_empty(scheduler)


def test_a_stop_is_found_after_preemption(tokenizer: Tokenizer) -> None:
    """A preempted and resumed request ends where it would have."""
    engine = Engine(
        decoder_model(vocab=tokenizer.size), tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.specials
    )
    decoding = Decoding(method="sample", temperature=1.5, seed=3, max_length=40, min_length=39)
    (free,) = engine.complete([[tokenizer.bos]], decoding)[0]
    text = tokenizer.decode(free.tokens)
    stop = next(text[at : at + 2] for at in range(len(text) // 2, len(text)) if "\ufffd" not in text[at : at + 2])
    stops = StopStrings(tokenizer, [stop])
    (expected,) = engine.complete([[tokenizer.bos]], decoding, stop=stops)[0]
    scheduler = Scheduler(engine.runner, rows=60, pool=BlockPool(30, size=4))
    states = [submit(scheduler, [tokenizer.bos], decoding, stop=stops) for _ in range(9)]
    scheduler.run()
    assert scheduler.preemptions and len(expected.tokens) < len(free.tokens)
    assert all(tokens_of(state) == [expected.tokens] for state in states) and is_empty(scheduler)
