"""What the scheduler guarantees to each request, whatever else it decodes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.detokenizer import StopStrings, detokenize
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.scheduling.admission import MANY_CLIENTS, PATIENCE
from allyouneed.nn.states.paged import BlockPool
from property_tests import THOROUGH
from toy_models import BOS, EOS, PAD, VOCAB, random_model

GREEDY = Decoding(method="greedy", max_length=12)
DECODINGS = [
    GREEDY,
    Decoding(method="sample", top_k=20, temperature=0.9, seed=5, max_length=14),
    Decoding(method="sample", top_p=0.9, min_p=0.01, seed=6, max_length=9, best=3),
    Decoding(beam=4, best=2, max_length=10),
    Decoding(beam=2, max_length=8, early=True, no_repeat=2),
    Decoding(method="greedy", max_length=10, repetition_penalty=1.5, min_length=4),
]
LAYERS: dict[str, Any] = {
    "kv": {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "rotary"}},
    "window": {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal & window(4)", "positions": "alibi"}},
    "retention": {"mixer": {"kind": "retention", "heads": 2}},
    "rwkv": {"mixer": {"kind": "rwkv"}, "channel": {"kind": "rwkv-channel", "hidden": 24}},
}


FFN = {"kind": "ffn", "hidden": 24}


def decoder_model(layer: str = "kv", **keys: Any) -> Any:
    block = {"wiring": "pre-norm", "repeat": 2, "channel": FFN} | LAYERS[layer]
    return build({"kind": "decoder", "decoder": [block]} | keys)


def build(tree: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model: Any = ayn.build({"vocab": VOCAB, "width": 16, "embed": {"tied": False}} | tree).double().eval()
    with torch.no_grad():
        for parameter in (model.embed.tokens.weight, *model.head.parameters()):
            parameter.normal_()
    return model


@pytest.fixture(scope="module")
def decoder_engine() -> Engine:
    return Engine(decoder_model(), BOS, EOS, PAD, forbidden=[PAD, BOS])


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    dice = Random(seed)
    return [[BOS, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(longest)))] for _ in range(count)]


def submit(
    scheduler: Scheduler, prompt: list[int], decoding: Decoding = GREEDY, key: int = 0, **options: Any
) -> RequestState:
    return scheduler.submit(Request(prompt, decoding.continuation_limit(), (key,), **options), decoding)


def decode_alone(engine: Engine, prompt: list[int], decoding: Decoding, key: int = 0) -> list[list[int]]:
    return [h.tokens for h in engine.complete([prompt], decoding, first=key)[0]]


def tokens_of(state: RequestState) -> list[list[int]]:
    assert state.answer is not None
    return [h.tokens for h in state.answer]


# --- the same answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_mixed_methods_in_one_batch_give_each_request_its_own_answer(layer: str) -> None:
    engine = Engine(decoder_model(layer), BOS, EOS, PAD, forbidden=[PAD, BOS])
    cases = [(prompt, DECODINGS[n % len(DECODINGS)], n) for n, prompt in enumerate(prompts(18))]
    alone = [decode_alone(engine, *one) for one in cases]
    for budget in (1, 7, 512) if layer == "kv" or THOROUGH else (7,):
        scheduler, states = Scheduler(engine.runner, rows=16, budget=budget), []
        for prompt, decoding, key in cases:
            states.append(submit(scheduler, prompt, decoding, key))
            scheduler.step()
        scheduler.run()
        assert [tokens_of(state) for state in states] == alone, budget


def test_sources_are_encoded_together_and_shared_by_beams(engine: Engine, sources: list[list[int]]) -> None:
    check_sources(engine, Scheduler(engine.runner, rows=24, budget=64), sources)


def test_keys_shared_by_all_layers() -> None:
    wiring = {"kind": "pre-norm", "final": False}
    stacks = {
        "first": [LAYERS["retention"] | {"wiring": wiring, "channel": FFN}],
        "second": [{"wiring": "pre-norm", "cross": LAYERS["kv"]["mixer"], "channel": FFN}],
    }
    engine = Engine(build({"kind": "decoder-decoder"} | stacks), BOS, EOS, PAD, forbidden=[PAD, BOS])
    check(engine, Scheduler(engine.runner, rows=9, budget=5))


@pytest.mark.parametrize("searches", [True, False])
def test_retrieval_models_decode_concurrently(searches: bool) -> None:
    attention = {"kind": "attention", "heads": 2}
    plain = {"wiring": "pre-norm", "mixer": attention | {"pattern": "causal"}, "channel": FFN}
    tree = {"kind": "retro", "neighbours": 2, "encoder": [{"mixer": attention, "channel": FFN}]}
    tree["decoder"] = [plain, plain | {"cross": {"kind": "chunked-cross", "heads": 2, "chunk": 3}}]
    engine = Engine(build(tree), BOS, EOS, PAD, forbidden=[PAD, BOS])
    engine.runner.retrieve = (lambda chunks: [[chunk[::-1], chunk[:1] * 4] for chunk in chunks]) if searches else None
    check(engine, Scheduler(engine.runner, rows=9, budget=5))


def check_sources(engine: Engine, scheduler: Scheduler, sources: list[list[int]]) -> None:
    """Sources decoded together, in several ways, are decoded as each is alone."""
    states = []
    for key, source in enumerate(sources):
        decoding = DECODINGS[key % len(DECODINGS)]
        states.append(scheduler.submit(Request([BOS], decoding.limit(len(source)), (key,), source), decoding))
    scheduler.run()
    for key, (state, source) in enumerate(zip(states, sources, strict=True)):
        (found,) = engine.generate([source], DECODINGS[key % len(DECODINGS)], sample_keys=[[key]])
        assert tokens_of(state) == [h.tokens for h in found]


def check(engine: Engine, scheduler: Scheduler, count: int = 8) -> None:
    """Requests that arrive one by one get the answers they get alone."""
    cases = [(prompt, DECODINGS[n % len(DECODINGS)], n) for n, prompt in enumerate(prompts(count))]
    states = []
    for prompt, decoding, key in cases:
        states.append(submit(scheduler, prompt, decoding, key))
        scheduler.step()
    scheduler.run()
    for state, one in zip(states, cases, strict=True):
        assert tokens_of(state) == decode_alone(engine, *one)


def test_samples_depend_on_seed_and_sample_key_alone(decoder_engine: Engine) -> None:
    found = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        scheduler = Scheduler(decoder_engine.runner, rows=3)
        states = {n: submit(scheduler, [BOS], DECODINGS[1], n % 2) for n in order}
        scheduler.run()
        found.append([tokens_of(states[n]) for n in range(4)])
    assert found[0] == found[1] and found[0][0] == found[0][2] != found[0][1]


def test_the_position_limit_is_never_exceeded() -> None:
    model = decoder_model(embed={"tied": False, "positions": {"kind": "learned", "length": 20}})
    engine = Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS, EOS], limit=20)
    scheduler = Scheduler(engine.runner, rows=32)
    cases = [[BOS, *[5] * n] for n in [19, *range(16)]]
    states = [submit(scheduler, prompt, Decoding(method="greedy", max_length=40)) for prompt in cases]
    scheduler.run()
    assert [len(tokens_of(state)[0]) + len(prompt) for state, prompt in zip(states, cases, strict=True)] == [21] * 17
    together = engine.complete(cases, Decoding(method="greedy", max_length=40))
    assert [h.tokens for (h,) in together] == [tokens_of(state)[0] for state in states]


def test_a_bidirectional_prompt_is_prefilled_whole() -> None:
    mixer = LAYERS["kv"]["mixer"] | {"pattern": "causal | prompt"}
    block = {"wiring": "pre-norm", "mixer": mixer, "channel": FFN}
    engine = Engine(decoder_model(decoder=[block]), BOS, EOS, PAD, bidirectional_prompt=True)
    scheduler = Scheduler(engine.runner, rows=4, budget=3)
    cases = prompts(6)
    states = [submit(scheduler, prompt) for prompt in cases]
    scheduler.run()
    assert [tokens_of(state) for state in states] == [decode_alone(engine, prompt, GREEDY) for prompt in cases]


# --- submitting --------------------------------------------------------------------------------------------------


def test_a_step_without_requests_does_nothing() -> None:
    scheduler = Scheduler(ModelRunner(random_model(), BOS, EOS, PAD))
    assert scheduler.idle
    scheduler.run()
    scheduler.step()
    nothing = scheduler.submit(Request([BOS], 5, (0,), []))
    assert nothing.finished and tokens_of(nothing) == [[]] and scheduler.idle


@pytest.mark.parametrize(
    ("request_", "decoding", "says"),
    [
        (Request([], 4, (0,)), GREEDY, "has no tokens"),
        (Request([BOS, VOCAB], 4, (0,)), GREEDY, f"token {VOCAB}"),
        (Request([BOS] * 9, 4, (0,)), GREEDY, "9 tokens"),
        (Request([BOS], 4, (0,)), Decoding(beam=5), "5 rows"),
        (Request([BOS] * 7, 2, (0,)), Decoding(beam=4), "bytes"),
    ],
)
def test_an_invalid_request_is_refused_and_others_are_unaffected(
    decoder_engine: Engine, request_: Request, decoding: Decoding, says: str
) -> None:
    limited = Engine(decoder_engine.model, BOS, EOS, PAD, forbidden=[PAD, BOS], limit=8)
    scheduler = Scheduler(limited.runner, rows=4, memory=12_000)
    other = submit(scheduler, [BOS, 5])
    scheduler.step()
    with pytest.raises(UserError, match=says):
        scheduler.submit(request_, decoding)
    scheduler.run()
    assert tokens_of(other) == decode_alone(limited, [BOS, 5], GREEDY)


def test_a_beam_wider_than_the_vocabulary_works() -> None:
    engine = Engine(decoder_model(vocab=5), BOS, EOS, PAD, forbidden=[PAD, BOS])
    scheduler = Scheduler(engine.runner, rows=20)
    wide = Decoding(beam=16, best=16, max_length=2)
    states = [submit(scheduler, [BOS, 3], decoding) for decoding in (wide, GREEDY)]
    scheduler.run()
    assert len({tuple(tokens) for tokens in tokens_of(states[0])}) == 7 and tokens_of(states[1]) == decode_alone(
        engine, [BOS, 3], GREEDY
    )


def test_stop_strings_are_found_across_token_boundaries(tokenizer: Tokenizer) -> None:
    engine = Engine(
        decoder_model(vocab=tokenizer.size), tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.specials
    )
    decoding = Decoding(method="sample", temperature=1.5, seed=3, max_length=40)
    (free,) = engine.complete([[tokenizer.bos]], decoding)[0]
    text, across = tokenizer.decode(free.tokens), 0
    scheduler = Scheduler(engine.runner, rows=40)
    cases = {}
    for key in range(0, len(text) - 3, 2):
        if "\ufffd" not in (stop := text[key : key + 3]):
            some = decoding.model_copy(update={"stop": (stop,)})
            cases[stop] = submit(scheduler, [tokenizer.bos], some, stop=StopStrings(tokenizer, [stop]))
    scheduler.run()
    for stop, state in cases.items():
        (found,) = state.answer or ()
        assert found.tokens == free.tokens[: len(found.tokens)] and found.finished
        assert detokenize(tokenizer, found.tokens, stop=[stop]) == text[: text.index(stop)]
        across += all(stop not in tokenizer.decode([token]) for token in found.tokens)
    assert len(cases) > 8 and across > 4


# --- order of service ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoding", DECODINGS[:2] + DECODINGS[3:4])
def test_tokens_are_streamed_as_they_are_decoded(decoder_engine: Engine, decoding: Decoding) -> None:
    scheduler, received, by_others = Scheduler(decoder_engine.runner), [], []
    first = submit(scheduler, [BOS, 7], decoding, listener=received.append)
    other = submit(scheduler, [BOS, 8, 9], listener=by_others.append)
    came = []
    for token in scheduler.stream(first):
        came.append((token, len(by_others)))
    assert (
        [token for token, _ in came]
        == received
        == first.tokens
        == tokens_of(first)[0]
        == decode_alone(decoder_engine, [BOS, 7], decoding)[0]
    )
    assert decoding.rows > 1 or len({others for _, others in came}) > 3, "not all at the end"
    scheduler.run()
    assert by_others == tokens_of(other)[0]


def test_a_long_prompt_does_not_stall_others(decoder_engine: Engine) -> None:
    """While it is prefilled, others decode a token in every step, and new requests arrive and finish."""
    scheduler = Scheduler(decoder_engine.runner, budget=8)
    writing = submit(scheduler, [BOS, 5], Decoding(method="greedy", min_length=90, max_length=90))
    scheduler.step()
    long = submit(scheduler, [BOS, *[9, 11, 4] * 100])
    for step in range(30):
        scheduler.step()
        assert len(writing.tokens) == step + 2 and not long.tokens
    late = submit(scheduler, [BOS, 6])
    for _ in range(14):
        scheduler.step()
    assert late.finished and not long.finished
    scheduler.run()
    assert tokens_of(long) == decode_alone(decoder_engine, [BOS, *[9, 11, 4] * 100], GREEDY)


def test_no_prefill_exceeds_the_budget(decoder_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, advance = [], decoder_engine.model.advance

    def watched(new: Any, states: Any, last: bool = False) -> Any:
        sizes.append(new.tokens.numel() if last else 0)
        return advance(new, states, last)

    monkeypatch.setattr(decoder_engine.model, "advance", watched)
    scheduler = Scheduler(decoder_engine.runner, budget=16)
    for prompt in prompts(20, longest=60):
        submit(scheduler, prompt)
    scheduler.run()
    assert max(sizes) <= 16 and sum(sizes) >= sum(map(len, prompts(20, longest=60)))


def finishing(scheduler: Scheduler, states: dict[str, RequestState]) -> list[str]:
    order: list[str] = []
    while not scheduler.idle:
        scheduler.step()
        order += [name for name, state in states.items() if state.finished and name not in order]
    return order


def test_higher_priority_comes_first_without_starvation(decoder_engine: Engine) -> None:
    decoding = Decoding(method="greedy", min_length=4, max_length=4)
    scheduler = Scheduler(decoder_engine.runner, rows=1)
    states = {
        name: submit(scheduler, [BOS, 5], decoding, priority=priority)
        for name, priority in (("low", 0), ("high", 2), ("middle", 1), ("high too", 2))
    }
    assert finishing(scheduler, states) == ["high", "high too", "middle", "low"]
    submit(scheduler, [BOS, 6], decoding, priority=1)
    patient, steps = submit(scheduler, [BOS, 5], decoding), 0
    while not patient.finished:
        if not scheduler.arrivals and not any(key[0] for key in scheduler.fair.waiting):
            submit(scheduler, [BOS, 6], decoding, priority=1)
        scheduler.step()
        steps += 1
    assert PATIENCE < steps < 3 * PATIENCE


def test_a_client_with_many_requests_does_not_delay_others(decoder_engine: Engine) -> None:
    decoding = Decoding(method="greedy", min_length=4, max_length=4)
    scheduler = Scheduler(decoder_engine.runner, rows=1)
    states = {f"many {n}": submit(scheduler, [BOS, 5], decoding, client="many") for n in range(6)}
    states |= {f"few {n}": submit(scheduler, [BOS, 5], decoding, client="few") for n in range(2)}
    assert finishing(scheduler, states)[:4] == ["many 0", "few 0", "many 1", "few 1"]


@pytest.mark.parametrize("pages", [True, False])
def test_a_backlog_of_one_client_that_has_waited_long_delays_no_other(decoder_engine: Engine, pages: bool) -> None:
    """150 requests have waited for many times `PATIENCE`, some of higher priority: the first request of another client
    has the next free row, and each further one the next but one."""
    decoding, rows = Decoding(method="greedy", min_length=8, max_length=8), 2
    scheduler = Scheduler(decoder_engine.runner, rows=rows, pool=BlockPool(40, size=4) if pages else None)
    many = [submit(scheduler, [BOS, 5], decoding, n, client="many", priority=n % 3) for n in range(150)]
    for _ in range(3 * PATIENCE):
        scheduler.step()
    ended = sum(state.done for state in many)
    few = [submit(scheduler, [BOS, 6], decoding, n, client="few") for n in range(4)]
    steps = 0
    while not few[-1].done:
        scheduler.step()
        steps += 1
        if not few[0].done:
            assert steps <= 8 * 2 + 2  # a row is free after one answer, and has the other's after the next
    assert sum(state.done for state in many) - ended <= rows + len(few)
    assert steps <= 8 * (1 + len(few)) + len(few)
    scheduler.close()


def test_grants_of_clients_that_have_left_are_forgotten(decoder_engine: Engine) -> None:
    scheduler = Scheduler(decoder_engine.runner, rows=2)
    long = submit(scheduler, [BOS, 5], Decoding(method="greedy", min_length=3000, max_length=3000), client="long")
    for n in range(MANY_CLIENTS + 50):
        submit(scheduler, [BOS, 6], Decoding(method="greedy", max_length=1), client=f"client {n}")
    while any(scheduler.fair.waiting) or scheduler.arrivals:
        scheduler.step()
    submit(scheduler, [BOS, 6], Decoding(method="greedy", max_length=1), client="last")
    scheduler.step()
    assert not long.done and len(scheduler.fair.granted) < 10 and scheduler.fair.granted["long"] > 0
    scheduler.close()


# --- cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_cancelled_request_leaves_the_others_unaffected(
    decoder_engine: Engine, steps: int, decoding: Decoding
) -> None:
    scheduler = Scheduler(decoder_engine.runner, rows=16, budget=4)
    cases = prompts(6, seed=3)
    states = [submit(scheduler, prompt, decoding, n) for n, prompt in enumerate(cases)]
    for _ in range(steps):
        scheduler.step()
    states[1].cancel()
    states[4].cancel()
    scheduler.run()
    for n in (0, 2, 3, 5):
        assert tokens_of(states[n]) == decode_alone(decoder_engine, cases[n], decoding, n)
    for n in (1, 4):
        whole = decode_alone(decoder_engine, cases[n], decoding, n)[0]
        assert states[n].finished and states[n].tokens == whole[: len(states[n].tokens)]
        assert states[n].cancelled == (states[n].answer is None)
    assert states[4].cancelled or steps > 2
    assert scheduler.idle and not scheduler.active


def test_a_failing_listener_cancels_its_own_request_only(decoder_engine: Engine) -> None:
    scheduler = Scheduler(decoder_engine.runner)

    def broken(token: int) -> None:
        raise OSError("connection lost")

    bad, good = submit(scheduler, [BOS, 7], listener=broken), submit(scheduler, [BOS, 8])
    scheduler.run()
    assert isinstance(bad.error, OSError) and bad.cancelled and len(bad.tokens) == 1
    assert tokens_of(good) == decode_alone(decoder_engine, [BOS, 8], GREEDY)


def test_states_stay_within_the_memory_limit(decoder_engine: Engine) -> None:
    """Declared bytes bound the real ones, and all are released."""
    scheduler = Scheduler(decoder_engine.runner, rows=64, budget=32, memory=60_000)
    states = [submit(scheduler, prompt) for prompt in prompts(30)]
    most, at_once = 0, 0
    while not scheduler.idle:
        scheduler.step()
        used = sum(batch.states.bytes for batch in scheduler.running)
        used += sum(batch.states.bytes for batch in scheduler.prefill.batches)
        most, at_once = max(most, used), max(at_once, len(scheduler.active))
    assert all(state.answer for state in states) and 1 < at_once < 30 and 0 < most <= 60_000
    assert not scheduler.active


# --- everything at once ---------------------------------------------------------------------------------------------


def soak(
    engine: Engine,
    scheduler: Scheduler,
    count: int,
    seed: int,
    begins: list[list[int]],
    rare: float,
    most: int,
) -> None:
    """`count` requests of all methods, each prompt starting with one of `begins`, some of them cancelled: all finish,
    and those that were not cancelled get the answer they get alone. A larger `rare` gives shorter prompts."""
    dice = Random(seed)
    cases: list[tuple[RequestState, list[int], Decoding, int]] = []
    running: list[RequestState] = []
    for number in range(count):
        decoding = dice.choice(DECODINGS).model_copy(
            update={"seed": dice.randrange(3), "max_length": dice.randrange(4, most)}
        )
        prompt = [*dice.choice(begins), *(dice.randrange(3, 23) for _ in range(int(dice.expovariate(rare))))]
        client, priority = f"client {dice.randrange(4)}", dice.randrange(3)
        state = submit(scheduler, prompt, decoding, number, client=client, priority=priority)
        cases.append((state, prompt, decoding, number))
        running.append(state)
        while len(running) > 100 or dice.random() < 0.1:
            scheduler.step()
            if dice.random() < 0.2:
                dice.choice(running).cancel()
            running = [state for state in running if not state.finished]
            if not running:
                break
    scheduler.run()
    assert scheduler.idle and not scheduler.active and not scheduler.running and not scheduler.prefill.batches
    assert all(state.finished for state, *_ in cases)
    answered = [one for one in cases if one[0].answer is not None]
    assert 0.5 * count < len(answered) < count
    for state, *one in dice.sample(answered, 40):
        assert tokens_of(state) == decode_alone(engine, *one)


def soak_rows(count: int, seed: int) -> None:
    engine = Engine(decoder_model(vocab=23), BOS, EOS, PAD, forbidden=[PAD, BOS])
    scheduler = Scheduler(engine.runner, rows=48, budget=96, memory=2_000_000)
    soak(engine, scheduler, count, seed, begins=[[BOS]], rare=0.15, most=12)


def test_hundreds_of_requests_get_the_answers_they_get_alone() -> None:
    soak_rows(500, seed=1)


@pytest.mark.slow
def test_twenty_thousand_requests_get_the_answers_they_get_alone() -> None:
    soak_rows(20_000, seed=2)
