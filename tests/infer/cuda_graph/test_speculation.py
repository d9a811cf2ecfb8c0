"""Speculative decoding by rounds of fixed shape gives the texts, and accepts the draft tokens, of `SpeculativeDecoder`.
On a GPU the same rounds are captured graphs (bench/check/gpu.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from allyouneed.infer.cuda_graph.refusal import refusal
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.infer.speculative.stats import total_stats
from graph_runner import (
    DECODINGS,
    DRAFTED,
    MODELS,
    Rules,
    admit_as_on_a_gpu,
    cancel_second,
    decode_in_slots,
    draft_engine,
    drafts_of,
    engine_of,
    few_slots,
    make_requests,
    token_lists,
)
from host_sync import NoHostSync
from toy_models import BOS, VOCAB

QUICK = [("gpt2", "draws"), ("llama", "penalties"), ("window", "greedy"), ("translation", "sample")]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_slots(monkeypatch, 16)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in [(name, method) for name in MODELS for method in DRAFTED]
    ],
)
def test_texts_and_accepted_tokens_are_those_of_the_plain_engine(name: str, method: str) -> None:
    engine = engine_of(name)
    requests = make_requests(engine, 5)
    for draft in drafts_of(engine).values():
        spec = engine.runner.spec(DECODINGS[method], draft=draft)
        plain, found = engine.decode(requests, spec), decode_in_slots(engine, requests, spec)
        assert token_lists(found) == token_lists(plain)
        assert total_stats(found) == total_stats(plain)
        for ours, theirs in zip(found, plain, strict=True):
            assert ours[0].log_probs == pytest.approx(theirs[0].log_probs, abs=1e-4)
            assert ours[0].score == pytest.approx(theirs[0].score, abs=1e-4)


def test_a_round_does_not_wait_for_the_host() -> None:
    engine = engine_of("translation")
    requests = make_requests(engine, 2)
    for draft in drafts_of(engine).values():
        spec = engine.runner.spec(DECODINGS["penalties"], draft=draft)
        batch = engine.graphs.batch([RequestState(request, spec, 20) for request in requests])
        with torch.inference_mode():
            batch.refill()
            with NoHostSync():
                batch.runner._step()


def test_position_limits_of_model_and_draft_are_kept() -> None:
    """The draft has fewer positions than the model, and some prompts have more tokens than that."""
    engine, small = engine_of("gpt2"), engine_of("gpt2")
    draft = DraftModel(draft_engine(small, 0.01, limit=25).runner, 4)
    requests = [Request([BOS, *range(3, 3 + n)], 99, (n,)) for n in (1, 20, 23, 30, 38, 39)]
    spec = engine.runner.spec(Decoding(method="greedy", max_length=99), draft=draft)
    plain, found = engine.decode(requests, spec), decode_in_slots(engine, requests, spec)
    assert token_lists(found) == token_lists(plain) and total_stats(found) == total_stats(plain)


def test_a_text_that_repeats_itself_is_looked_up() -> None:
    engine = engine_of("llama")
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCAB, (n,), generator=dice).tolist() * 3 for n in (1, 2, 3, 5)]
    requests = [Request([BOS, *text], 20, (n,)) for n, text in enumerate(texts)]
    spec = engine.runner.spec(Decoding(method="greedy", max_length=20), draft=PromptLookup(6))
    plain, found = engine.decode(requests, spec), decode_in_slots(engine, requests, spec)
    assert token_lists(found) == token_lists(plain) and total_stats(found) == total_stats(plain)
    stats = total_stats(found)
    assert stats is not None and stats.guessed > 0


def test_streams_stops_and_cancels() -> None:
    class Stop:
        reach = 2

        def __call__(self, tokens: Any) -> bool:
            return sum(tokens[-2:]) % 7 == 3

    engine = engine_of("llama")
    spec = engine.runner.spec(Decoding(method="greedy", min_length=24, max_length=25), draft=PromptLookup(3))
    received: dict[int, list[int]] = {n: [] for n in range(3)}
    requests = [r._replace(listener=received[n].append) for n, r in enumerate(make_requests(engine, 3))]
    requests[2] = requests[2]._replace(stop=Stop())
    (plain,) = engine.decode(requests[2:], spec)
    received[2].clear()
    states = cancel_second(engine, requests, spec, received)
    assert states[0].done and received[0] == states[0].hypotheses[0].tokens
    assert states[2].hypotheses[0].tokens == plain[0].tokens == received[2] and plain[0].finished
    assert states[1].cancelled and not states[1].done


def test_requests_of_a_scheduler_with_equal_drafts_share_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    admit_as_on_a_gpu(monkeypatch)
    engine, decoding = engine_of("llama"), Decoding(method="greedy", max_length=20)
    requests = make_requests(engine, 6)
    plain = [engine.decode([request], decoding)[0] for request in requests]
    scheduler = engine.scheduler(rows=8)
    states = [scheduler.submit(request, engine.runner.spec(decoding, draft=PromptLookup(3))) for request in requests]
    scheduler.run()
    assert token_lists([state.hypotheses for state in states]) == token_lists(plain)
    assert scheduler.slots is not None and len(scheduler.slots.batches) == 1


def test_custom_drafts_run_on_the_host() -> None:
    class Own(PromptLookup):
        pass

    engine = engine_of("llama")
    drafts: list[Draft] = [Own(3), DraftModel(engine_of("gpt2", bidirectional_prompt=True).runner, 3)]
    reasons = [refusal(engine.runner, engine.runner.spec(DECODINGS["greedy"], draft=draft)) for draft in drafts]
    assert reasons == ["Own drafts on the host", "the tokens of a prompt attend to each other in the draft model"]
    assert PromptLookup(3) == PromptLookup(3) != PromptLookup(4) and Own(3) != Own(3)


def test_a_logits_processor_comes_before_a_draft() -> None:
    engine = engine_of("llama")
    requests, spec = make_requests(engine, 3), engine.runner.spec(DECODINGS["greedy"])
    processed = replace(spec, logits_processor=Rules())
    found = engine.decode(requests, replace(processed, draft=PromptLookup(3)))
    assert token_lists(found) == token_lists(engine.decode(requests, processed))
