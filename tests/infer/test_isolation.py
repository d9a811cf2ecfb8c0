"""Faults stay where they belong. Callbacks that raise, model passes that fail and Ctrl-C at any line: each answered
request gets the answer it gets alone, every caller gets a result or an error, all blocks are released, and the
scheduler goes on."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from test_prefix_cache import is_empty
from test_scheduler import DECODINGS, decoder_model

from allyouneed.errors import UserError
from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import MAX_TOKENS, Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.scheduling.admission import LargestFirst
from allyouneed.infer.speculative.drafts import Drafter, PromptLookup
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import BlockPool
from graph_runner import admit_as_on_a_gpu
from toy_models import BOS, EOS, PAD, VOCAB, random_model

GREEDY = Decoding(method="greedy", max_length=12)


class Fault(Exception):
    """Injected."""


@cache
def engine_of(kind: str) -> Engine:
    model = random_model().double() if kind == "encoder-decoder" else decoder_model()
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS])


def decode_alone(request: Request, spec: Any, engine: Engine) -> list[list[int]]:
    clean = request._replace(listener=None, stop=None)
    return [h.tokens for h in engine.decode([clean], replace(spec, logits_processor=None))[0]]


# --- what is refused --------------------------------------------------------------------------------------------------


class Reach:
    def __init__(self, reach: Any) -> None:
        self.reach = reach

    def __call__(self, tokens: Any) -> bool:
        return False


VALID = Request([BOS, 5], 4, (0,))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": [BOS, -1]}, "prompt: token -1 is outside"),
        ({"prompt": [BOS, VOCAB]}, f"token {VOCAB} is outside the vocabulary of {VOCAB} tokens"),
        ({"prompt": [BOS, 2.5]}, "prompt: must be a list of token ids"),
        ({"prompt": 7}, "prompt: must be a list of token ids"),
        ({"prompt": "text"}, "prompt: must be a list of token ids"),
        ({"limit": 0}, "limit=0: must be from 1 to"),
        ({"limit": 10**12}, "limit=1000000000000: must be from 1 to"),
        ({"limit": "9"}, "limit: must be an integer"),
        ({"sample_key": (-1,)}, "sample_key=-1: must be at least 0"),
        ({"sample_key": 3}, "sample_key: must be a tuple"),
        ({"source": [5]}, "takes no source"),
        ({"stop": 5}, "stop: must be callable"),
        ({"stop": Reach(0)}, "stop.reach=0"),
        ({"stop": lambda tokens: False}, "stop.reach: must be an integer"),
        ({"listener": "print"}, "listener: must be callable"),
        ({"priority": None}, "priority: must be an integer"),
        ({"client": ["me"]}, "client: must be text"),
    ],
)
def test_a_bad_request_is_refused_at_submission(changes: dict[str, Any], says: str) -> None:
    engine = engine_of("decoder")
    for scheduler in (Scheduler(engine.runner), Scheduler(engine.runner, queue=LargestFirst(99))):
        with pytest.raises(UserError, match=says):
            scheduler.submit(VALID._replace(**changes), GREEDY)
        assert scheduler.idle


def test_a_bad_specification_is_refused_at_submission() -> None:
    engine, spec = engine_of("decoder"), engine_of("decoder").runner.spec(GREEDY)
    scheduler = Scheduler(engine.runner)
    for changes in ({"eos": VOCAB}, {"forbidden": (-1,)}, {"logits_processor": 5}, {"draft": 5}):
        with pytest.raises(UserError):
            scheduler.submit(VALID, replace(spec, **changes))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs a source"):
        Scheduler(engine_of("encoder-decoder").runner).submit(VALID, GREEDY)
    assert scheduler.idle


def test_a_large_limit_costs_nothing_until_it_is_used() -> None:
    """Rows of a batch have columns for tokens that exist, not for the largest limit of anyone in it."""
    engine = engine_of("decoder")
    scheduler = Scheduler(engine.runner)
    for method in ("greedy", "sample"):
        options = Decoding(method=method, max_length=MAX_TOKENS)
        scheduler.submit(Request([BOS, 5], MAX_TOKENS, (0,)), options)
    scheduler.step()
    assert max(search.tokens.shape[1] for batch in scheduler.running for search in batch.searches) < 1000  # type: ignore[attr-defined]
    scheduler.close()
    assert scheduler.idle


def test_long_answers_outgrow_their_first_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("decoder")
    for more in ({"method": "sample", "seed": 3}, {"beam": 2}):
        options = Decoding(max_length=40, min_length=39, loops=None, **more)
        requests = [Request([BOS, 5 + n], 40, (n,)) for n in range(3)]
        wide = [decode_alone(request, engine.runner.spec(options), engine) for request in requests]
        with monkeypatch.context() as patch:
            patch.setattr("allyouneed.infer.decoding.base.WIDTH", 4)
            scheduler = Scheduler(engine.runner)
            states = [scheduler.submit(request, options) for request in requests[:2]]
            for _ in range(20):
                scheduler.step()
            states.append(scheduler.submit(requests[2], options))
            scheduler.run()
        assert [[h.tokens for h in state.hypotheses] for state in states] == wide
        assert all(len(tokens) >= 39 for (tokens,) in wide)


def test_a_caller_cannot_change_a_submitted_prompt() -> None:
    engine, prompt = engine_of("decoder"), [BOS, 5, 6]
    scheduler = Scheduler(engine.runner)
    state = scheduler.submit(Request(prompt, 12, (0,)), GREEDY)
    prompt[:] = [10**9]
    scheduler.run()
    assert [h.tokens for h in state.hypotheses] == decode_alone(Request([BOS, 5, 6], 12, (0,)), state.spec, engine)


def test_a_stream_ends_with_its_request() -> None:
    engine = engine_of("decoder")
    scheduler = Scheduler(engine.runner)

    def broken(token: int) -> None:
        raise Fault("listener")

    with pytest.raises(Fault):
        list(scheduler.stream(scheduler.submit(VALID._replace(listener=broken), GREEDY)))
    abandoned = scheduler.submit(VALID, GREEDY)
    scheduler.close()
    assert list(scheduler.stream(abandoned)) == [] and abandoned.cancelled
    foreign = Scheduler(engine.runner).submit(VALID, GREEDY)
    with pytest.raises(UserError, match="not submitted to this scheduler"):
        list(scheduler.stream(foreign))


# --- faults -----------------------------------------------------------------------------------------------------------


class Faults:
    """Raises at random while `on`: in callbacks of requests that are `bad`, in model passes, in changes of states."""

    def __init__(self, dice: Random) -> None:
        self.dice, self.on, self.rate = dice, False, 0.0

    def __call__(self, rate: float) -> None:
        if self.on and self.dice.random() < rate:
            if self.dice.random() < 0.2:
                signal.raise_signal(signal.SIGINT)
            raise Fault("injected")

    def wrap(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **options: Any) -> Any:
            late = self.dice.random() < 0.5
            if not late:
                self(self.rate)
            found = act(*args, **options)
            if late:
                self(self.rate)
            return found

        return faulty


class BadStop(Reach):
    def __init__(self, faults: Faults) -> None:
        super().__init__(2)
        self.faults = faults

    def __call__(self, tokens: Any) -> bool:
        self.faults(0.3)
        return False


class BadDraft(PromptLookup):
    def __init__(self, faults: Faults) -> None:
        super().__init__(3)
        self.faults = faults

    def start(self, *args: Any) -> Drafter:
        drafter = super().start(*args)
        drafter.propose = self.faults.wrap(drafter.propose)  # type: ignore[method-assign]
        return drafter


def bad_processor(faults: Faults) -> Callable[..., Any]:
    def processor(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if faults.on and faults.dice.random() < 0.2:
            raise Fault("processor")
        return logits

    return processor


@contextmanager
def interrupt_at_random(dice: Random, most: int) -> Iterator[None]:
    """Ctrl-C at one of the next `most` lines of the engine, wherever that is."""
    left = dice.randrange(1, most)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not any(part in name for part in ("allyouneed/infer", "allyouneed/nn/states", "allyouneed/runtime")):
            return None
        # Python handles signals after calls and at the end of loops, but not between `with` and its body
        if event == "line" and not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def make_request(dice: Random, faults: Faults, key: int, kind: str, bad: bool) -> tuple[Request, Decoding]:
    decoding = dice.choice(DECODINGS).model_copy(
        update={"seed": dice.randrange(3), "max_length": dice.randrange(2, 12), "min_length": 0}
    )
    text = [dice.randrange(3, 23) for _ in range(dice.randrange(14))]
    prompt, source = (
        ([BOS], [*text, EOS]) if kind == "encoder-decoder" else ([BOS, *[7] * dice.choice([0, 9]), *text], None)
    )
    listener = stop = None
    if bad and dice.random() < 0.6:
        listener = faults.wrap(lambda token: faults(0.3))
    elif bad:
        stop = BadStop(faults)
    priority, client = dice.randrange(3), f"client {dice.randrange(3)}"
    request = Request(prompt, decoding.continuation_limit(), (key,), source, stop, listener, priority, client)
    return request, decoding


def soak(
    engine: Engine, scheduler: Scheduler, kind: str, count: int, seed: int, rate: float, interrupts: float
) -> None:
    """`count` random requests, a third of them with callbacks that raise; model passes and changes of states fail with
    probability `rate`; `interrupts`: share of steps with Ctrl-C somewhere inside."""
    dice = Random(seed)
    faults, model = Faults(dice), engine.model
    faults.rate = rate
    drafts = scheduler.blocks is None
    cases: list[tuple[RequestState, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "advance", faults.wrap(model.advance))
        patch.setattr(model, "start", faults.wrap(model.start))
        patch.setattr(model.head, "forward", faults.wrap(model.head.forward))
        for name in ("select", "join", "copy_rows", "repeat_rows"):
            patch.setattr(States, name, faults.wrap(getattr(States, name)))
        clear = scheduler._clear

        def interrupted_clear() -> None:
            if faults.on and dice.random() < 0.1:
                signal.raise_signal(signal.SIGINT)
            clear()
            if faults.on and dice.random() < 0.1:
                signal.raise_signal(signal.SIGINT)

        patch.setattr(scheduler, "_clear", interrupted_clear)
        faults.on = True
        number = 0
        while number < count or any(not state.finished for state, _ in cases[-200:]):
            if number < count:
                bad = dice.random() < 0.33
                request, decoding = make_request(dice, faults, number, kind, bad)
                spec = engine.runner.spec(decoding)
                if bad and dice.random() < 0.2:
                    spec = replace(spec, logits_processor=bad_processor(faults))
                if drafts and decoding.method != "beam" and dice.random() < 0.2:
                    spec = replace(spec, draft=BadDraft(faults))
                cases.append((scheduler.submit(request, spec), bad))
                number += 1
                if dice.random() < 0.5:
                    continue
            try:
                if dice.random() < interrupts:
                    with interrupt_at_random(dice, 900):
                        scheduler.step()
                else:
                    scheduler.step()
            except KeyboardInterrupt:
                pass
            if dice.random() < 0.05:
                dice.choice(cases)[0].cancel()
        faults.on = False
        scheduler.run()
    assert scheduler.idle and not scheduler.active
    assert all(state.finished for state, _ in cases)
    for state, bad in cases:
        assert state.done or state.error is not None or state.cancelled
        assert state.error is None or isinstance(state.error, Fault | KeyboardInterrupt), repr(state.error)
        if not bad and not rate and not interrupts:
            assert state.error is None or state.spec.draft is not None
    answered = [state for state, _ in cases if state.done]
    failed = [state for state, _ in cases if state.error is not None]
    assert len(answered) > 0.1 * count and len(failed) > 0.05 * count, (len(answered), len(failed), count)
    for state in dice.sample(answered, min(len(answered), 60)):
        assert [h.tokens for h in state.hypotheses] == decode_alone(state.request, state.spec, engine)
        assert state.error is not None or state.tokens == state.hypotheses[0].tokens
    if scheduler.blocks is not None:
        assert is_empty(scheduler)


def scheduled(engine: Engine, kind: str = "decoder", **options: Any) -> tuple[Engine, Scheduler, str]:
    return engine, Scheduler(engine.runner, rows=24, **options), kind


SCHEDULERS: dict[str, Callable[[], tuple[Engine, Scheduler, str]]] = {
    "decoder": lambda: scheduled(engine_of("decoder"), budget=24),
    "encoder-decoder": lambda: scheduled(engine_of("encoder-decoder"), "encoder-decoder", budget=24),
    "paged": lambda: scheduled(engine_of("decoder"), budget=24, pool=BlockPool(90, size=4)),
    "exact": lambda: scheduled(Engine(decoder_model(), BOS, EOS, PAD, [PAD, BOS], exact=True)),
    "slots": lambda: scheduled(engine_of("decoder"), budget=24),
}


@pytest.fixture(params=SCHEDULERS)
def subject(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Scheduler, str]:
    if request.param == "slots":  # as on a GPU
        admit_as_on_a_gpu(monkeypatch)
    return SCHEDULERS[request.param]()


RATES = {"callbacks": (0.0, 0.0), "passes": (0.02, 0.0), "interrupts": (0.0, 0.1), "all": (0.01, 0.05)}


@pytest.mark.parametrize("rates", ["callbacks", "all"])
def test_faults_stay_where_they_belong(subject: tuple[Engine, Scheduler, str], rates: str) -> None:
    soak(*subject, 30, 1, *RATES[rates])


@pytest.mark.slow
@pytest.mark.parametrize("rates", RATES)
def test_thousands_of_requests_among_faults(subject: tuple[Engine, Scheduler, str], rates: str) -> None:
    soak(*subject, 400, 2, *RATES[rates])


class Reenters:
    """Calls back into the scheduler, or into the engine, at its second call."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act, self.calls = act, 0

    def __call__(self, *_: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.act()
        return False


class ReentersStop(Reenters):
    reach = 2


@pytest.mark.parametrize("role", ["listener", "stop", "processor"])
@pytest.mark.parametrize("call", ["step", "run", "stream", "close", "warm_up"])
def test_a_callback_that_calls_the_scheduler_fails_alone(
    subject: tuple[Engine, Scheduler, str], call: str, role: str
) -> None:
    engine, scheduler, kind = subject
    prompt, source = ([BOS], [5, 6, EOS]) if kind == "encoder-decoder" else ([BOS, 5, 6], None)
    requests = [Request([*prompt], 9, (n,), source) for n in range(3)]
    spec = engine.runner.spec(GREEDY)
    wanted = decode_alone(requests[0], spec, engine)
    neighbours = [scheduler.submit(one, GREEDY) for one in requests[:2]]
    calls = {"stream": lambda: list(scheduler.stream(neighbours[0]))}
    act = calls.get(call) or getattr(scheduler, call)
    again = ReentersStop(act)
    if role == "processor":

        def processor(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            again()
            return logits

        bad = scheduler.submit(requests[2], replace(spec, logits_processor=processor))
    else:
        bad = scheduler.submit(requests[2]._replace(**{role: again}), GREEDY)
    scheduler.run()
    assert isinstance(bad.error, UserError) and "let it return first" in str(bad.error)
    assert [[h.tokens for h in one.hypotheses] for one in neighbours] == [wanted, wanted]
    assert scheduler.idle


def test_a_listener_may_submit_and_cancel(subject: tuple[Engine, Scheduler, str]) -> None:
    engine, scheduler, kind = subject
    prompt, source = ([BOS], [5, 6, EOS]) if kind == "encoder-decoder" else ([BOS, 5, 6], None)
    request, more = Request(prompt, 9, (0,), source), list[RequestState]()
    other = scheduler.submit(request, GREEDY)

    def listener(token: int) -> None:
        if not more:
            other.cancel()
            more.append(scheduler.submit(request, GREEDY))

    state = scheduler.submit(request._replace(listener=listener), GREEDY)
    scheduler.run()
    wanted = decode_alone(request, engine.runner.spec(GREEDY), engine)
    assert [[h.tokens for h in one.hypotheses] for one in (state, *more)] == [wanted, wanted]
    assert other.cancelled and scheduler.idle


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_a_listener_may_call_the_engine(kind: str) -> None:
    """Each call of an engine has a scheduler of its own."""
    engine = engine_of(kind)
    prompt, source = ([BOS], [5, 6, EOS]) if kind == "encoder-decoder" else ([BOS, 5, 6], None)
    request, spec = Request(prompt, 9, (0,), source), engine.runner.spec(GREEDY)
    wanted, inner = decode_alone(request, spec, engine), list[Any]()
    scheduler = Scheduler(engine.runner)
    listener = Reenters(lambda: inner.append(decode_alone(request, spec, engine)))
    states = [scheduler.submit(one, GREEDY) for one in (request, request._replace(listener=listener))]
    scheduler.run()
    assert [[h.tokens for h in one.hypotheses] for one in states] == [wanted, wanted] and inner == [wanted]


# --- offline ----------------------------------------------------------------------------------------------------------


def offline_calls(engine: Engine, sources: bool, **more: Any) -> list[Callable[[], Any]]:
    texts = [[3 + n, *[5, 9, 4][: n % 4], EOS] for n in range(5)]
    some = DECODINGS[:4:3] + DECODINGS[1:2]
    if sources:
        return [lambda d=d: engine.generate(texts, d, **more) for d in some]
    prompts = [[BOS, *text[:-1]] for text in texts]
    calls: list[Callable[[], Any]] = [lambda d=d: engine.complete(prompts, d, **more) for d in some]
    return [*calls, *(lambda d=d: list(engine.stream(prompts[1], d, **more)) for d in some)]


def check_offline(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is interrupted or gives the answer it gives without faults."""
    sources, dice = kind == "encoder-decoder", Random(3)
    if kind == "slots":
        monkeypatch.setattr(ModelRunner, "captures", True)
        monkeypatch.setattr(GraphRunnerCache, "admits", lambda self, some: self.suits(some[0].spec))
    model = random_model() if sources else decoder_model()
    engine = Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS])
    calls = offline_calls(engine, sources)
    expected, interrupted = [call() for call in calls], 0
    for number in range(count):
        call = number % len(calls)
        try:
            with interrupt_at_random(dice, 4000):
                found = calls[call]()
        except KeyboardInterrupt:
            interrupted += 1
            found = calls[call]()
        assert found == expected[call]
    assert interrupted > 0.2 * count

    def broken(tokens: Any) -> bool:
        raise Fault("stop")

    broken.reach = 1  # type: ignore[attr-defined]
    for call in offline_calls(engine, sources, stop=broken):
        with pytest.raises(Fault):
            call()
    assert calls[0]() == expected[0]


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "slots"])
def test_a_call_after_ctrl_c_is_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_offline(kind, 12, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "slots"])
def test_many_calls_after_ctrl_c_are_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_offline(kind, 400, monkeypatch)
