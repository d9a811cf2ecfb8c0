"""Continuous batching: requests of any length join and leave the running batches at every step.

A step decodes one token of every running row and, beside it, prefills new requests with at most `budget` tokens
(scheduling/chunked_prefill.py), so that a long prompt does not stall the others. Where many rows decode in captured
graphs, the prefill of a few may be postponed (scheduling/admission.py `Postponement`).

Offline (`LargestFirst`), a batch of similar sizes is admitted whenever the one before has finished, and prompts are
read whole; on a GPU one graph runner takes all requests (cuda_graph/runner.py).

Requests are isolated from each other. What is wrong with one is refused when it is submitted (validation.py). A
listener or stop condition that raises fails its own request. A model pass that raises fails the requests of that pass:
their states may be half changed. A step that is interrupted (Ctrl-C) fails all requests that have been admitted; those
that are waiting are not affected. Whatever fails, its blocks are free again, and the next step continues with the rest.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.prefill import PrefillBatch, share_rows
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import ActiveBatch, RunningBatch
from allyouneed.infer.scheduling.admission import FairQueue, LargestFirst, Postponement
from allyouneed.infer.scheduling.chunked_prefill import ChunkedPrefill
from allyouneed.infer.validation import RequestValidator
from allyouneed.nn.states.paged import BlockPool
from allyouneed.runtime.process import evaluation_mode, inference

if TYPE_CHECKING:
    from allyouneed.infer.block_manager import BlockManager
    from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
    from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
    from allyouneed.infer.cuda_graph.scheduler_slots import SchedulerSlots
    from allyouneed.infer.scheduling.preemption import Preemption


def new_graphs(runner: ModelRunner) -> GraphRunnerCache | None:
    """A cache of captured CUDA graphs for this engine; None on a CPU, which loads nothing of them."""
    if not runner.captures:
        return None
    from allyouneed.infer.cuda_graph.runner import GraphRunnerCache

    return GraphRunnerCache(runner)


class Scheduler:
    """`rows`: the most rows decoded at once, beams counted. `budget`: prompt tokens read in one step. `memory`: the
    most bytes of state, as the config declares them. `pool`: blocks for paged states, of this scheduler alone; when
    they run out, the least urgent request is preempted and resumed later. `queue`: `LargestFirst` for offline use; the
    bounds above do not apply to it. `graphs`, `validator`: of the engine, to share; with a `pool` and `graphs`, prompts
    are read into blocks, and requests that graphs suit leave them for a slot.

    One thread calls `step`; any thread may `submit` and cancel, also a listener while it is called.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: int = 64,
        budget: int = 512,
        memory: int | None = None,
        pool: BlockPool | None = None,
        queue: LargestFirst | None = None,
        graphs: GraphRunnerCache | None = None,
        validator: RequestValidator | None = None,
    ) -> None:
        if rows < 1 or budget < 1:
            raise UserError(f"rows={rows}, budget={budget}: both must be at least 1")
        if runner.exact and pool is not None:
            raise UserError("exact and pool are exclusive: requests with a common prefix share its blocks; set one")
        self.runner, self.rows, self.budget, self.memory = runner, rows, budget, memory
        self.arrivals: deque[RequestState] = deque()
        self.fair, self.offline, self.postponement = FairQueue(), queue, Postponement()
        self.streams_offline = False  # whether the offline batch has requests that stream
        self.running: list[ActiveBatch] = []
        self.preempted: list[RunningBatch] = []  # batches of one request each that wait for blocks
        self.preemptions = 0  # so far
        self.active: list[RequestState] = []  # admitted requests that hold rows or blocks
        self.failures: list[RequestState] = []  # in this step
        self.is_stepping = False  # also between steps if the last one was interrupted
        self.validator = validator or RequestValidator(runner)
        self.steps, self._numbers = 0, count()
        self.blocks: BlockManager | None = None
        self.preemption: Preemption | None = None
        if pool is not None:
            from allyouneed.infer.block_manager import BlockManager
            from allyouneed.infer.scheduling.preemption import Preemption

            self.blocks = BlockManager(runner, pool)
            self.preemption = Preemption(self, self.blocks)
        # calls a function; where blocks run out, frees some
        self.with_blocks: Callable[..., None] = lambda act, _=None: act()
        if self.preemption is not None:
            self.with_blocks = self.preemption.run
        self.graphs: GraphRunnerCache | None = None
        if memory is None and not runner.exact:
            self.graphs = graphs or (new_graphs(runner) if pool is None else None)
        self.slots: SchedulerSlots | None = None
        captured: PagedPrefill | None = None
        if self.graphs is not None and queue is None:
            from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
            from allyouneed.infer.cuda_graph.scheduler_slots import SchedulerSlots

            self.slots = SchedulerSlots(self.graphs, rows)
            if pool is not None and not runner.bidirectional_prompt and runner.retrieve is None:
                captured = PagedPrefill(runner, pool, rows)
        self.prefill = ChunkedPrefill(self, runner, queue is not None, self.blocks, self.slots, captured)

    # --- submitting --------------------------------------------------------------------------------------------------

    def submit(self, request: Request, spec: DecodingSpec | Decoding | None = None) -> RequestState:
        """Queue a request. Its state is done when all its tokens are decoded, or at once if its source is empty."""
        (state,) = self.submit_all([(request, spec)])
        return state

    def submit_all(self, requests: Iterable[tuple[Request, DecodingSpec | Decoding | None]]) -> list[RequestState]:
        """Queue requests together, or none if one is refused. Those with equal sources and prompts are prefilled once
        if there is room for them in the same step."""
        states = [self.prepare(request, spec) for request, spec in requests]
        self.enqueue(states)
        return states

    def enqueue(self, states: Iterable[RequestState]) -> None:
        """Queue requests that `prepare` has accepted."""
        self.arrivals.extend([state for state in states if not state.done])

    def prepare(self, request: Request, spec: DecodingSpec | Decoding | None) -> RequestState:
        """A request that is valid and fits into this scheduler; else an error."""
        spec, request = self.validator.spec(spec), self.validator.request(request)
        shortlist = self.runner.shortlist
        if shortlist is not None and request.source and request.allowed is None and spec.decoding.shortlist:
            request = request._replace(allowed=shortlist.allowed(request.source))
        streams = self.offline is None or request.listener is not None
        limit, source = self.runner.token_limit(request), None if request.source is None else tuple(request.source)
        state = RequestState(request, spec, limit, streams, failures=self.failures, number=next(self._numbers))
        state.inputs = tuple(request.prompt_with_media() if request.media else request.prompt), source
        if source == ():
            state.hypotheses, state.done = [Hypothesis([], 0.0, 0.0, [], True)], True
            return state
        self._check(state)
        state.arrived = self.steps
        return state

    def _check(self, state: RequestState) -> None:
        """Whether a request fits into this scheduler."""
        if state.spec.draft is not None and self.blocks is not None:
            raise UserError("draft and pool are exclusive: speculative decoding does not use paged states; set one")
        if self.offline is not None:
            return
        if (rows := state.spec.rows) > self.rows:
            raise UserError(f"the request needs {rows} rows (beam, best), the scheduler has {self.rows}; ask for fewer")
        if self.memory is not None and (needed := self._bytes([state])) > self.memory:
            raise UserError(f"the request needs {needed:,} bytes of state, the limit is {self.memory:,}; shorten it")
        if self.blocks is not None and (needed := self.blocks.measure(state)) > (most := self.blocks.pool.blocks):
            raise UserError(f"the request needs {needed} blocks of state, the pool has {most}; shorten it")

    def _bytes(self, states: Sequence[RequestState]) -> int:
        """Declared bytes of state they may need together; every row has positions for the longest."""
        model = self.runner.model
        length = max(len(state.request.prompt) + state.limit for state in states)
        source = max(len(state.request.source or ()) for state in states)
        cost = model.config.cost(max(length, source))
        each = cost.state_bytes(length, next(model.parameters()).itemsize)
        return round(each * sum(state.spec.rows for state in states))

    def warm_up(self, requests: Iterable[tuple[Request, DecodingSpec | Decoding | None]] = ()) -> None:
        """Prepare for the first request: capture the usual prefills, and decode these requests, which leave no trace
        but captured graphs and compiled kernels."""
        if self.prefill.captured is not None:
            with inference(self.runner.model):
                self.prefill.captured.warm_up(self.budget)
        if self.graphs is not None:
            self.graphs.capture_now()
        self.submit_all(requests)
        self.run()
        if self.blocks is not None:
            self.blocks.prefixes.clear()
            self.blocks.prefixes.prompt_tokens = self.blocks.prefixes.hits = 0

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        if self.running or self.prefill.batches or self.arrivals or self.fair.waiting or self.preempted or self.offline:
            return False
        if self.is_stepping:  # interrupted: the next step cleans up
            return False
        return self.slots is None or not self.slots.active

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted yet, offline ones not counted."""
        return len(self.arrivals) + sum(map(len, self.fair.waiting.values()))

    def run(self, on_step: Callable[[], None] | None = None) -> None:
        """Step until every request is finished. A failed one has its `error`; offline, where all belong to one call,
        the first is raised."""
        with evaluation_mode(self.runner.model):
            while not self.idle:
                self.step()
                if on_step is not None:
                    on_step()

    def stream(self, state: RequestState) -> Iterator[int]:
        """The tokens of one request as they are decoded; the other requests advance with it. Raises its error if it
        fails."""
        sent = 0
        while True:
            new = state.tokens[sent:]
            yield from new
            sent += len(new)
            if state.finished and sent == len(state.tokens):
                if state.error is not None:
                    raise state.error
                return
            if not new:
                if self.idle:
                    raise UserError("the request was not submitted to this scheduler, or was submitted before `close`")
                self.step()

    def step(self) -> None:
        if self.is_stepping:
            self._refuse_inside_step()
        with inference(self.runner.model):
            if self.is_stepping:  # the last step was interrupted, and so was cleaning up after it
                self._abandon(KeyboardInterrupt())
            self.is_stepping = True
            try:
                if self.offline is None:
                    if self.arrivals or self.fair.waiting or self.preempted:
                        self._admit()
                elif not self.running:
                    self._admit_batch(self.offline)
                for batch in list(self.running):
                    try:
                        self.with_blocks(batch.step, batch)
                    except Exception as error:
                        self.drop(batch, error)
                    self.end(batch)
                if self.prefill.batches:
                    self.prefill.step()
                if self.slots is not None and self.slots.batches:
                    self.slots.step(self.fail)  # after the prefill: the run it launches includes the new requests
                if self.blocks is not None:
                    self.blocks.end_step()
                self.steps += 1
                if self.active:
                    self._settle()
                self.is_stepping = False
            except BaseException as error:
                had_requests = bool(self.active)
                self._abandon(error)
                if not isinstance(error, Exception) or not had_requests:
                    raise
            if self.failures:
                self._after_failures()

    def _refuse_inside_step(self) -> None:
        """Refuse what a listener, a stop condition or a logits processor must not do: the batches are half changed."""
        caller: FrameType | None = sys._getframe(2)
        while caller is not None:
            if caller.f_code is Scheduler.step.__code__ and caller.f_locals["self"] is self:
                raise UserError(
                    "a listener, a stop condition or a logits processor has called step, run, stream or close of the "
                    "scheduler that is calling it; let it return first (it may submit and cancel requests)"
                )
            caller = caller.f_back

    def end(self, batch: ActiveBatch) -> None:
        """Remove a batch whose requests have all left."""
        if batch in self.running and not batch.active:
            batch.close()
            self.running.remove(batch)

    def _settle(self) -> None:
        """Stream the best hypothesis of finished beam searches; release what requests without rows have reserved."""
        if self.offline is not None and self.running and not self.failures and not self.streams_offline:
            return  # they are admitted and leave together
        for state in self.active:
            if state.done or state.cancelled:
                break
        else:
            return
        here = self._held()
        for state in self.active:
            if state.done and state.streams and state.spec.rows > 1:
                self._stream_best(state)
            if state.reserved and state not in here and self.blocks is not None:
                self.blocks.release(state)
        self.active = [state for state in self.active if state in here]

    def _stream_best(self, state: RequestState) -> None:
        for best in state.hypotheses[:1]:
            for token in best.tokens[len(state.tokens) :]:
                state.emit(token)

    def _held(self) -> set[RequestState]:
        """Requests in any batch."""
        here = set[RequestState]() if self.slots is None else set(self.slots.requests)
        batches: list[ActiveBatch | PrefillBatch] = [*self.running, *self.preempted, *self.prefill.batches]
        for batch in batches:
            here.update(batch.requests)
        return here

    def close(self) -> None:
        """Abandon everything: unfinished requests are cancelled, blocks go back to the pool, slots are free again."""
        if self.is_stepping:
            self._refuse_inside_step()
        waiting = [*self.arrivals, *self.fair, *([] if self.offline is None else self.offline.waiting)]
        for state in [*waiting, *self.active]:
            state.cancel()
        self.arrivals.clear()
        self.fair, self.offline = FairQueue(), None if self.offline is None else LargestFirst(self.offline.budget)
        self._clear()

    # --- failures ----------------------------------------------------------------------------------------------------

    def fail(self, requests: Iterable[RequestState], error: Exception) -> None:
        """Mark these requests as failed; their blocks are freed at the end of the step."""
        for state in requests:
            if not state.finished:
                state.fail(error)

    def drop(self, batch: ActiveBatch, error: Exception) -> None:
        """A running batch has failed: its states may be half changed, and so are not used or closed any more."""
        self.running.remove(batch)
        here = self._held()
        self.fail([state for state in self.active if state not in here], error)

    def _abandon(self, error: BaseException) -> None:
        """A step was interrupted, or failed where no batch alone is affected: all admitted requests have failed."""
        for state in self.active:
            if not state.finished:
                state.fail(error)
            elif state.done and state.streams:
                self._stream_best(state)
        self._clear()
        if not isinstance(error, Exception):
            self.failures.clear()  # it is raised now

    def _clear(self) -> None:
        """Forget all running requests."""
        if self.graphs is not None:
            self.graphs.release(self.running)
        if self.slots is not None:
            self.slots.close()
        self.running, self.prefill.batches = [], []
        self.preempted = []
        if self.blocks is not None:
            for state in self.active:
                state.reserved = []
            if self.is_stepping:
                self.blocks.prefixes.forget()  # may be half changed, too
            self.blocks.unverified = {}
            self.blocks.recount((), ())
        self.active, self.is_stepping = [], False

    def _after_failures(self) -> None:
        """Free the blocks of failed requests, the cached ones too. Interrupts are raised; offline, the first error."""
        failed = list(self.failures)
        self.failures.clear()
        if self.blocks is not None:
            for state in failed if self.blocks.shares_prefixes else ():  # nothing of them stays cached
                self.blocks.prefixes.drop(state.inputs[0])
            held = [batch.states for batch in [*self.running, *self.preempted] if isinstance(batch, RunningBatch)]
            self.blocks.recount([*held, *(batch.states for batch in self.prefill.batches)], self.active)
        for state in failed:
            if state.error is not None and (self.offline is not None or not isinstance(state.error, Exception)):
                raise state.error

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit_batch(self, queue: LargestFirst) -> None:
        """Offline: the next batch, now that nothing is running."""
        queue.add(self.arrivals)
        queue.drop_admitted()
        if not queue:
            return
        graphs, captured = self.graphs, None
        if graphs is not None and graphs.admits(queue.waiting):
            captured = graphs.captured_batch(queue.waiting[::-1])
        batch = queue.waiting[::-1] if captured else queue.next_batch(most=1 if self.runner.exact else None)
        self.active = self.active + batch
        self.streams_offline = any([state.streams for state in batch])
        for state in batch:
            state.admitted = True
        queue.drop_admitted()
        if captured is not None:
            self.running.append(captured)
        else:
            self.prefill.start(batch)

    def _admit(self) -> None:
        """Admit requests in order while there is room; a large one is not overtaken by a smaller one."""
        queue, blocks = self.fair, self.blocks
        if self.preempted and self.preemption is not None:
            self.preemption.resume()
        if self.arrivals:
            if not queue.waiting:
                self.postponement.steps = 0
            queue.add(self.arrivals, self.active)
        if not queue.waiting:
            return
        taken, urgency = list[RequestState](), partial(queue.urgency, step=self.steps)
        rows, tokens, free, slots = sum([state.spec.rows for state in self.active]), 0, 0, self.slots
        if slots and slots.batches and self.postponement.applies(queue, slots.rows_in_use, self.rows - rows):
            return
        if blocks is not None:
            free = blocks.free(one for batch in self.prefill.batches for one in batch.unread_tokens())
        known: set[Any] = set()  # what is read once for several of them
        while (state := queue.peek(self.steps)) is not None:
            if self.preempted and urgency(self.preempted[0].requests[0]) < urgency(state):
                break
            size, key = len(state.request.source or state.request.prompt), state.inputs
            unread = 0 if key in known else len(state.request.prompt)
            rows, tokens = rows + state.spec.rows, tokens + (0 if key in known else size)
            full = rows > self.rows or (self.memory is not None and self._bytes([*self.active, state]) > self.memory)
            if blocks is not None:
                free -= state.unpaged + blocks.soon(state, unread)
                full = full or (free < 0 and bool(self.active))
            if full or (taken and key not in known and tokens > self.budget):
                break
            known.add(key)
            self.active.append(state)
            state.admitted = True
            queue.pop(state, size + state.limit)
            if state.unpaged and blocks is not None:
                blocks.reserve(state)
            taken.append(state)
        if taken:
            self.postponement.steps = 0
        if taken and self.slots is not None and blocks is None:
            given, taken = taken, []
            try:
                taken = self.slots.prefill(given)
            except Exception as error:
                self.fail_unheld(given, error)
        for some in share_rows(taken) if self.runner.exact else [taken] if taken else []:
            self.prefill.start(some)

    def fail_unheld(self, requests: list[RequestState], error: Exception) -> None:
        """Fail the requests that no batch has taken over."""
        here = self._held()
        self.fail([state for state in requests if state not in here], error)

    def waste(self) -> float:
        """The share of the blocks in use that holds nothing."""
        assert self.blocks is not None
        running = [batch.states for batch in self.running if isinstance(batch, RunningBatch)]
        return self.blocks.waste(running + [batch.states for batch in self.prefill.batches])

    # --- running batches ---------------------------------------------------------------------------------------------

    def join(self, batch: RunningBatch) -> None:
        """Decode a batch together with a running one, or beside it."""
        for other in [] if self.runner.exact else self.running:
            if isinstance(other, RunningBatch) and other.can_join(batch):
                try:
                    other.join(batch)
                except Exception as error:  # neither can be used any more
                    self.fail(batch.requests, error)
                    self.drop(other, error)
                return
        self.running.append(batch)
