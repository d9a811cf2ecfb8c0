"""Seats (runner.py) for those whom a scheduler has read: one batch of a fixed shape for each way of decoding and size,
made when the first one comes and kept. A step of the scheduler is then a run of steps here."""

from __future__ import annotations

from collections import deque
from typing import Any

from allyouneed.infer.cuda_graph.device_search import RUN_STEPS
from allyouneed.infer.cuda_graph.runner import SMALLEST, GraphRunner, Run, bucket, room
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.request import PrefillBatch


class SchedulerSlots:
    """`rows`: so many are written at once in each batch, whoever waits for them sees to it that there are no more."""

    def __init__(self, engine: Any, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.batches: dict[tuple[Any, ...], GraphRunner] = {}
        self.runs: dict[tuple[Any, ...], deque[Run]] = {}

    @property
    def asked(self) -> set[RequestState]:
        """Those who are here."""
        return {sitter.request for seats in self.batches.values() for sitter in seats.saying.occupied.values()}

    def sit(self, reading: PrefillBatch, some: list[int]) -> list[int]:
        """Of those who have been read, these take seats, but for the ones that come back: seats do not suit them, or
        there are none left."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        others = []
        for n in some:
            ticket = reading.tickets[n]
            if self.engine.room.open([ticket.request], ticket.decoding, ticket.asked.stops):
                request, way = ticket.request, self.engine.way(ticket.decoding)
                places = bucket(len(request.prompt) + ticket.asked.limit, SMALLEST)
                sources = bucket(len(request.source), SMALLEST // 2) if request.source is not None else 0
                groups.setdefault((way.batch_key, places, sources), []).append(n)
            else:
                others.append(n)
        for key, numbers in groups.items():
            if key not in self.batches:
                kind, places, sources = key
                most = min(self.rows, room(self.engine.model, places))
                count = max(1, most // kind.decoding.rows)
                self.batches[key] = GraphRunner(self.engine.model, kind, count, places, sources)
                self.runs[key] = deque()
            free = len(self.batches[key].free)
            numbers, others = numbers[:free], others + numbers[free:]
            if not numbers:
                continue
            tickets = [reading.tickets[n] for n in numbers]
            prompts = [ticket.request.prompt for ticket in tickets]
            # a step begins with the last token of a prompt: it is read once more, and stored where it was
            read = [len(prompt) - 1 for prompt in prompts]
            seen = reading.states.copy_rows(numbers)
            self.batches[key].sit(seen, [ticket.asked for ticket in tickets], [prompt[-1] for prompt in prompts], read)
        return others

    def step(self) -> None:
        """A run of steps in every batch, and what was said in the run before."""
        for key, seats in self.batches.items():
            runs = self.runs[key]
            if not seats.saying.occupied:  # nobody listens to what is still on its way
                runs.clear()
                continue
            count = min(RUN_STEPS, seats.saying.steps_left(seats.now))
            if count > 0:
                runs.append(seats.go(count))
            if len(runs) > 1 or count <= 0:
                seats.hear(runs.popleft())
