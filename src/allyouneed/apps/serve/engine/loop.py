"""The engine loop: one thread per model that does all its computing. Requests of all clients share its steps.

Each turn is a step of the scheduler (infer/scheduler.py) and a round of forward-pass tasks (forward.py). Routes submit
from the event loop and get their tokens there, delivered once per step (delivery.py); predictors that decode
(`translate_full`, …) run in threads of their own, and `decode` submits for them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from allyouneed.apps.serve.engine.delivery import Delivery
from allyouneed.apps.serve.engine.forward import CHUNK, ForwardJob, ForwardQueue, current_client, fault_of_the_model
from allyouneed.apps.serve.engine.places import refusal
from allyouneed.apps.serve.errors import ApiError, internal_error, log, log_failure
from allyouneed.apps.serve.metrics import BlockTotals, Metrics
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.rules import NonFiniteError
from allyouneed.infer.engine import Progress
from allyouneed.infer.predictors.base import TokenCount, token_count
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.scheduling.admission import MANY_CLIENTS

CALL_SEQUENCES = 256  # of a call of a predictor that run or wait at once; a longer text waits for its own
CALL_INPUTS = 32  # of a forward pass
MANY = 8  # answers that end together: their clients are likely to ask again together
PAUSE, LONGEST_WAIT = 2e-3, 20e-3  # seconds: the next requests are waited for until none has come for, or as long as


class CallCancelled(Exception):
    """The client of a call disconnected."""


@dataclass(eq=False)
class ThreadCall:
    """A call of a predictor in a thread: whose it is, and whether it was cancelled. `exact`: in exact mode."""

    client: str = ""
    exact: bool = False
    cancelled: bool = False
    states: list[RequestState] = field(default_factory=list)

    def cancel(self) -> None:
        self.cancelled = True
        for state in list(self.states):
            state.cancel()


current_call: ContextVar[ThreadCall | None] = ContextVar("current_call", default=None)
Wanted = tuple[Request, DecodingSpec]  # a sequence to decode
OnEnd = Callable[[RequestState], None]


class EngineLoop:
    """`build(exact)`: a scheduler, in exact mode or not. `queue`: the most sequences that run or wait. Tokens are
    delivered to `event_loop`."""

    def __init__(
        self,
        name: str,
        build: Callable[[bool], Scheduler],
        queue: int,
        metrics: Metrics,
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name, self.build, self.metrics, self.queue = name, build, metrics, queue
        self.counters = metrics.of_model(name)
        self.schedulers: dict[bool, Scheduler] = {}
        self.states: dict[bool, list[RequestState]] = {}  # submitted and not ended
        self.held = Counter[str]()  # how many of them each client has
        self.block_totals: BlockTotals = (0, 0, 0)  # that the metrics have
        self.forward = ForwardQueue()
        self.tokens = TokenCount()  # of forward passes, not yet in the metrics
        self.busy_since: float | None = None  # when the current step began; of an ended loop, when it ended
        self.ended_together = 0  # answers that ended in the last step, after which none was left
        self.calls: deque[ForwardJob] = deque()
        self.changed = threading.Condition()
        self.stopping = False
        self.delivery = Delivery(event_loop)
        self.thread = threading.Thread(target=self._run, name=f"engine loop of {name}", daemon=True)
        self.thread.start()

    # --- called by any thread ----------------------------------------------------------------------------------------

    def submit(self, wanted: Sequence[Wanted], exact: bool = False, on_end: OnEnd | None = None) -> list[RequestState]:
        """All of them, or none if one is refused. Those with the same prompt are prefilled once. `on_end` is called in
        the loop's thread when one is done, cancelled or has failed."""
        (found,) = self.submit_each([(wanted, exact, on_end)])
        if isinstance(found, Exception):
            raise found
        return found

    def submit_each(
        self, requests: Sequence[tuple[Sequence[Wanted], bool, OnEnd | None]]
    ) -> list[list[RequestState] | Exception]:
        """`submit` for each of these requests, which have arrived together: their states, or why one is refused. The
        loop's thread waits for this one only once, and not while requests are prepared."""
        now, tokens = time.monotonic(), 0
        found, prepared = list[list[RequestState] | Exception](), list[list[RequestState] | Exception]()
        for wanted, exact, on_end in requests:
            mine = list[RequestState]()
            try:
                scheduler = self._scheduler(exact)
                for request, spec in wanted:
                    mine.append(state := scheduler.prepare(request, spec))
                    state.submitted, state.on_end = now, on_end
                prepared.append(mine)
            except Exception as error:
                prepared.append(error)
        with self.changed:
            for states, (_, exact, _) in zip(prepared, requests, strict=True):
                if states and not isinstance(states, Exception):
                    client, closed = states[0].request.client, self._closed()
                    states = closed or refusal(self.queue, self.held, client, len(states), "sequences") or states
                found.append(states)
                if isinstance(states, Exception):
                    continue
                self.schedulers[exact].enqueue(states)
                self.states[exact] += states
                for state in states:
                    self.held[state.request.client] += 1
                    tokens += len(state.request.source or ()) + len(state.request.prompt)
            self.changed.notify()
        self.counters.prompt_tokens.inc(tokens)
        return found

    def decode(
        self, requests: Sequence[Request], spec: DecodingSpec, on_progress: Progress | None = None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each request; blocks until all are finished. `Engine.decode` calls it in a server."""
        call = current_call.get() or ThreadCall()
        if not requests:
            return []
        ended, lock, left = threading.Event(), threading.Lock(), len(requests)
        room = threading.Semaphore(min(CALL_SEQUENCES, self.queue))

        def on_end(state: RequestState) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left or state.error is not None:
                    ended.set()
            room.release()

        states: list[RequestState] = []
        call.states = states
        try:
            for request in requests:
                room.acquire()
                while not (call.cancelled or ended.is_set()):
                    try:
                        states += self.submit([(request._replace(client=call.client), spec)], call.exact, on_end)
                        break
                    except ApiError as refused:
                        if refused.status != 429 or len(states) + left == len(requests):  # none of its own is left
                            raise
                        room.acquire()  # until one of them has ended
                if call.cancelled or ended.is_set():
                    break
            if not call.cancelled:
                ended.wait()
        finally:
            for state in states:
                state.cancel()  # no effect on those that are done
        if error := next((state.error for state in states if state.error is not None), None):
            raise error
        if call.cancelled or len(states) < len(requests) or not all(state.done for state in states):
            raise CallCancelled
        return [state.hypotheses for state in states]

    def compute_now(
        self, key: Hashable, inputs: Sequence[Any], compute: Callable[[list[Any]], Sequence[Any]]
    ) -> list[Any]:
        """`compute`, for a call of a predictor: blocks until the outputs are there."""
        call, found = current_call.get() or ThreadCall(), list[Any]()
        chunk = 1 if call.exact else CALL_INPUTS
        for at in range(0, len(inputs), CALL_SEQUENCES):
            if call.cancelled:
                raise CallCancelled
            found += self.compute((key, chunk), inputs[at : at + CALL_SEQUENCES], compute, chunk).result()
        return found

    def compute(
        self, key: Hashable, inputs: Sequence[Any], compute: Callable[[list[Any]], Sequence[Any]], chunk: int = CHUNK
    ) -> Any:
        """A future of one output per input. `compute` runs in the loop's thread, on the inputs of all jobs with this
        key that are waiting, `chunk` at most at once."""
        job = ForwardJob(key, inputs, compute, chunk, current_client.get())
        if not inputs:
            job.future.set_result([])
            return job.future
        with self.changed:
            self._check_open()
            if refused := refusal(self.queue, self.forward.sizes(), job.client, len(inputs), "inputs"):
                raise refused
            self.forward.add(job)
            self.changed.notify()
        return job.future

    def run(self, function: Callable[[], Any]) -> Any:
        """A future of a function that uses the model; it runs in the loop's thread, between steps."""
        job = ForwardJob(None, [None], lambda _: [function()])
        with self.changed:
            self._check_open()
            self.calls.append(job)
            self.changed.notify()
        return job.future

    def warm_up(self, requests: Sequence[tuple[Request, DecodingSpec]]) -> Any:
        """A future of the end of `Scheduler.warm_up`. To be called before the first request."""
        return self.run(lambda: self._scheduler(False).warm_up(requests))

    def wake(self) -> None:
        with self.changed:
            self.changed.notify()

    def stop(self) -> None:
        """End the thread; requests that are not finished fail."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        self.thread.join()

    @property
    def sequences(self) -> int:
        """Running or waiting."""
        return self.held.total()

    def _check_open(self) -> None:
        if closed := self._closed():
            raise closed

    def _closed(self) -> ApiError | None:
        return self._stopped() if self.stopping or not self.thread.is_alive() else None

    def _stopped(self) -> ApiError:
        why = "is being unloaded" if self.stopping else "has stopped computing"
        return ApiError(f"the model {self.name} {why}; try again", 503, retry_after=1)

    def _scheduler(self, exact: bool) -> Scheduler:
        if (found := self.schedulers.get(exact)) is not None:
            return found
        with self.changed:
            self._check_open()
            if exact not in self.schedulers:
                self.states[exact] = []
                self.schedulers[exact] = self.build(exact)
            return self.schedulers[exact]

    # --- the thread --------------------------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        if any(self.states.values()) or self.forward.jobs or self.calls:
            return True
        return any(not scheduler.idle for scheduler in self.schedulers.values())

    def _run(self) -> None:
        token_count.set(self.tokens)
        try:
            while True:
                with self.changed:
                    while not self._has_work and not self.stopping:
                        self.busy_since = None
                        self.changed.wait()
                    if self.stopping:
                        break
                    if self.ended_together >= MANY:
                        self._gather()
                    self.ended_together = 0
                    schedulers = list(self.schedulers.items())
                try:
                    self._turn(schedulers)
                except Exception as error:  # outside of the steps and passes, whose errors concern their requests
                    log_failure(error, f"the engine loop of {self.name} failed")
                    self._fail_everything(internal_error())
        finally:
            self.busy_since = None if self.stopping else time.monotonic()
            self._fail_everything(self._stopped())
            self.schedulers.clear()

    def _turn(self, schedulers: Sequence[tuple[bool, Scheduler]]) -> None:
        for exact, scheduler in schedulers:
            self.busy_since = time.monotonic()
            if not self.states[exact] and scheduler.idle:
                continue
            try:
                scheduler.step()
            except Exception as error:
                log_failure(error, f"a step of {self.name} failed")
                self._fail_all(exact, error)
                scheduler.close()
                continue
            self._report(exact, scheduler)
        if self.calls:
            self.busy_since = time.monotonic()
            job = self.calls.popleft()
            self.forward.compute([job], [job.inputs])
        if self.forward.jobs:
            self.busy_since = time.monotonic()
            self.forward.run_round()
            self._count_forward()
        self.delivery.deliver()

    def _count_forward(self) -> None:
        tokens = self.tokens
        self.counters.prompt_tokens.inc(tokens.read)
        self.counters.generated_tokens.inc(tokens.generated)
        tokens.read = tokens.generated = 0

    def _gather(self) -> None:
        """Many answers have ended, and the first of the next requests has come: wait a moment for the others, so that
        their prompts are read together, not a few first while the rest waits for them."""
        now = time.monotonic()
        end, pause = now + LONGEST_WAIT, now + PAUSE
        while self.sequences < self.ended_together and not self.stopping and now < min(end, pause):
            before = self.sequences
            self.changed.wait(min(end, pause) - now)  # may end for other reasons than a request
            now = time.monotonic()
            if self.sequences > before:
                pause = now + PAUSE
                prompts = sum(len(s.request.prompt) for one in self.schedulers.values() for s in list(one.arrivals))
                if prompts >= max(one.budget for one in self.schedulers.values()):
                    break

    def _report(self, exact: bool, scheduler: Scheduler) -> None:
        """Tell whose requests have ended, and update the metrics."""
        now = time.monotonic()
        with self.changed:
            left, ended = list[RequestState](), list[RequestState]()
            for state in self.states[exact]:
                if state.tokens and not state.first_token:
                    state.first_token = now
                    self.counters.first_token.observe(now - state.submitted)
                if state.done or state.cancelled:
                    ended.append(state)
                    self.held[state.request.client] -= 1
                else:
                    left.append(state)
            self.states[exact] = left
            if len(self.held) > len(left) + MANY_CLIENTS:
                self.held = +self.held  # those who have some
            sequences, waiting = self.held.total(), 0
            self.ended_together = 0 if sequences else len(ended)
            for one in self.schedulers.values():
                waiting += one.waiting
        self.counters.running.set(max(0, sequences - waiting))
        self.counters.waiting.set(waiting)
        if scheduler.blocks is not None:
            self.block_totals = self.metrics.report_blocks(self.name, scheduler, self.block_totals)
        if ended:
            self._count(ended, now)
        for state in ended:
            if isinstance(state.error, NonFiniteError):
                log.error("a request of %s failed: %s", self.name, state.error)
                state.error = fault_of_the_model(state.error)
        for state in ended:
            if state.on_end is not None:
                state.on_end(state)

    def _count(self, states: Sequence[RequestState], now: float) -> None:
        counters, generated, reasons = self.counters, 0, Counter[str]()
        for state in states:
            tokens = 0 if state.done else len(state.tokens)
            for hypothesis in state.hypotheses if state.done else ():
                tokens += len(hypothesis.tokens)
            generated += tokens
            ended = "stop" if state.done and state.hypotheses[0].finished else "length"
            reasons["error" if state.error else ended if state.done else "abort"] += 1
            counters.latency.observe(now - state.submitted)
            if tokens > 1 and state.first_token:
                counters.token.observe((now - state.first_token) / (tokens - 1))
        counters.generated_tokens.inc(generated)
        for reason, count in reasons.items():
            counters.finished(reason).inc(count)

    def _fail_all(self, exact: bool, error: BaseException) -> None:
        with self.changed:
            states, self.states[exact] = self.states[exact], []
            self.held.subtract(state.request.client for state in states)
        for state in states:
            state.error = error
            state.cancel()
            if state.on_end is not None:
                state.on_end(state)

    def _fail_everything(self, error: ApiError) -> None:
        for exact, scheduler in self.schedulers.items():
            self._fail_all(exact, error)
            scheduler.close()
        self.forward.close(error)
        while self.calls:
            self.calls.popleft().fail(error)
        self.delivery.deliver()
