"""Exact: the same tokens and the same log-probabilities, bit for bit, whoever else is answered."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.translator import Translator
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.nn.models.precision import to_int8
from allyouneed.nn.states.paged import BlockPool

PAD, BOS, EOS, VOCAB = 0, 1, 2, 83
FFN = {"kind": "ffn", "hidden": 96, "activation": "gelu"}
MIXERS: dict[str, Any] = {
    "rotary": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary"},
    "window": {"kind": "attention", "heads": 2, "pattern": "causal & window(5)", "positions": "alibi"},
    "retention": {"kind": "retention", "heads": 2},
    "rwkv": {"kind": "rwkv"},
    "convolution": {"kind": "convolution", "size": 3, "sees": "past"},
    "infini": {"kind": "infini", "heads": 2, "segment": 4},
}
KINDS = [*MIXERS, "int8", "translator"]
WAYS = [
    Decoding(method="greedy", max_length=20),
    Decoding(method="sample", temperature=0.9, top_p=0.9, seed=5, max_length=20),
    Decoding(method="sample", best=2, min_p=0.01, seed=6, max_length=9),
    Decoding(beam=3, best=2, max_length=10),
    Decoding(method="greedy", max_length=16, repetition_penalty=1.5, min_length=4),
]


@cache
def engine_of(kind: str, exact: bool = True) -> Engine:
    torch.manual_seed(0)
    tree: dict[str, Any] = {"vocab": VOCAB, "width": 64, "embed": {"tied": False}}
    if kind == "translator":
        own = {"kind": "attention", "heads": 2}
        reads = {"repeat": 2, "mixer": own, "channel": FFN}
        tree |= {"kind": "encoder-decoder", "encoder": [reads], "embed": {"positions": "sinusoidal", "tied": False}}
        tree["decoder"] = [reads | {"mixer": own | {"pattern": "causal"}, "cross": own}]
    else:
        layer = {"repeat": 2, "wiring": "pre-norm", "mixer": MIXERS.get(kind, MIXERS["rotary"]), "channel": FFN}
        tree |= {"kind": "decoder", "decoder": [layer]}
    model: Any = ayn.build(tree).eval()
    with torch.no_grad():
        for parameter in (model.embed.tokens.weight, *model.head.parameters()):
            parameter.normal_()
    model = to_int8(model) if kind == "int8" else model
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS], exact=exact)


def bits(answers: list[Hypothesis]) -> list[Any]:
    return [(h.tokens, h.log_probs, h.score, h.finished) for h in answers]


def request(kind: str, text: list[int], way: Decoding, place: int) -> Request:
    if kind == "translator":
        return Request([BOS], way.limit(len(text)), (place,), text)
    return Request([BOS, *text], way.continuation_limit(), (place,))


def alone(kind: str, text: list[int], way: Decoding, place: int) -> list[Any]:
    """What the fast way says to one who asks alone: exact is not another arithmetic."""
    engine = engine_of(kind, exact=False)
    if kind == "translator":
        return bits(engine.generate([text], way, sample_keys=[[place]])[0])
    return bits(engine.complete([[BOS, *text]], way, first=place)[0])


texts = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=40), min_size=2, max_size=7)
few = settings(max_examples=4, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(texts, st.sampled_from(WAYS), st.integers(0, 6))
def test_alone_and_together(kind: str, texts: list[list[int]], way: Decoding, one: int) -> None:
    engine, one = engine_of(kind), one % len(texts)
    together = engine.generate(texts, way) if kind == "translator" else engine.complete([[BOS, *t] for t in texts], way)
    assert bits(together[one]) == alone(kind, texts[one], way, one)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(texts, st.lists(st.sampled_from(WAYS), min_size=7, max_size=7), st.integers(3, 12), st.integers(1, 64))
def test_among_strangers_who_come_and_go(
    kind: str, texts: list[list[int]], ways: list[Decoding], rows: int, budget: int
) -> None:
    """Each in its own way, some while others are being written; and more of them than there is room for."""
    scheduler, states = Scheduler(engine_of(kind), rows=rows, budget=budget), []
    for place, text in enumerate(texts):
        states.append(scheduler.submit(request(kind, text, ways[place], place), ways[place]))
        if place % 3:
            scheduler.step()
    scheduler.run()
    for place in (0, len(texts) - 1):
        answer = states[place].answer
        assert answer is not None and bits(answer) == alone(kind, texts[place], ways[place], place)


@pytest.mark.parametrize("kind", ["rotary", "retention", "translator"])
def test_without_it_last_bits_change(kind: str) -> None:
    """Else these tests would show nothing."""
    engine = engine_of(kind, exact=False)
    asked = [[*range(3, 3 + 5 * n)] for n in range(1, 8)]
    together = (
        engine.generate(asked, WAYS[0])
        if kind == "translator"
        else engine.complete([[BOS, *t] for t in asked], WAYS[0])
    )
    assert any(
        bits(found) != alone(kind, text, WAYS[0], n)
        for n, (text, found) in enumerate(zip(asked, together, strict=True))
    )


def test_guesses_too_are_read_by_nobody_else() -> None:
    engine, asked = engine_of("rotary"), [[BOS, *[5, 6, 7] * n] for n in range(1, 6)]
    together = engine.complete(asked, WAYS[0], draft=PromptLookup())
    for place, prompt in enumerate(asked):
        assert bits(engine.complete([prompt], WAYS[0], first=place, draft=PromptLookup())[0]) == bits(together[place])


def test_not_with_a_pool() -> None:
    with pytest.raises(UserError, match="exact and pool are exclusive"):
        Scheduler(engine_of("rotary"), pool=BlockPool(9))


def test_models_that_are_loaded(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    layer = {"wiring": "pre-norm", "mixer": MIXERS["rotary"], "channel": FFN}
    model: Any = ayn.build({"kind": "decoder", "vocab": tokenizer.size, "width": 64, "decoder": [layer]}).eval()
    both, way = Vocabularies(tokenizer, tokenizer), {"method": "greedy", "max_length": 20}
    writer = Generator(Folder(model, both, task={"kind": "causal-lm"}, decoding=way))
    asked = ["The quick", "How are you today?", "1", "你好，世界。今天"]
    single = [writer.generate_full([text])[0].candidates for text in asked]
    assert [one.candidates for one in writer.generate_full(asked)] != single
    writer.exact = True
    together = writer.generate_full(asked)
    assert [one.candidates for one in together] == single and "".join(writer.stream(asked[1])) == together[1].text
    own = {"kind": "attention", "heads": 2}
    reads = {"mixer": own, "channel": FFN}
    tree = {"kind": "encoder-decoder", "vocab": tokenizer.size, "width": 64, "encoder": [reads]}
    tree["decoder"] = [reads | {"mixer": own | {"pattern": "causal"}, "cross": own}]
    translator = Translator(Folder(ayn.build(tree).eval(), both))
    translator.exact = True
    found = translator.translate_full(asked, beam=2)
    assert [one.candidates for one in found] == [translator.translate_full([t], beam=2)[0].candidates for t in asked]
