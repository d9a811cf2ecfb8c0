"""`exact`: the same tokens and log-probabilities, bit for bit, whatever else is decoded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
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
DECODINGS = [
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


def request(kind: str, text: list[int], decoding: Decoding, key: int) -> Request:
    if kind == "translator":
        return Request([BOS], decoding.limit(len(text)), (key,), text)
    return Request([BOS, *text], decoding.continuation_limit(), (key,))


def decode_alone(kind: str, text: list[int], decoding: Decoding, key: int) -> list[Any]:
    """The answer of the fast path to a single request: `exact` uses the same arithmetic."""
    engine = engine_of(kind, exact=False)
    if kind == "translator":
        return bits(engine.generate([text], decoding, sample_keys=[[key]])[0])
    return bits(engine.complete([[BOS, *text]], decoding, first=key)[0])


texts = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=40), min_size=2, max_size=7)
few = settings(max_examples=4, deadline=None)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(texts, st.sampled_from(DECODINGS), st.integers(0, 6))
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(
    kind: str, texts: list[list[int]], decoding: Decoding, one: int
) -> None:
    engine, one = engine_of(kind), one % len(texts)
    together = (
        engine.generate(texts, decoding)
        if kind == "translator"
        else engine.complete([[BOS, *t] for t in texts], decoding)
    )
    assert bits(together[one]) == decode_alone(kind, texts[one], decoding, one)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(texts, st.lists(st.sampled_from(DECODINGS), min_size=7, max_size=7), st.integers(3, 12), st.integers(1, 64))
def test_a_request_gets_the_same_bits_while_others_come_and_go(
    kind: str, texts: list[list[int]], ways: list[Decoding], rows: int, budget: int
) -> None:
    """Mixed methods, some admitted while others decode, and more requests than slots."""
    scheduler, states = Scheduler(engine_of(kind).runner, rows=rows, budget=budget), []
    for key, text in enumerate(texts):
        states.append(scheduler.submit(request(kind, text, ways[key], key), ways[key]))
        if key % 3:
            scheduler.step()
    scheduler.run()
    for key in (0, len(texts) - 1):
        answer = states[key].answer
        assert answer is not None and bits(answer) == decode_alone(kind, texts[key], ways[key], key)


@pytest.mark.parametrize("kind", ["rotary", "retention", "translator"])
def test_without_exact_the_last_bits_depend_on_the_batch(kind: str) -> None:
    """The tests above can fail."""
    engine = engine_of(kind, exact=False)
    cases = [[*range(3, 3 + 5 * n)] for n in range(1, 8)]
    together = (
        engine.generate(cases, DECODINGS[0])
        if kind == "translator"
        else engine.complete([[BOS, *t] for t in cases], DECODINGS[0])
    )
    assert any(
        bits(found) != decode_alone(kind, text, DECODINGS[0], n)
        for n, (text, found) in enumerate(zip(cases, together, strict=True))
    )


def test_speculative_decoding_is_exact_too() -> None:
    engine, cases = engine_of("rotary"), [[BOS, *[5, 6, 7] * n] for n in range(1, 6)]
    together = engine.complete(cases, DECODINGS[0], draft=PromptLookup())
    for key, prompt in enumerate(cases):
        assert bits(engine.complete([prompt], DECODINGS[0], first=key, draft=PromptLookup())[0]) == bits(together[key])


def test_exact_is_refused_with_a_pool() -> None:
    with pytest.raises(UserError, match="exact and pool are exclusive"):
        Scheduler(engine_of("rotary").runner, pool=BlockPool(9))


def test_loaded_models_can_decode_exactly(tokenizer: Tokenizer) -> None:
    torch.manual_seed(1)
    layer = {"wiring": "pre-norm", "mixer": MIXERS["rotary"], "channel": FFN}
    model: Any = ayn.build({"kind": "decoder", "vocab": tokenizer.size, "width": 64, "decoder": [layer]}).eval()
    both, decoding = Vocabularies(tokenizer, tokenizer), {"method": "greedy", "max_length": 20}
    generator = Generator(Folder(model, both, task={"kind": "causal-lm"}, decoding=decoding))
    cases = ["The quick", "How are you today?", "1", "你好，世界。今天"]
    single = [generator.generate_full([text])[0].candidates for text in cases]
    assert [one.candidates for one in generator.generate_full(cases)] != single
    generator.exact = True
    together = generator.generate_full(cases)
    assert [one.candidates for one in together] == single and "".join(generator.stream(cases[1])) == together[1].text
    own = {"kind": "attention", "heads": 2}
    reads = {"mixer": own, "channel": FFN}
    tree = {"kind": "encoder-decoder", "vocab": tokenizer.size, "width": 64, "encoder": [reads]}
    tree["decoder"] = [reads | {"mixer": own | {"pattern": "causal"}, "cross": own}]
    translator = Translator(Folder(ayn.build(tree).eval(), both))
    translator.exact = True
    found = translator.translate_full(cases, beam=2)
    assert [one.candidates for one in found] == [translator.translate_full([t], beam=2)[0].candidates for t in cases]
