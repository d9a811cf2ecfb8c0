"""A graph runner, whose host reads the tokens some steps later, decodes what the plain engine decodes. On a GPU the
same code runs with kernels and captured graphs (bench/check/kernels.py, bench/check/gpu.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from allyouneed.apps.translate.spans.forced_phrases import phrase_spec
from allyouneed.config import parse, preset_tree
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.beam_record import BeamRecord
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.nn.models.base import Model
from allyouneed.runtime.cuda.capture import can_capture
from graph_runner import (
    DECODINGS,
    MODELS,
    SMALL,
    Processor,
    Rules,
    Stop,
    cancel_second,
    decode_in_slots,
    engine_of,
    few_slots,
    make_requests,
    token_lists,
    with_graphs,
)
from shrink import shrink
from toy_models import BOS, EOS, random_model


def both(engine: Engine, decoding: Decoding, requests: list[Request]) -> tuple[Any, Any]:
    longest = decoding.max_length or 20
    requests = [Request(r.prompt, longest - n % 4, r.sample_key, r.source) for n, r in enumerate(requests)]
    return engine.decode(requests, decoding), decode_in_slots(engine, requests, decoding)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_slots(monkeypatch)


@pytest.mark.parametrize("name", MODELS)
def test_a_runner_decodes_what_the_plain_engine_decodes(name: str) -> None:
    engine = engine_of(name)
    for decoding in ("greedy", "beam", "sample"):
        plain, found = both(engine, DECODINGS[decoding], make_requests(engine))
        assert token_lists(found) == token_lists(plain)
        for ours, theirs in zip(found, plain, strict=True):
            assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
            assert ours[0].log_probs == pytest.approx(theirs[0].log_probs, abs=1e-4)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_every_decoding_method_matches_the_plain_engine(sources: list[list[int]], decoding: str) -> None:
    engine = engine_of("translation")
    requests = [Request([BOS], 20, (n,), source) for n, source in enumerate(sources)]
    plain, found = both(engine, DECODINGS[decoding], requests)
    assert token_lists(found) == token_lists(plain)
    assert len({len(one.tokens) for hypotheses in plain for one in hypotheses}) > 2
    assert decoding == "least" or any(one.finished for hypotheses in plain for one in hypotheses)
    decoder_engine = engine_of("grouped")
    plain, found = both(decoder_engine, DECODINGS[decoding], make_requests(decoder_engine, 19))
    assert token_lists(found) == token_lists(plain)


def test_a_window_cache_may_wrap_during_prefill() -> None:
    engine = engine_of("window")
    requests = [Request([BOS, *(3 + (7 * n + k) % 50 for k in range(n))], 9, (n,)) for n in (2, 40, 100, 151)]
    for decoding in ("greedy", "beam"):
        plain, found = both(engine, DECODINGS[decoding], requests)
        assert token_lists(found) == token_lists(plain)


def test_a_forced_end_token_has_log_prob_zero() -> None:
    for decoding in ("greedy", "beam"):
        engine = engine_of("translation", ended=True, counted=1)
        plain, found = both(engine, DECODINGS[decoding], make_requests(engine))
        assert token_lists(found) == token_lists(plain)
        assert [h[0].score for h in found] == pytest.approx([h[0].score for h in plain], abs=1e-4)


def test_the_position_limit_ends_a_text() -> None:
    engine = engine_of("gpt2")
    requests = [Request([BOS, *range(3, 3 + n)], 99, (n,)) for n in (1, 20, 38, 39)]
    plain, found = both(engine, Decoding(method="greedy", max_length=99), requests)
    assert token_lists(found) == token_lists(plain)


@pytest.mark.parametrize("decoding", ["greedy", "beam"])
def test_a_stop_condition_ends_a_text(decoding: str) -> None:
    """Tokens decoded after it are cut; of beams, another one continues."""
    engine = engine_of("llama")
    requests = [r._replace(stop=Stop() if n % 3 else None) for n, r in enumerate(make_requests(engine))]
    plain, found = engine.decode(requests, DECODINGS[decoding]), decode_in_slots(engine, requests, DECODINGS[decoding])
    assert (
        token_lists(found)
        == token_lists(plain)
        != token_lists(engine.decode(make_requests(engine), DECODINGS[decoding]))
    )
    assert any(one[0].finished for one in found)


@pytest.mark.parametrize("decoding", ["draws", "penalties-beam"])
def test_a_logits_processor_runs_between_two_graphs(decoding: str) -> None:
    engine, processor = engine_of("llama"), Processor()
    requests, spec = make_requests(engine, 6), engine.runner.spec(DECODINGS[decoding])
    processor.cut = int(decoding == "draws")
    ruled = replace(spec, logits_processor=processor)
    plain, found = engine.decode(requests, ruled), decode_in_slots(engine, requests, ruled)
    assert token_lists(found) == token_lists(plain) != token_lists(engine.decode(requests, spec))
    processor.calls = 0
    decode_in_slots(engine, requests[:2], ruled)  # started together: one call for both
    assert processor.calls <= requests[0].limit


def test_a_processor_that_raises_fails_its_own_request() -> None:
    def broken(logits: Any, tokens: Any) -> Any:
        if (tokens[:, -1:] % 2 == 1).any():
            raise ValueError("odd")
        return logits

    engine = engine_of("llama")
    spec = replace(engine.runner.spec(DECODINGS["greedy"]), logits_processor=broken)
    good = engine.runner.spec(DECODINGS["greedy"])
    requests = make_requests(engine, 6)
    states = [RequestState(request, spec, 20) for request in requests]
    batch = engine.graphs.batch(states)
    with torch.inference_mode():
        while batch.active:
            batch.step()
    free = engine.decode(requests, good)
    for state, (plain,) in zip(states, free, strict=True):
        odd = any(token % 2 for token in [*plain.tokens, *([EOS] if plain.finished else [])][:-1])
        assert (state.error is not None) == odd
        assert odd or state.hypotheses[0].tokens == plain.tokens
    assert {state.error is None for state in states} == {True, False}


def test_forced_phrases_of_each_request_in_one_runner(tokenizer: Tokenizer) -> None:
    engine = with_graphs(Engine(random_model(vocab=tokenizer.size, ends=1.0), 1, 2, 0, forbidden=[0, 1]))
    phrases = [{"lazy dog": 1, "fox": 2}, {"公园": 1}, {}, {"Xylophon": 1, "3 D": 2}]
    for decoding in (Decoding(beam=3, best=2, extra=20), Decoding(method="greedy", extra=20)):
        base = engine.runner.spec(decoding)
        sources = [[*tokenizer.encode(text), 2] for text in ("The quick fox", "你好，世界", "dog", "The lazy dog")]
        requests = [Request([1], decoding.limit(len(source)), (n,), source) for n, source in enumerate(sources)]
        specs = [phrase_spec(base, tokenizer, r.limit, own) for r, own in zip(requests, phrases, strict=True)]
        some = list(zip(requests, specs, strict=True))
        states = [RequestState(request, spec, request.limit) for request, spec in some]
        plain = [engine.decode([request], spec)[0] for request, spec in some]
        batch = engine.graphs.batch(states)
        with torch.inference_mode():
            while batch.active:
                batch.step()
        assert token_lists([state.hypotheses for state in states]) == token_lists(plain)
        assert "Xylophon" in tokenizer.decode(states[3].hypotheses[0].tokens)


def test_bidirectional_prompts_match_the_plain_engine() -> None:
    engine = engine_of("seen-prompt", bidirectional_prompt=True)
    requests = make_requests(engine)
    for decoding in ("greedy", "beam"):
        plain, found = both(engine, DECODINGS[decoding], requests)
        assert token_lists(found) == token_lists(plain)
    engine.runner.bidirectional_prompt = False
    assert token_lists(found) != token_lists(engine.decode(requests, DECODINGS["beam"]))


def test_a_listener_gets_every_token_once_and_may_cancel() -> None:
    engine, decoding = engine_of("llama"), Decoding(method="greedy", min_length=24, max_length=25)
    received: dict[int, list[int]] = {n: [] for n in range(3)}
    requests = [r._replace(listener=received[n].append) for n, r in enumerate(make_requests(engine, 3))]
    states = cancel_second(engine, requests, engine.runner.spec(decoding), received)
    assert received[0] == states[0].hypotheses[0].tokens and received[2] == states[2].hypotheses[0].tokens
    assert states[0].done and not states[1].done and 0 < len(received[1]) < 25


def test_runners_are_kept_for_the_next_call_and_remade_when_the_weights_move() -> None:
    engine = engine_of("llama")
    requests = make_requests(engine)
    decode_in_slots(engine, requests, DECODINGS["greedy"])
    (first,) = engine.graphs.kept.values()
    decode_in_slots(engine, requests[:9], DECODINGS["greedy"])
    assert list(engine.graphs.kept.values()) == [first] and sorted(first.free) == list(range(8))
    engine.runner.model = engine.model.double()
    plain, again = both(engine, DECODINGS["greedy"], requests)
    (second,) = engine.graphs.kept.values()
    assert token_lists(again) == token_lists(plain) and second is not first


def test_slots_that_were_freed_early_are_reused() -> None:
    engine = engine_of("translation")
    for decoding in ("greedy", "beam", "draws", "greedy", "beam", "draws"):
        plain, found = both(engine, DECODINGS[decoding], make_requests(engine, 5))
        assert token_lists(found) == token_lists(plain)
    assert len(engine.graphs.kept) == 3


def test_two_batches_at_once_use_two_runners() -> None:
    engine, decoding = engine_of("llama"), DECODINGS["greedy"]
    requests = make_requests(engine, 2)
    plain = engine.decode(requests, decoding)
    states = [RequestState(request, engine.runner.spec(decoding), 20) for request in requests]
    batches = [engine.graphs.batch([state]) for state in states]
    with torch.inference_mode():
        while any(batch.active for batch in batches):
            for batch in batches:
                batch.step()
    assert token_lists([state.hypotheses for state in states]) == token_lists(plain)
    assert batches[0].runner is not batches[1].runner


@pytest.mark.parametrize("decoding", ["greedy", "draws", "penalties-beam"])
def test_a_bias_and_penalties_of_each_request_apply_on_the_device(decoding: str) -> None:
    engine = engine_of("llama")
    requests, spec = make_requests(engine), engine.runner.spec(DECODINGS[decoding])
    plain, ruled = engine.decode(requests, spec), engine.decode(requests, replace(spec, logits_processor=Rules()))
    found = decode_in_slots(engine, requests, replace(spec, logits_processor=Rules()))
    assert token_lists(found) == token_lists(ruled) != token_lists(plain)
    decode_in_slots(engine, requests, replace(spec, logits_processor=Rules()))
    assert len(engine.graphs.kept) == 1  # other rules, the same graphs


def test_unsupported_requests_use_the_plain_path() -> None:
    engine = engine_of("llama")
    state = RequestState(make_requests(engine, 1)[0], engine.runner.spec(DECODINGS["greedy"]), 1000)
    assert not engine.graphs.admits([state])  # no GPU here
    spec = engine.runner.spec(DECODINGS["greedy"])
    assert engine.graphs.suits(spec)
    observed = Request([BOS], 20, (0,), observer=BeamRecord())
    beam = engine.runner.spec(DECODINGS["beam"])
    assert engine.graphs.suits(spec, [observed]) and not engine.graphs.suits(beam, [observed])
    drafted = replace(spec, draft=PromptLookup(3))
    with pytest.warns(UserWarning, match="speculative decoding without .* failed: RuntimeError: no"):
        engine.graphs.refuse(RuntimeError("no"), drafted)
    assert engine.graphs.suits(spec) and not engine.graphs.suits(drafted)
    with pytest.warns(UserWarning, match="capturing one failed: RuntimeError: no"):
        engine.graphs.refuse(RuntimeError("no"), spec)
    assert not engine.graphs.suits(spec)


FIT = "gpt2 llama-7b mistral-7b bloom-560m t5-small marian bart-base transformer-base transformer-big deepnet residual"
FIT += " retnet-1.3b rwkv-4-169m infini universal-transformer yoco-3b convs2s rnnsearch reformer mamba-130m"
FIT += " mixtral-8x7b deepseek-v2-lite"
DO_NOT = "switch-base-8 retro"
PRESETS = [*((name, True) for name in FIT.split()), *((name, False) for name in DO_NOT.split())]


@pytest.mark.parametrize(("name", "fits"), PRESETS)
def test_which_presets_fit(name: str, fits: bool) -> None:
    model: Any = shrink(parse(Model, preset_tree(name))).build()  # type: ignore[type-abstract]
    assert can_capture(model) == fits


def test_tables_derived_from_weights_follow_weight_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that is kept decodes with the weights that the model has by then."""
    changes = [*SMALL, "decoder[0].mixer.positions={kind: shaw, distance: 3}"]
    monkeypatch.setitem(MODELS, "shaw", ("llama-15m", changes))
    engine = engine_of("shaw")
    before, _ = both(engine, DECODINGS["greedy"], make_requests(engine))
    for name, weight in engine.model.named_parameters():
        if "relative" in name:
            weight.data.neg_()  # unknown to autograd, as an update in a captured graph is
    plain, found = both(engine, DECODINGS["greedy"], make_requests(engine))
    assert token_lists(found) == token_lists(plain) != token_lists(before)
