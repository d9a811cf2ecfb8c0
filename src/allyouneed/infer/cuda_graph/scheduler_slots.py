"""Graph runners (runner.py) for the requests of a scheduler: one batch of a fixed shape for each specification and
size, made for its first request and kept. A scheduler step is then a run of steps here. Prompts come from the blocks of
a pool (slot_loader.py), are read straight into slots (prefill.py), or copied from other states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allyouneed.infer.cuda_graph.runner import MIN_CAPACITY, GraphBatch, GraphRunnerCache
from allyouneed.infer.cuda_graph.shape import (
    Shape,
    all_addresses,
    needs_stops,
    next_power,
    rows_in_memory,
    tokens_per_step,
)
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.speculative.drafts import Draft
from allyouneed.nn.states.base import States


class SchedulerSlots:
    """`rows`: the most rows of a batch; the scheduler admits no more requests than that."""

    def __init__(self, graphs: GraphRunnerCache, rows: int) -> None:
        self.graphs, self.model_runner, self.rows = graphs, graphs.model_runner, rows
        self.batches: dict[Shape, GraphBatch] = {}

    @property
    def active(self) -> bool:
        return any(batch.active for batch in self.batches.values())

    @property
    def rows_in_use(self) -> int:
        """Rows of the requests in slots."""
        return sum(len(batch.runner.search.occupied) * batch.runner.states.group for batch in self.batches.values())

    @property
    def requests(self) -> list[RequestState]:
        return [state for batch in self.batches.values() for state in batch.requests]

    def add(self, states: States, requests: Sequence[tuple[int, RequestState]]) -> list[tuple[int, RequestState]]:
        """Move prefilled requests, with their rows in the states, into slots; returns those that need the plain path:
        graphs do not suit them, or no slot is free."""
        rows = {state: row for row, state in requests}
        groups, plain = self._group([state for _, state in requests])
        for batch, some in groups:
            batch.add(states, [rows[state] for state in some], some)
        return [(rows[state], state) for state in plain]

    def prefill(self, requests: Sequence[RequestState]) -> list[RequestState]:
        """Read the sources and prompts of requests straight into slots, as captured graphs; returns those that need
        the plain prefill."""
        groups, plain = self._group([state for state in requests if not state.request.media])
        for batch, some in groups:
            plain += [] if batch.prefill(some) else some
        return plain + [state for state in requests if state.request.media]

    def _group(
        self, requests: Sequence[RequestState]
    ) -> tuple[list[tuple[GraphBatch, list[RequestState]]], list[RequestState]]:
        """The batches that have slots for requests, made if need be; and the requests that graphs do not suit, or for
        which no slot is free."""
        # specifications by identity, which requests of one call share: comparing them takes longer than all the rest
        alike: dict[tuple[int, int, int, bool], list[RequestState]] = {}
        plain, weights = list[RequestState](), dict[Draft | None, int]()
        with self.graphs.ask_model_once():
            for state in requests:
                if self.graphs.admits([state]):
                    alike.setdefault((id(state.spec), *self._sizes(state), needs_stops(state)), []).append(state)
                else:
                    plain.append(state)
        groups: dict[Shape, list[RequestState]] = {}
        for some in alike.values():
            spec = some[0].spec
            if spec.draft not in weights:
                weights[spec.draft] = all_addresses(self.model_runner.model, spec)
            groups.setdefault(self._shape(some[0], weights[spec.draft]), []).extend(some)
        found = []
        for shape, some in groups.items():
            if shape not in self.batches and not self._make(shape):
                plain += some
                continue
            batch = self.batches[shape]
            free = len(batch.runner.free)
            plain += some[free:]
            if free:
                found.append((batch, some[:free]))
        return found, plain

    def _make(self, shape: Shape) -> bool:
        """False: there is no memory for it, or it cannot be captured."""
        self.batches = {old: b for old, b in self.batches.items() if b.active or old.weights == shape.weights}
        slots = rows_in_memory(self.model_runner.model, shape.capacity) // shape.kind.decoding.rows
        if not slots:
            return False
        count = min(shape.slots, slots)
        try:
            runner = self.graphs.make(shape._replace(slots=count))
            runner.capture_run()
        except Exception as error:
            self.graphs.refuse(error, shape.kind)
            return False
        self.batches[shape] = GraphBatch(runner, self.model_runner, is_joined=True)
        return True

    def _shape(self, state: RequestState, weights: int) -> Shape:
        kind, (capacity, sources) = state.spec.device_key, self._sizes(state)
        return Shape(kind, self._slots(state), capacity, sources, weights, needs_stops(state))

    def _slots(self, state: RequestState) -> int:
        return max(1, self.rows // state.spec.decoding.rows)

    def _sizes(self, state: RequestState) -> tuple[int, int]:
        """Positions of a row and of a source."""
        request, spec = state.request, state.spec
        tokens = len(request.prompt) + state.limit + tokens_per_step(spec) - 1
        sources = next_power(len(request.source), MIN_CAPACITY // 2) if request.source is not None else 0
        return self.graphs.capacity(tokens, spec, self._slots(state)), sources

    def step(self, fail: Callable[[Sequence[RequestState], Exception], None]) -> None:
        """Run a step of every batch; `fail` gets the requests of a batch that has failed."""
        for shape in [shape for shape, batch in self.batches.items() if batch.active]:
            batch = self.batches[shape]
            try:
                batch.step()
            except Exception as error:
                del self.batches[shape]
                fail(batch.requests, error)

    def close(self) -> None:
        for batch in self.batches.values():
            batch.close()
        self.batches = {shape: batch for shape, batch in self.batches.items() if batch.is_intact}
