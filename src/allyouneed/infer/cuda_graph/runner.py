"""Decoding in a batch of a fixed shape: those who ask take seats, and whoever is done gives the seat to the next. On a
GPU one step of all seats, from the newest tokens to the next ones, or a run of them, is a CUDA graph; the host
listens to one run of steps while the device is busy with the next (device_search.py).

A prompt is read as it always is (`advance`), or as prefill.py does it, but for its last token: with that one the step
begins.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.infer.cuda_graph.device_search import RUN_STEPS, device_search
from allyouneed.infer.cuda_graph.prefill import PrefillRunner, rehearsed
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, StopCondition
from allyouneed.infer.decoding.options import Decoding
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States
from allyouneed.runtime.cuda.capture import can_capture
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.graphs import pause_gc
from allyouneed.runtime.cuda.static_cache import StaticStates

ROWS = 512  # at most so many are written at once
SMALLEST = 64  # places of a row
ENOUGH = 8  # seats are filled when one in so many is free: reading a prompt stalls those who write
KEPT = 4  # so many shapes are kept ready for the next call
WORTH = 128  # tokens an engine is asked for before it gets seats: the first ones take a while to make


class GraphRunner:
    """`seats` for those who ask, each with as many rows as their way needs."""

    def __init__(self, model: Any, way: DecodingSpec, seats: int, capacity: int, sources: int) -> None:
        self.model = model
        self.states = StaticStates(model.decoder, seats, way.decoding.rows, capacity, sources)
        self.step, self.saying = (
            DecodeStep(model, self.states),
            device_search(way, self.states, model.config.vocabs.target),
        )
        self.free = list(range(seats))
        self.now = 0  # steps made so far
        cuda = self.states.device.type == "cuda"
        record = self.saying.record
        self.heard = [torch.empty(record.shape, device="cpu", pin_memory=cuda) for _ in range(2)]
        self.intake = PrefillRunner(model, self.states, self.saying)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by how many steps they make
        if cuda:
            with torch.cuda.device_of(record):
                self.graphs = {1: rehearsed(self._step), RUN_STEPS: rehearsed(self._run, tries=0)}
            self.states.device_lengths.zero_()  # what was said to try it out is forgotten
            self.saying.record_step.zero_()

    def _step(self) -> None:
        self.saying.step(self.step(self.saying.last_tokens))

    def _run(self) -> None:
        for _ in range(RUN_STEPS):
            self._step()

    def sit(
        self, seen: States, asked: Sequence[RequestState], last: Sequence[int], lengths: Sequence[int] | None = None
    ) -> None:
        """These go on from their `last` tokens, after so many of what has been `seen` (all of it)."""
        seats = [self.free.pop() for _ in asked]
        counts = seen.lengths if lengths is None else lengths
        numbers = torch.tensor([seats, [one.limit for one in asked], list(last), list(counts)]).to(self.states.device)
        chairs, limits, lasts, read = numbers
        self.states.load(self.model.decoder, chairs, seen, read)
        self.saying.reset_slots(chairs, limits, lasts)
        self.saying.assign(seats, asked, self.now)

    def take(self, requests: Sequence[Any], asked: Sequence[RequestState]) -> bool:
        """These have been read and go on from there; False: somebody else has to read them (`sit`)."""
        seats = self.free[-len(asked) :][::-1]
        if not self.intake.take(requests, [one.limit for one in asked], seats):
            return False
        del self.free[-len(asked) :]
        self.saying.assign(seats, asked, self.now)
        return True

    def go(self, count: int) -> Run:
        """So many steps, and what is said in them on its way to the host."""
        record = self.saying.record
        self.saying.record_step.zero_()  # the record begins anew
        self.heard.reverse()  # the other one may still be read
        with torch.cuda.device_of(record):
            if count in self.graphs:
                self.graphs[count].replay()
            else:
                for _ in range(count):
                    self.graphs[1].replay() if self.graphs else self._step()
            self.heard[0][:count].copy_(record[:count], non_blocking=True)
            self.now += count
            return Run(self.now - count, self.heard[0][:count])

    def hear(self, run: Run) -> None:
        """Whoever is over leaves the seat."""
        if run.arrived is not None:
            run.arrived.synchronize()
        self.free += self.saying.process(run.first, run.record.numpy())

    def clear(self) -> None:
        """Nobody waits for those who are still here."""
        self.free += list(self.saying.occupied)
        self.saying.release(list(self.saying.occupied))


class Run:
    def __init__(self, first: int, record: Tensor) -> None:
        self.first, self.record = first, record
        self.arrived: torch.cuda.Event | None = None
        if record.is_pinned():
            self.arrived = torch.cuda.Event()
            self.arrived.record()


class GraphRunnerCache:
    """Seats of the shapes that were asked for last, for all who ask an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked = engine, 0
        self.kept: OrderedDict[Shape, GraphRunner] = OrderedDict()

    def open(self, requests: Sequence[Any], decoding: Decoding, stops: StopCondition | None = None) -> bool:
        """Whether these are written in seats: on a GPU, when enough has been asked for, where nothing in the model or
        in what is asked for needs the plain path."""
        if next(self.engine.model.parameters()).device.type != "cuda" or not self.suits(decoding, stops):
            return False
        self.asked += sum(self.engine.most(request) * decoding.rows for request in requests if request is not None)
        return self.asked >= WORTH

    def suits(self, decoding: Decoding, stops: StopCondition | None = None) -> bool:
        engine, beams = self.engine, decoding.method == "beam" and decoding.beam > 1
        if decoding.repetition_penalty != 1 or decoding.no_repeat is not None or (beams and stops is not None):
            return False
        return not engine.seen_whole and engine.search is None and can_capture(engine.model)

    @torch.inference_mode()
    def answer(
        self,
        requests: Sequence[Any],
        found: list[list[Hypothesis]],
        decoding: Decoding,
        stops: StopCondition | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Put into `found` what each request gets; of one that is None, nothing."""
        engine = self.engine
        order = [number for number, request in enumerate(requests) if request is not None]
        order.sort(key=lambda number: -requests[number].size)
        asked = [
            (request, RequestState(engine.most(request), request.place, request.prompt, decoding.seed, stops))
            for request in (requests[number] for number in order)
        ]
        done = nothing = len(requests) - len(order)
        with pause_gc():
            for _ in self.rounds(engine.way(decoding), asked):
                if on_progress is None:
                    continue
                now = nothing + sum(one.done for _, one in asked)
                if now > done:
                    on_progress(now, len(requests))
                done = now
        for number, (_, one) in zip(order, asked, strict=True):
            found[number] = one.hypotheses

    def rounds(self, way: DecodingSpec, asked: Sequence[tuple[Any, RequestState]]) -> Iterator[None]:
        """Requests, the largest first, and those who ask for them: all are answered when this is over. A round ends
        whenever more has been heard."""
        if not asked:
            return
        key = self.shape(way, [request for request, _ in asked], max(one.limit for _, one in asked))
        # nobody else finds them while they are in use
        seats = self.kept.pop(key, None) or self.made(way, key)
        waiting, running = deque(asked), deque[Run]()
        try:
            while waiting or seats.saying.occupied:
                while waiting and (len(seats.free) * ENOUGH >= seats.states.slot_count or not seats.saying.occupied):
                    self.fill(seats, waiting)
                count = min(RUN_STEPS, seats.saying.steps_left(seats.now))
                if count > 0:
                    running.append(seats.go(count))
                if len(running) > 1 or (running and count <= 0):
                    seats.hear(running.popleft())
                    yield
        finally:
            seats.clear()
            self.kept[key] = seats
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)

    def fill(self, seats: GraphRunner, waiting: deque[tuple[Any, RequestState]]) -> None:
        """As many as there are seats and as are read together."""
        taken: list[tuple[Any, RequestState]] = []
        longest, short = 0, len(waiting[0][0].prompt) == 1
        while waiting and len(taken) < len(seats.free):
            request = waiting[0][0]
            longest = max(longest, len(request.prompt), len(request.source or ()))
            if taken and ((len(taken) + 1) * longest > self.engine.budget or (len(request.prompt) == 1) != short):
                break
            taken.append(waiting.popleft())
        requests, asked = [request for request, _ in taken], [one for _, one in taken]
        if not seats.take(requests, asked):
            seats.sit(self.read(requests, short), asked, [request.prompt[-1] for request in requests])

    def read(self, requests: Sequence[Any], short: bool) -> States:
        """All but the last token of each prompt; `short`: there is no other."""
        engine = self.engine
        device = next(engine.model.parameters()).device
        sources = [request.source for request in requests if request.source is not None]
        states: States = engine.model.start(Rows.of(sources, engine.pad).to(device) if sources else len(requests))
        if not short:
            rows = Rows.of([request.prompt[:-1] for request in requests], engine.pad)
            engine.model.advance(rows.to(device), states, last=True)
        return states

    def shape(self, way: DecodingSpec, requests: Sequence[Any], limit: int) -> Shape:
        """Of a batch for these."""
        model, group = self.engine.model, way.decoding.rows
        capacity = bucket(max(len(request.prompt) for request in requests) + limit, SMALLEST)
        source = max(len(request.source or ()) for request in requests)
        most = max(1, min(ROWS // group, room(model, capacity) // group))
        count = min(bucket(len(requests), 1), most)
        return Shape(way.batch_key, count, capacity, bucket(source, SMALLEST // 2) if source else 0, whereabouts(model))

    def made(self, way: DecodingSpec, shape: Shape) -> GraphRunner:
        return GraphRunner(self.engine.model, way, shape.seats, shape.capacity, shape.sources)


class Shape(NamedTuple):
    """What seats are made for: a way of decoding, so many who ask, so many places of each row and of a source, and
    weights that lie where they lie."""

    kind: DecodingSpec
    seats: int
    capacity: int
    sources: int
    weights: int


def whereabouts(model: Any) -> int:
    """Of all its weights: graphs remember where they lay. (`model.parameters()` takes a millisecond.)"""
    found: list[int] = []
    modules = [model]
    while modules:
        module = modules.pop()
        for weight in module._parameters.values():
            if weight is not None:
                found.append(weight.data_ptr())
        modules += [inside for inside in module._modules.values() if inside is not None]
    return hash(tuple(found))


def bucket(size: int, least: int) -> int:
    """The next power of two: few shapes serve all sizes."""
    return max(least, 1 << (size - 1).bit_length())


def room(model: Any, capacity: int) -> int:
    """So many rows of so many places the memory of the device has room for; half of it is left alone."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return ROWS
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) // 2 // max(1, StaticStates.bytes_per_token(model.decoder) * capacity)
