"""Graph runners (runner.py) for requests that a scheduler has prefilled: one batch of a fixed shape for each
specification and size, made for its first request and kept. A scheduler step is then a run of steps here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allyouneed.infer.cuda_graph.runner import (
    MIN_CAPACITY,
    GraphBatch,
    GraphRunnerCache,
    Shape,
    next_power,
    rows_in_memory,
    weight_addresses,
)
from allyouneed.infer.decoding.base import RequestState
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import PagedStates


class SchedulerSlots:
    """`rows`: the most rows of a batch; the scheduler admits no more requests than that."""

    def __init__(self, graphs: GraphRunnerCache, rows: int) -> None:
        self.graphs, self.engine, self.rows = graphs, graphs.engine, rows
        self.batches: dict[Shape, GraphBatch] = {}

    @property
    def active(self) -> bool:
        return any(batch.active for batch in self.batches.values())

    @property
    def requests(self) -> list[RequestState]:
        return [state for batch in self.batches.values() for state in batch.requests]

    def add(self, states: States, requests: Sequence[tuple[int, RequestState]]) -> list[tuple[int, RequestState]]:
        """Move prefilled requests, with their rows in the states, into slots; returns those that need the plain path:
        graphs do not suit them, or no slot is free."""
        groups: dict[Shape, list[tuple[int, RequestState]]] = {}
        plain, weights = [], None
        with self.graphs.ask_model_once():
            for row, state in requests:
                if self.graphs.admits([state]):
                    weights = weights or weight_addresses(self.engine.model)
                    groups.setdefault(self._shape(state, weights), []).append((row, state))
                else:
                    plain.append((row, state))
        for shape, some in groups.items():
            if shape not in self.batches:
                self.batches = {old: b for old, b in self.batches.items() if b.active or old.weights == weights}
                slots = rows_in_memory(self.engine.model, shape.capacity) // shape.kind.decoding.rows
                if not slots:
                    plain += some
                    continue
                count = min(shape.slots, slots)
                try:
                    runner = self.graphs.make(shape._replace(slots=count), self.graphs.compile == "on")
                except Exception as error:
                    self.graphs.refuse(error)
                    plain += some
                    continue
                self.batches[shape] = GraphBatch(runner, self.engine, is_joined=True)
            free = len(self.batches[shape].runner.free)
            some, plain = some[:free], plain + some[free:]
            if some:
                chosen = [state for _, state in some]
                # the first step reads the last prompt token once more and stores it where it was
                lengths = [len(state.request.prompt) - 1 for state in chosen]
                rows = [row for row, _ in some]
                past = states.unpaged_rows(rows) if isinstance(states, PagedStates) else states.copy_rows(rows)
                self.batches[shape].add(past, chosen, lengths)
        return plain

    def _shape(self, state: RequestState, weights: int) -> Shape:
        request, kind = state.request, state.spec.device_key
        capacity = next_power(len(request.prompt) + state.limit, MIN_CAPACITY)
        sources = next_power(len(request.source), MIN_CAPACITY // 2) if request.source is not None else 0
        slots = max(1, self.rows // kind.decoding.rows)
        return Shape(kind, slots, capacity, sources, weights)

    def step(self, fail: Callable[[Sequence[RequestState], Exception], None]) -> None:
        """Of every batch; `fail` gets the requests of one that has failed."""
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
