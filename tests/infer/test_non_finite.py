"""Numbers that are not finite: the request that has them fails, leaves nothing behind, and harms no other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_prefix_cache import is_empty
from test_scheduler import DECODINGS, GREEDY, build, decode_alone, decoder_model, prompts, submit, tokens_of

from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.rules import NonFiniteError
from allyouneed.infer.decoding.topk import greedy_tokens, topk_log_probs
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.states.paged import BlockPool
from graph_runner import admit_as_on_a_gpu
from toy_models import BOS, EOS, PAD, VOCAB

POISON = VOCAB - 1  # a model that has read this token computes NaN
SAFE = [PAD, BOS, POISON]  # never generated


def poisoned(single: bool) -> Engine:
    """`single`: in single precision, as the CPU interpreter computes."""
    model = decoder_model()
    with torch.no_grad():
        model.embed.tokens.weight[POISON] = math.nan
    return Engine(model.float() if single else model, BOS, EOS, PAD, forbidden=SAFE)


PATHS: dict[str, tuple[bool, dict[str, Any]]] = {
    "unpaged": (False, {}),
    "paged": (False, {"blocks": 2000}),
    "few blocks": (False, {"blocks": 60}),
    "interpreter": (True, {}),
    "interpreter, paged": (True, {"blocks": 60}),
    "slots": (False, {}),
    "paged and slots": (False, {"blocks": 300}),
}


@pytest.fixture(params=PATHS)
def subject(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Scheduler]:
    single, options = PATHS[request.param]
    if single:
        native.wait_for_build()
    engine = poisoned(single)
    pool = BlockPool(options["blocks"], size=4) if "blocks" in options else None
    graphs = None
    if "slots" in request.param:  # as on a GPU
        admit_as_on_a_gpu(monkeypatch)
        graphs = engine.graphs
    return engine, Scheduler(engine.runner, rows=24, budget=16, pool=pool, graphs=graphs)


def known(scheduler: Scheduler, prompt: list[int]) -> int:
    """How many blocks of a prompt are cached."""
    assert scheduler.blocks is not None
    size, prefixes = scheduler.blocks.pool.size, scheduler.blocks.prefixes
    return len(prefixes._known([tuple(prompt[at : at + size]) for at in range(0, len(prompt) // size * size, size)])[1])


def test_requests_with_non_finite_logits_fail_and_no_other(subject: tuple[Engine, Scheduler]) -> None:
    engine, scheduler = subject
    decodings = [one for one in DECODINGS if one.rows <= 3]
    healthy = [(prompt, decodings[n % len(decodings)], n) for n, prompt in enumerate(prompts(10, seed=4))]
    healthy = [([token for token in prompt if token != POISON], *rest) for prompt, *rest in healthy]  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.runner), "captures", False)
        alone = [decode_alone(engine, *one) for one in healthy]
    for _ in range(3):  # blocks, rows and slots of those that failed are used again
        broken, states = [], []
        for n, one in enumerate(healthy):
            prompt = [*one[0], POISON, *range(3, 3 + n)]
            broken.append((prompt, submit(scheduler, prompt, one[1], key=n)))
            states.append(submit(scheduler, *one))
            if n % 3 == 0:
                scheduler.step()
        scheduler.run()
        for prompt, state in broken:
            assert isinstance(state.error, NonFiniteError) and not state.done and not state.tokens
            assert scheduler.blocks is None or known(scheduler, prompt) <= prompt.index(POISON) // 4
        assert not [state.error for state in states if state.error]
        assert [tokens_of(state) for state in states] == alone
    if scheduler.blocks is not None:
        assert all(torch.isfinite(one[block]).all() for block in scheduler.blocks.prefixes.blocks.values()
                   for both in scheduler.blocks.pool.storage.values() for one in both)  # fmt: skip
        assert is_empty(scheduler)


def test_logits_that_become_non_finite_end_an_answer(subject: tuple[Engine, Scheduler]) -> None:
    """Its stream has the tokens before, and it does not end as if it were whole."""
    engine, scheduler = subject

    def third(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] == 2:
            logits = torch.full_like(logits, -math.inf)
            logits[:, POISON] = 0
        return logits

    for decoding in (GREEDY, Decoding(beam=2, max_length=12), Decoding(method="sample", seed=2, max_length=12)):
        decoding = decoding.model_copy(update={"min_length": 8})
        spec = replace(engine.runner.spec(decoding), forbidden=(PAD, BOS), logits_processor=third)
        state = scheduler.submit(Request([BOS, *range(3, 12)], 12, (0,)), spec)
        other = submit(scheduler, [BOS, *range(3, 12)])
        scheduler.run()
        assert isinstance(state.error, NonFiniteError) and not state.done and len(state.tokens) in (0, 3)
        assert tokens_of(other) == decode_alone(engine, [BOS, *range(3, 12)], GREEDY)
        assert scheduler.blocks is None or not known(scheduler, [BOS, *range(3, 12)])


def test_a_fault_that_passes_is_not_cached() -> None:
    """What a prefix was read to, once, as NaN is read again."""
    engine = Engine(decoder_model(), BOS, EOS, PAD, forbidden=SAFE)
    scheduler = Scheduler(engine.runner, rows=8, budget=64, pool=BlockPool(50, size=4))
    prompt, weight = [BOS, *range(3, 16)], engine.model.embed.tokens.weight
    for end in (8, 14):  # the blocks of an earlier request are dropped, too: who knows which of them are right
        right = decode_alone(engine, [*prompt[:end], 7], GREEDY)
        before = weight[prompt[end - 1]].clone()
        with torch.no_grad():
            weight[prompt[end - 1]] = math.nan
            failed = submit(scheduler, [*prompt[:end], 6])
            scheduler.run()
            weight[prompt[end - 1]] = before
        assert isinstance(failed.error, NonFiniteError) and not known(scheduler, prompt)
        later = submit(scheduler, [*prompt[:end], 7])
        scheduler.run()
        assert tokens_of(later) == right and known(scheduler, [*prompt[:end], 7]) > 0
    assert is_empty(scheduler)


def test_a_request_that_failed_leaves_nothing_in_the_prefix_cache() -> None:
    engine = Engine(decoder_model(), BOS, EOS, PAD, forbidden=SAFE)
    scheduler = Scheduler(engine.runner, rows=8, budget=64, pool=BlockPool(50, size=4))
    other, prompt = [BOS, 9, 8, 7, 6, 5], [BOS, *range(3, 16)]

    def broken(token: int) -> None:
        raise ValueError(token)

    kept = submit(scheduler, other)
    state = submit(scheduler, prompt, listener=broken)
    scheduler.run()
    assert state.error is not None and not known(scheduler, prompt)
    assert kept.done and known(scheduler, other) == 1
    assert is_empty(scheduler)


def test_drafted_and_translated_requests_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = poisoned(single=False)
    spec = replace(engine.runner.spec(GREEDY), draft=PromptLookup(3))
    scheduler = Scheduler(engine.runner, rows=8)
    states = [scheduler.submit(Request(prompt, 9, (0,)), spec) for prompt in ([BOS, 5, POISON, 6], [BOS, 5, 9, 6])]
    scheduler.run()
    assert isinstance(states[0].error, NonFiniteError) and states[1].done
    attention = {"kind": "attention", "heads": 2}
    block = {"wiring": "pre-norm", "mixer": attention, "channel": {"kind": "ffn", "hidden": 24}}
    decoder = block | {"mixer": attention | {"pattern": "causal"}, "cross": attention}
    model = build({"kind": "encoder-decoder", "encoder": [block], "decoder": [decoder]})
    with torch.no_grad():
        model.embed.tokens.weight[POISON] = math.nan
    engine = Engine(model, BOS, EOS, PAD, forbidden=SAFE)
    for decoding in (GREEDY, Decoding(beam=3, max_length=12)):
        scheduler = Scheduler(engine.runner, rows=12)
        pair = [scheduler.submit(Request([BOS], 9, (0,), source), decoding) for source in ([5, POISON, EOS], [5, EOS])]
        scheduler.run()
        assert isinstance(pair[0].error, NonFiniteError) and pair[1].done
        with pytest.raises(NonFiniteError, match="not finite"):
            engine.generate([[5, POISON, EOS]], decoding)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("interpreter", [True, False])
def test_the_log_probability_of_a_chosen_token_tells(
    value: float, interpreter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit that is not finite, wherever it is; -inf only hides a token."""
    native.wait_for_build()
    if not interpreter:
        monkeypatch.setattr(native.NativeLibrary, "loaded", None)
    for vocab in (40, 330, 3000):
        for place in (0, 5, vocab - 1):
            logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
            logits[1, place], logits[2, place] = value, -math.inf
            for banned in (None, torch.tensor([3, 5])) if math.isnan(value) else (None,):
                for found in (greedy_tokens(logits, banned)[1], topk_log_probs(logits, 4, banned)[1][:, 0]):
                    assert found.isnan().tolist() == [False, True, False], (vocab, place)
