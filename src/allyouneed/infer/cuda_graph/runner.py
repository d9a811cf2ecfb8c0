"""Decoding in a batch of a fixed shape: each request occupies a slot, and a finished one frees it. On a GPU one step of
all slots, from the newest tokens to the next ones, or a run of steps, is a captured CUDA graph; the host reads the
tokens of one run while the device computes the next (device_search.py).

Prefill reads all prompt tokens but the last, in the plain way or as a captured graph (prefill.py); the first step
begins with the last one.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from allyouneed.infer.cuda_graph.device_beams import DeviceBeamSearch
from allyouneed.infer.cuda_graph.device_search import DeviceIndependentSearch, DeviceSearch
from allyouneed.infer.cuda_graph.prefill import PrefillRunner, capture_warm, captures_on, warm_up
from allyouneed.infer.cuda_graph.refusal import ModelLimits, model_limits, refusal
from allyouneed.infer.cuda_graph.shape import (
    Shape,
    all_addresses,
    needs_stops,
    next_power,
    room,
    rows_in_memory,
    tokens_per_step,
    weight_addresses,
)
from allyouneed.infer.cuda_graph.slot_loader import SlotLoader
from allyouneed.infer.cuda_graph.speculation import DeviceSpeculation
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import DraftModel
from allyouneed.nn.batch import to_device
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import PagedStates
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.multi_token import MultiTokenStep
from allyouneed.runtime.cuda.static_cache import StaticStates

MAX_ROWS = 512  # rows decoded at once
MIN_CAPACITY = 64  # positions of a row
JOIN_STEPS = 4  # of a run while a slot is free
REFILL = 8  # slots are refilled once one of this many is free: prefill stalls the requests that are decoding
KEPT = 4  # shapes whose runners are kept for the next call
WORTH = 64  # tokens an engine decodes before it captures graphs: capturing takes a while


class GraphRunner:
    """`slots` for requests, each with the rows its specification needs. `stops`: stop conditions are checked in
    every step."""

    def __init__(
        self, model: Any, spec: DecodingSpec, slots: int, capacity: int, sources: int, stops: bool = False
    ) -> None:
        self.model = model
        self.states = StaticStates(model, slots, spec.decoding.rows, capacity, sources, tokens_per_step(spec))
        step = DecodeStep if spec.draft is None else MultiTokenStep
        self.search = device_search(spec, self.states, model.config.vocabs.target, stops)
        self.stages = self.search.stages(step(model, self.states))
        self.free = list(range(slots))
        self.steps = 0  # decoded so far
        captures, record = captures_on(self.states.device), self.search.record
        self.host_records = [torch.empty(record.shape, device="cpu", pin_memory=record.is_cuda) for _ in range(2)]
        self.prefill_runner = PrefillRunner(model, self.states, self.search)
        self.slot_loader: SlotLoader | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by number of steps
        self.stage_graphs: list[torch.cuda.CUDAGraph] = []  # where the host runs between them
        with torch.cuda.device_of(record), torch.no_grad():
            rewind = self.search.record_step.zero_  # a record may have room for a single step
            if captures and self.search.waits:
                self.stage_graphs = [capture_warm(stage.run, reset=rewind) for stage in self.stages]
            elif captures:
                self.graphs = {1: capture_warm(self._step, reset=rewind)}
            else:
                warm_up(self._step, reset=rewind)
        self.search.reset()

    def capture_run(self) -> None:
        """Capture a run of steps as one graph, for a runner without requests that is used again: capturing takes longer
        than replaying a step as often as a first call does."""
        if self.graphs and self.search.run_steps not in self.graphs:
            with torch.cuda.device_of(self.search.record), torch.no_grad():
                self.graphs[self.search.run_steps] = capture_warm(self._run, 0, reset=self.search.record_step.zero_)
            self.search.reset()

    def _step(self) -> None:
        for stage in self.stages:
            stage.run()

    def _step_with_host(self) -> None:
        for number, (run, after) in enumerate(self.stages):
            self.stage_graphs[number].replay() if self.stage_graphs else run()
            if after is not None:
                after(self.steps)

    def _run(self) -> None:
        for _ in range(self.search.run_steps):
            self._step()

    def add(self, past: States, requests: Sequence[RequestState], lengths: Sequence[int] | None = None) -> None:
        """Give requests slots, with the first `lengths` tokens of these states (all by default) as their past; they
        continue from the last token of their prompts."""
        self._refresh()
        slots = [self.free.pop() for _ in requests]
        if lengths is not None:
            past.trim(lengths)
        counts = past.lengths
        last = [state.request.prompt[-1] for state in requests]
        numbers = torch.tensor([slots, [state.limit for state in requests], last, list(counts)])
        slot, limit, token, read = to_device(numbers, self.states.device)
        self.states.load(slot, past, read)
        self.search.reset_slots(slot, limit, token)
        self.search.assign(slots, requests, self.steps)

    def add_blocks(self, past: PagedStates, rows: Sequence[int], requests: Sequence[RequestState]) -> None:
        """Give requests slots, with the prompts that these rows have read; they continue from the last token."""
        if self.slot_loader is None or self.slot_loader.pool is not past.pool:
            self.slot_loader = SlotLoader(self.states, self.search, past.pool)
        self._refresh()
        slots = self.free[-len(requests) :][::-1]
        self.slot_loader.load(past, rows, requests, slots)
        del self.free[-len(requests) :]
        self.search.assign(slots, requests, self.steps)

    def prefill(self, requests: Sequence[RequestState]) -> bool:
        """Give requests slots by a captured prefill; False: there is none for this size, use `add`."""
        self._refresh()
        slots = self.free[-len(requests) :][::-1]
        if not self.prefill_runner.run(requests, slots):
            return False
        del self.free[-len(requests) :]
        self.search.assign(slots, requests, self.steps)
        return True

    def _refresh(self) -> None:
        if not self.search.occupied:  # weights do not change while requests are decoded
            self.states.refresh()

    def launch(self, count: int) -> LaunchedSteps:
        """Start `count` steps, and the copy of their tokens to the host."""
        record = self.search.record
        self.search.record_step.zero_()  # write from the start of the record
        self.host_records.reverse()  # the other one may still be read
        with torch.cuda.device_of(record):
            if self.search.waits:
                assert count == 1
                self._step_with_host()
            elif count in self.graphs:
                self.graphs[count].replay()
            else:
                for _ in range(count):
                    self.graphs[1].replay() if self.graphs else self._step()
            self.host_records[0][:count].copy_(record[:count], non_blocking=True)
            self.steps += count
            return LaunchedSteps(self.steps - count, self.host_records[0][:count])

    def collect(self, run: LaunchedSteps) -> None:
        """Wait for a run and hand out its tokens; slots of finished requests are free."""
        run.wait()
        self.free += self.search.process(run.first, run.record.numpy())

    def clear(self) -> None:
        """Drop the requests that are still here."""
        self.free += list(self.search.occupied)
        self.search.release(list(self.search.occupied))


class LaunchedSteps:
    """Steps that were launched: the number of the first, and the record of their tokens."""

    def __init__(self, first: int, record: Tensor) -> None:
        self.first, self.record = first, record
        self.copied: torch.cuda.Event | None = None
        if record.is_pinned():
            self.copied = torch.cuda.Event()
            self.copied.record()

    def wait(self) -> None:
        """Wait until the record is on the host."""
        if self.copied is not None:
            self.copied.synchronize()


class GraphBatch:
    """The requests of one runner: those in its slots, and those `waiting` for one. `cache`: where the runner goes back
    to when the batch is closed. `is_joined`: others join while it is running (`add`), and wait less if runs are short
    while a slot is free."""

    def __init__(
        self,
        runner: GraphRunner,
        model_runner: ModelRunner,
        waiting: Sequence[RequestState] = (),
        cache: GraphRunnerCache | None = None,
        key: Shape | None = None,
        is_joined: bool = False,
    ) -> None:
        self.runner, self.model_runner, self.waiting = runner, model_runner, deque(waiting)
        self.cache, self.key, self.is_joined = cache, key, is_joined
        self.runs: deque[LaunchedSteps] = deque()
        self.is_intact = True  # False while slots change, and for good once that has failed or was interrupted

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.runner.search.occupied)

    @property
    def requests(self) -> list[RequestState]:
        return [*(slot.request for slot in self.runner.search.occupied.values()), *self.waiting]

    def step(self) -> None:
        """Refill free slots, launch a run of steps, and hand out the tokens of the run before."""
        self.is_intact = False
        self._step()
        self.is_intact = True

    def _step(self) -> None:
        while self.waiting and self.wants_refill:
            self.refill()
        runner = self.runner
        if not runner.search.occupied:  # the tokens of the last run belong to no request
            self.runs.clear()
            return
        count = min(runner.search.run_steps, runner.search.steps_left(runner.steps))
        if self.is_joined and runner.search.has_idle_slot(runner.steps):
            count = min(count, JOIN_STEPS)
        if count > 0:
            self.runs.append(runner.launch(count))
        if len(self.runs) > 1 or (self.runs and (count <= 0 or runner.search.waits)):
            runner.collect(self.runs.popleft())

    @property
    def wants_refill(self) -> bool:
        """Whether enough slots are free."""
        runner = self.runner
        return len(runner.free) * REFILL >= runner.states.slot_count or not runner.search.occupied

    def refill(self) -> None:
        """Prefill as many waiting requests as there are free slots, within the token budget."""
        waiting = self.waiting
        taken: list[RequestState] = []
        longest, single = 0, len(waiting[0].request.prompt) == 1
        while waiting and len(taken) < len(self.runner.free):
            request = waiting[0].request
            longest = max(longest, len(request.prompt), len(request.source or ()))
            too_large = (len(taken) + 1) * longest > self.model_runner.budget
            if taken and (too_large or (len(request.prompt) == 1) != single):
                break
            taken.append(waiting.popleft())
        model_runner, requests = self.model_runner, [state.request for state in taken]
        media = model_runner.encode_media(requests)
        if media or model_runner.bidirectional_prompt or not self.runner.prefill(taken):
            states = model_runner.start(requests, model_runner.model)
            if model_runner.bidirectional_prompt:  # the others see the last token, which the first step reads once more
                model_runner.prefill_chunk(states, [request.prompt for request in requests], model_runner.model, media)
                self.runner.add(states, taken, [len(request.prompt) - 1 for request in requests])
                return
            if not single:
                model_runner.prefill_chunk(
                    states, [request.prompt[:-1] for request in requests], model_runner.model, media
                )
            self.runner.add(states, taken)

    def add(self, past: States, rows: Sequence[int], requests: Sequence[RequestState]) -> None:
        """Give requests slots, with the prompts that these rows have read."""
        self.is_intact = False
        if isinstance(past, PagedStates) and SlotLoader.suits(past):
            self.runner.add_blocks(past, rows, requests)
        else:
            own = past.unpaged_rows(rows) if isinstance(past, PagedStates) else past.copy_rows(rows)
            # the first step reads the last prompt token once more and stores it where it was
            self.runner.add(own, requests, [len(state.request.prompt) - 1 for state in requests])
        self.is_intact = True

    def prefill(self, requests: Sequence[RequestState]) -> bool:
        """See `GraphRunner.prefill`."""
        if self.model_runner.bidirectional_prompt:
            return False
        self.is_intact = False
        is_read = self.runner.prefill(requests)
        self.is_intact = True
        return is_read

    def close(self) -> None:
        self.runs.clear()
        self.waiting.clear()
        if self.is_intact:
            self.runner.clear()
            if self.cache is not None and self.key is not None:
                self.cache.keep(self.key, self.runner)


class GraphRunnerCache:
    """Runners of the shapes that were used last; one serves one batch at a time."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner, self.requested = model_runner, 0
        self.refused: str | None = None  # why a capture has failed; there are no others then
        self.refused_drafts: str | None = None  # why one with a draft has; there are others without
        self.known: ModelLimits | None = None  # of the model, inside of `ask_model_once`
        self.weights: int | None = None  # their addresses, inside of `ask_model_once`
        self.limits: tuple[int, ModelLimits] | None = None  # of a model with weights at these addresses
        self.rooms: dict[int, int] = {}
        self.kept: OrderedDict[Shape, GraphRunner] = OrderedDict()

    def admits(self, requests: Sequence[RequestState]) -> bool:
        """Whether these are decoded by graphs: on a GPU, after the first `WORTH` tokens, where `suits` allows it."""
        if not self.model_runner.captures or not self.suits(requests[0].spec, [s.request for s in requests]):
            return False
        self.requested += requests[0].spec.decoding.rows * sum(state.limit for state in requests)
        return self.requested >= WORTH

    def capture_now(self) -> None:
        """Capture for the next requests, however few tokens were asked for."""
        self.requested = max(self.requested, WORTH)

    def release(self, batches: Iterable[Any]) -> None:
        """Close those of these batches that run here."""
        for batch in batches:
            if isinstance(batch, GraphBatch):
                batch.close()

    def suits(self, spec: DecodingSpec, requests: Sequence[Request] = ()) -> bool:
        """Whether model and specification have steps of a fixed shape that do not depend on the host."""
        failed = self.refused or (self.refused_drafts if spec.draft is not None else None)
        return failed is None and refusal(self.model_runner, spec, requests, self.known) is None

    @contextmanager
    def ask_model_once(self) -> Iterator[None]:
        """Inside, the limits of the model and the addresses of its weights are known. Looking for them takes as long as
        some steps; for limits, it is done again only when weights have been replaced."""
        if self.model_runner.captures:
            self.weights = weight_addresses(self.model_runner.model)
            if self.limits is None or self.limits[0] != self.weights:
                self.limits = self.weights, model_limits(self.model_runner.model)
            self.known = self.limits[1]
        try:
            yield
        finally:
            self.known = self.weights = None

    def addresses(self, spec: DecodingSpec) -> int:
        """See `all_addresses`."""
        if self.weights is None or isinstance(spec.draft, DraftModel):
            return all_addresses(self.model_runner.model, spec)
        return self.weights

    def captured_batch(self, requests: Sequence[RequestState]) -> GraphBatch | None:
        """A batch for these requests of one specification, largest first; None: their steps cannot be captured."""
        try:
            return self.batch(requests)
        except Exception as error:
            self.refuse(error, requests[0].spec)
            return None

    def runner(self, key: Shape) -> GraphRunner:
        """The cached runner, or a new one."""
        if (kept := self.kept.pop(key, None)) is None:
            return self.make(key)
        kept.capture_run()
        return kept

    def make(self, key: Shape) -> GraphRunner:
        return GraphRunner(self.model_runner.model, key.kind, key.slots, key.capacity, key.sources, key.stops)

    def refuse(self, error: Exception, spec: DecodingSpec) -> None:
        """Note that a capture has failed: a part waits for the host, or a kernel does not compile here."""
        reason = f"{type(error).__name__}: {error}"
        if spec.draft is None:
            self.refused = reason
        else:
            self.refused_drafts = reason
        what = "decoding" if spec.draft is None else "speculative decoding"
        warnings.warn(f"{what} without CUDA graphs, since capturing one failed: {reason}", stacklevel=2)

    def drop_stale(self, key: Shape) -> None:
        for stale in [shape for shape in list(self.kept) if shape.weights != key.weights]:
            self.kept.pop(stale, None)

    def batch(self, requests: Sequence[RequestState]) -> GraphBatch:
        """As `captured_batch`, or an error; no other batch uses its runner meanwhile."""
        key = self.shape(requests)
        self.drop_stale(key)
        return GraphBatch(self.runner(key), self.model_runner, requests, self, key)

    def decode_prefilled(self, states: States, requests: Sequence[RequestState]) -> bool:
        """Decode requests of one specification to their ends; `states` have read their whole prompts, a row each, as
        those of encoded sounds. False: graphs do not suit them, and nothing has changed."""
        if not self.admits(requests):
            return False
        key = self.shape(requests, 0 if states.memory is None else states.memory.hidden.shape[1])
        if key.slots < len(requests):
            return False
        self.drop_stale(key)
        try:
            runner = self.runner(key)
        except Exception as error:
            self.refuse(error, key.kind)
            return False
        batch = GraphBatch(runner, self.model_runner, cache=self, key=key)
        batch.add(states, range(len(requests)), requests)
        while batch.active:
            batch.step()
        batch.close()
        for state in requests:
            if state.error is not None:
                raise state.error
        return True

    def shape(self, requests: Sequence[RequestState], source: int = 0) -> Shape:
        """`source`: positions of the sources, where the requests do not have them."""
        spec = requests[0].spec
        tokens = tokens_per_step(spec)
        rows = spec.decoding.rows * tokens  # of a slot
        longest = max([len(state.request.prompt) for state in requests]) + max([state.limit for state in requests])
        source = max([source, *(len(state.request.source or ()) for state in requests)])
        sources = next_power(source, MIN_CAPACITY // 2) if source else 0
        slots = min(next_power(len(requests), 1), max(1, MAX_ROWS // rows))
        capacity = self.capacity(longest + tokens - 1, spec, slots)
        stops = any([needs_stops(state) for state in requests])
        found = Shape(spec.device_key, slots, capacity, sources, self.addresses(spec), stops)
        if found in self.kept:
            return found
        if (fits := rows_in_memory(self.model_runner.model, capacity) // rows) < slots:  # there is none to spare
            found = found._replace(capacity=next_power(longest + tokens - 1, MIN_CAPACITY))
            fits = rows_in_memory(self.model_runner.model, found.capacity) // rows
        return found._replace(slots=min(slots, max(1, fits)))

    def capacity(self, tokens: int, spec: DecodingSpec, slots: int) -> int:
        """Positions of a row, for so many tokens: some to spare, unless steps would take longer."""
        least, options = next_power(tokens, MIN_CAPACITY), spec.decoding
        if options.rows > 1 or options.has_penalties or spec.draft is not None or spec.logits_processor is not None:
            return least
        limits = self.known or model_limits(self.model_runner.model)
        return max(least, self.room(slots)) if limits.spares else least

    def room(self, rows: int) -> int:
        """See `shape.room`, which takes longer than looking it up."""
        if rows not in self.rooms:
            self.rooms[rows] = room(self.model_runner.model, rows)
        return self.rooms[rows]

    def keep(self, shape: Shape, runner: GraphRunner) -> None:
        self.kept[shape] = runner
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)


def device_search(spec: DecodingSpec, states: StaticStates, vocab: int, stops: bool) -> DeviceSearch:
    if spec.draft is not None:
        return DeviceSpeculation(spec, states, vocab)
    beams = spec.decoding.method == "beam" and spec.decoding.beam > 1
    return (DeviceBeamSearch if beams else DeviceIndependentSearch)(spec, states, vocab, stops)
