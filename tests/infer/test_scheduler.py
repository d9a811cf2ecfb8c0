"""Promises of the scheduler to whoever asks it, and to those who ask beside them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.admission import PATIENCE
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.detokenizer import StopStrings, detokenize
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from toy_models import BOS, EOS, PAD, VOCAB, random_model

GREEDY = Decoding(method="greedy", max_length=12)
WAYS = [
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


def writer(layer: str = "kv", **keys: Any) -> Any:
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
def speaker() -> Engine:
    return Engine(writer(), BOS, EOS, PAD, forbidden=[PAD, BOS])


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    dice = Random(seed)
    return [[BOS, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(longest)))] for _ in range(count)]


def ask(
    scheduler: Scheduler, prompt: list[int], way: Decoding = GREEDY, place: int = 0, **options: Any
) -> RequestState:
    return scheduler.submit(Request(prompt, way.continuation_limit(), (place,), **options), way)


def alone(engine: Engine, prompt: list[int], decoding: Decoding, place: int = 0) -> list[list[int]]:
    return [h.tokens for h in engine.complete([prompt], decoding, first=place)[0]]


def told(state: RequestState) -> list[list[int]]:
    assert state.answer is not None
    return [h.tokens for h in state.answer]


# --- the same answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("budget", [1, 7, 512])
def test_every_way_at_once_and_everyone_gets_their_own_answer(layer: str, budget: int) -> None:
    engine = Engine(writer(layer), BOS, EOS, PAD, forbidden=[PAD, BOS])
    scheduler, states = Scheduler(engine, rows=16, budget=budget), []
    asked = [(prompt, WAYS[n % len(WAYS)], n) for n, prompt in enumerate(prompts(18))]
    for prompt, decoding, place in asked:
        states.append(ask(scheduler, prompt, decoding, place))
        scheduler.step()
    scheduler.run()
    for state, one in zip(states, asked, strict=True):
        assert told(state) == alone(engine, *one)


def test_sources_are_read_together_and_beams_share_them(engine: Engine, sources: list[list[int]]) -> None:
    scheduler = Scheduler(engine, rows=24, budget=64)
    states = []
    for place, source in enumerate(sources):
        decoding = WAYS[place % len(WAYS)]
        states.append(scheduler.submit(Request([BOS], decoding.limit(len(source)), (place,), source), decoding))
    scheduler.run()
    for place, (state, source) in enumerate(zip(states, sources, strict=True)):
        (found,) = engine.generate([source], WAYS[place % len(WAYS)], sample_keys=[[place]])
        assert told(state) == [h.tokens for h in found]


def test_keys_that_all_layers_share() -> None:
    wiring = {"kind": "pre-norm", "final": False}
    stacks = {
        "first": [LAYERS["retention"] | {"wiring": wiring, "channel": FFN}],
        "second": [{"wiring": "pre-norm", "cross": LAYERS["kv"]["mixer"], "channel": FFN}],
    }
    engine = Engine(build({"kind": "decoder-decoder"} | stacks), BOS, EOS, PAD, forbidden=[PAD, BOS])
    check(engine, Scheduler(engine, rows=9, budget=5))


@pytest.mark.parametrize("searches", [True, False])
def test_texts_that_look_up_others_go_on_beside_each_other(searches: bool) -> None:
    attention = {"kind": "attention", "heads": 2}
    plain = {"wiring": "pre-norm", "mixer": attention | {"pattern": "causal"}, "channel": FFN}
    tree = {"kind": "retro", "neighbours": 2, "encoder": [{"mixer": attention, "channel": FFN}]}
    tree["decoder"] = [plain, plain | {"cross": {"kind": "chunked-cross", "heads": 2, "chunk": 3}}]
    engine = Engine(build(tree), BOS, EOS, PAD, forbidden=[PAD, BOS])
    engine.retrieve = (lambda chunks: [[chunk[::-1], chunk[:1] * 4] for chunk in chunks]) if searches else None
    check(engine, Scheduler(engine, rows=9, budget=5))


def check(engine: Engine, scheduler: Scheduler) -> None:
    asked = [(prompt, WAYS[n % len(WAYS)], n) for n, prompt in enumerate(prompts(8))]
    states = []
    for prompt, way, place in asked:
        states.append(ask(scheduler, prompt, way, place))
        scheduler.step()
    scheduler.run()
    for state, one in zip(states, asked, strict=True):
        assert told(state) == alone(engine, *one)


def test_samples_depend_on_seed_and_place_alone(speaker: Engine) -> None:
    found = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        scheduler = Scheduler(speaker, rows=3)
        states = {n: ask(scheduler, [BOS], WAYS[1], n % 2) for n in order}
        scheduler.run()
        found.append([told(states[n]) for n in range(4)])
    assert found[0] == found[1] and found[0][0] == found[0][2] != found[0][1]


def test_places_run_out_and_nobody_needs_one_more() -> None:
    model = writer(embed={"tied": False, "positions": {"kind": "learned", "length": 20}})
    engine = Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS, EOS], limit=20)
    scheduler = Scheduler(engine, rows=32)
    asked = [[BOS, *[5] * n] for n in [19, *range(16)]]
    states = [ask(scheduler, prompt, Decoding(method="greedy", max_length=40)) for prompt in asked]
    scheduler.run()
    assert [len(told(state)[0]) + len(prompt) for state, prompt in zip(states, asked, strict=True)] == [21] * 17
    together = engine.complete(asked, Decoding(method="greedy", max_length=40))
    assert [h.tokens for (h,) in together] == [told(state)[0] for state in states]


def test_tokens_of_a_prompt_that_see_each_other_are_read_at_once() -> None:
    mixer = LAYERS["kv"]["mixer"] | {"pattern": "causal | prompt"}
    block = {"wiring": "pre-norm", "mixer": mixer, "channel": FFN}
    engine = Engine(writer(decoder=[block]), BOS, EOS, PAD, bidirectional_prompt=True)
    scheduler = Scheduler(engine, rows=4, budget=3)
    asked = prompts(6)
    states = [ask(scheduler, prompt) for prompt in asked]
    scheduler.run()
    assert [told(state) for state in states] == [alone(engine, prompt, GREEDY) for prompt in asked]


# --- what is asked --------------------------------------------------------------------------------------------------


def test_nothing_to_do() -> None:
    scheduler = Scheduler(Engine(random_model(), BOS, EOS, PAD))
    assert scheduler.idle
    scheduler.run()
    scheduler.step()
    nothing = scheduler.submit(Request([BOS], 5, (0,), []))
    assert nothing.finished and told(nothing) == [[]] and scheduler.idle


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
def test_what_cannot_be_is_refused_and_nobody_else_loses_anything(
    speaker: Engine, request_: Request, decoding: Decoding, says: str
) -> None:
    limited = Engine(speaker.model, BOS, EOS, PAD, forbidden=[PAD, BOS], limit=8)
    scheduler = Scheduler(limited, rows=4, memory=12_000)
    other = ask(scheduler, [BOS, 5])
    scheduler.step()
    with pytest.raises(UserError, match=says):
        scheduler.submit(request_, decoding)
    scheduler.run()
    assert told(other) == alone(limited, [BOS, 5], GREEDY)


def test_a_beam_wider_than_the_vocabulary() -> None:
    engine = Engine(writer(vocab=5), BOS, EOS, PAD, forbidden=[PAD, BOS])
    scheduler = Scheduler(engine, rows=20)
    wide = Decoding(beam=16, best=16, max_length=2)
    states = [ask(scheduler, [BOS, 3], way) for way in (wide, GREEDY)]
    scheduler.run()
    assert len({tuple(tokens) for tokens in told(states[0])}) == 7 and told(states[1]) == alone(
        engine, [BOS, 3], GREEDY
    )


def test_a_string_to_stop_at_across_the_borders_of_tokens(tokenizer: Tokenizer) -> None:
    engine = Engine(writer(vocab=tokenizer.size), tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.specials)
    way = Decoding(method="sample", temperature=1.5, seed=3, max_length=40)
    (free,) = engine.complete([[tokenizer.bos]], way)[0]
    text, across = tokenizer.decode(free.tokens), 0
    scheduler = Scheduler(engine, rows=40)
    asked = {}
    for place in range(0, len(text) - 3, 2):
        if "\ufffd" not in (stop := text[place : place + 3]):
            some = way.model_copy(update={"stop": (stop,)})
            asked[stop] = ask(scheduler, [tokenizer.bos], some, stop=StopStrings(tokenizer, [stop]))
    scheduler.run()
    for stop, state in asked.items():
        (found,) = state.answer or ()
        assert found.tokens == free.tokens[: len(found.tokens)] and found.finished
        assert detokenize(tokenizer, found.tokens, stop=[stop]) == text[: text.index(stop)]
        across += all(stop not in tokenizer.decode([token]) for token in found.tokens)
    assert len(asked) > 8 and across > 4


# --- who is served when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS[:2] + WAYS[3:4])
def test_tokens_come_as_they_are_said(speaker: Engine, way: Decoding) -> None:
    scheduler, heard, by_others = Scheduler(speaker), [], []
    first = ask(scheduler, [BOS, 7], way, listener=heard.append)
    other = ask(scheduler, [BOS, 8, 9], listener=by_others.append)
    came = []
    for token in scheduler.stream(first):
        came.append((token, len(by_others)))
    assert [token for token, _ in came] == heard == first.tokens == told(first)[0] == alone(speaker, [BOS, 7], way)[0]
    assert way.rows > 1 or len({others for _, others in came}) > 3, "not all at the end"
    scheduler.run()
    assert by_others == told(other)[0]


def test_a_long_prompt_stalls_nobody(speaker: Engine) -> None:
    """While it is read, others say a token in every step, and new ones come and are done."""
    scheduler = Scheduler(speaker, budget=8)
    writing = ask(scheduler, [BOS, 5], Decoding(method="greedy", min_length=90, max_length=90))
    scheduler.step()
    long = ask(scheduler, [BOS, *[9, 11, 4] * 100])
    for step in range(30):
        scheduler.step()
        assert len(writing.tokens) == step + 2 and not long.tokens
    late = ask(scheduler, [BOS, 6])
    for _ in range(14):
        scheduler.step()
    assert late.finished and not long.finished
    scheduler.run()
    assert told(long) == alone(speaker, [BOS, *[9, 11, 4] * 100], GREEDY)


def test_no_pass_over_prompts_is_larger_than_the_budget(speaker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, advance = [], speaker.model.advance

    def watched(new: Any, states: Any, last: bool = False) -> Any:
        sizes.append(new.tokens.numel() if last else 0)
        return advance(new, states, last)

    monkeypatch.setattr(speaker.model, "advance", watched)
    scheduler = Scheduler(speaker, budget=16)
    for prompt in prompts(20, longest=60):
        ask(scheduler, prompt)
    scheduler.run()
    assert max(sizes) <= 16 and sum(sizes) >= sum(map(len, prompts(20, longest=60)))


def finishing(scheduler: Scheduler, states: dict[str, RequestState]) -> list[str]:
    order: list[str] = []
    while not scheduler.idle:
        scheduler.step()
        order += [name for name, state in states.items() if state.finished and name not in order]
    return order


def test_the_urgent_come_first_but_nobody_waits_for_ever(speaker: Engine) -> None:
    way = Decoding(method="greedy", min_length=4, max_length=4)
    scheduler = Scheduler(speaker, rows=1)
    states = {
        name: ask(scheduler, [BOS, 5], way, priority=priority)
        for name, priority in (("low", 0), ("high", 2), ("middle", 1), ("high too", 2))
    }
    assert finishing(scheduler, states) == ["high", "high too", "middle", "low"]
    ask(scheduler, [BOS, 6], way, priority=1)
    patient, steps = ask(scheduler, [BOS, 5], way), 0
    while not patient.finished:
        if not scheduler.arrivals and not any(key[0] for key in scheduler.fair.waiting):
            ask(scheduler, [BOS, 6], way, priority=1)
        scheduler.step()
        steps += 1
    assert PATIENCE < steps < 3 * PATIENCE


def test_who_asks_for_much_does_not_keep_others_from_little(speaker: Engine) -> None:
    way = Decoding(method="greedy", min_length=4, max_length=4)
    scheduler = Scheduler(speaker, rows=1)
    states = {f"many {n}": ask(scheduler, [BOS, 5], way, client="many") for n in range(6)}
    states |= {f"few {n}": ask(scheduler, [BOS, 5], way, client="few") for n in range(2)}
    assert finishing(scheduler, states)[:4] == ["many 0", "few 0", "many 1", "few 1"]


# --- who leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
def test_cancelled_in_the_middle(speaker: Engine, steps: int, way: Decoding) -> None:
    scheduler = Scheduler(speaker, rows=16, budget=4)
    asked = prompts(6, seed=3)
    states = [ask(scheduler, prompt, way, n) for n, prompt in enumerate(asked)]
    for _ in range(steps):
        scheduler.step()
    states[1].cancel()
    states[4].cancel()
    scheduler.run()
    for n in (0, 2, 3, 5):
        assert told(states[n]) == alone(speaker, asked[n], way, n)
    for n in (1, 4):
        whole = alone(speaker, asked[n], way, n)[0]
        assert states[n].finished and states[n].tokens == whole[: len(states[n].tokens)]
        assert states[n].cancelled == (states[n].answer is None)
    assert states[4].cancelled or steps > 2
    assert scheduler.idle and not scheduler.active


def test_a_listener_that_fails_loses_its_own_request_only(speaker: Engine) -> None:
    scheduler = Scheduler(speaker)

    def broken(token: int) -> None:
        raise OSError("the line is dead")

    bad, good = ask(scheduler, [BOS, 7], listener=broken), ask(scheduler, [BOS, 8])
    scheduler.run()
    assert isinstance(bad.error, OSError) and bad.cancelled and len(bad.tokens) == 1
    assert told(good) == alone(speaker, [BOS, 8], GREEDY)


def test_states_never_need_more_than_they_were_given(speaker: Engine) -> None:
    """Declared bytes hold what is really there, and all of them come back."""
    scheduler = Scheduler(speaker, rows=64, budget=32, memory=60_000)
    states = [ask(scheduler, prompt) for prompt in prompts(30)]
    most, crowd = 0, 0
    while not scheduler.idle:
        scheduler.step()
        used = sum(batch.states.bytes for batch in scheduler.running)
        used += sum(batch.states.bytes for batch in scheduler.prefilling)
        most, crowd = max(most, used), max(crowd, len(scheduler.active))
    assert all(state.answer for state in states) and 1 < crowd < 30 and 0 < most <= 60_000
    assert not scheduler.active


# --- everything at once ---------------------------------------------------------------------------------------------


def soak(scheduler: Scheduler, count: int, seed: int, begins: list[list[int]], rare: float, most: int) -> None:
    """So many who ask in all ways, each beginning in one of these, and some of whom do not wait for the answer:
    everybody is done in the end, and those who waited got what they would get alone. `rare`: the larger, the shorter
    prompts."""
    dice = Random(seed)
    asked: list[tuple[RequestState, list[int], Decoding, int]] = []
    running: list[RequestState] = []
    for number in range(count):
        way = dice.choice(WAYS).model_copy(update={"seed": dice.randrange(3), "max_length": dice.randrange(4, most)})
        prompt = [*dice.choice(begins), *(dice.randrange(3, 23) for _ in range(int(dice.expovariate(rare))))]
        client, priority = f"client {dice.randrange(4)}", dice.randrange(3)
        state = ask(scheduler, prompt, way, number, client=client, priority=priority)
        asked.append((state, prompt, way, number))
        running.append(state)
        while len(running) > 100 or dice.random() < 0.1:
            scheduler.step()
            if dice.random() < 0.2:
                dice.choice(running).cancel()
            running = [state for state in running if not state.finished]
            if not running:
                break
    scheduler.run()
    assert scheduler.idle and not scheduler.active and not scheduler.running and not scheduler.prefilling
    assert all(state.finished for state, *_ in asked)
    answered = [one for one in asked if one[0].answer is not None]
    assert 0.5 * count < len(answered) < count
    for state, *one in dice.sample(answered, 40):
        assert told(state) == alone(scheduler.engine, *one)


def crowded() -> Scheduler:
    engine = Engine(writer(vocab=23), BOS, EOS, PAD, forbidden=[PAD, BOS])
    return Scheduler(engine, rows=48, budget=96, memory=2_000_000)


def test_hundreds_who_come_and_go() -> None:
    soak(crowded(), 500, seed=1, begins=[[BOS]], rare=0.15, most=12)


@pytest.mark.slow
def test_twenty_thousand_who_come_and_go() -> None:
    soak(crowded(), 20_000, seed=2, begins=[[BOS]], rare=0.15, most=12)
