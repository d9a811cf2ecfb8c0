"""Rows that a model reads together: one States, and a search for each way in which their answers are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, Search, StopCondition
from allyouneed.infer.decoding.beam import BeamSearch
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.sample import IndependentSearch
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


class Decoder(Protocol):
    """What decoding asks of a model."""

    head: Any  # hidden states -> logits

    def start(self, source: Any) -> States:
        """`source`: what to read first; or how many texts to write, for a model that reads nothing."""

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class Job:
    """What to decode together, all in one way: the model's states after it has read all that is given, and how long
    each answer may get. `room`: so many tokens of a row the model can place. The others: see `DecodingSpec` and `RequestState`."""

    model: Decoder
    states: States
    last: Tensor  # hidden states of the last token of each prompt (sources, width)
    limits: list[int]
    names: list[tuple[int, ...]]  # what makes each source's samples its own
    decoding: Decoding
    eos: int
    forbidden: Sequence[int]
    given: Sequence[Sequence[int]] | None = None
    stops: StopCondition | None = None
    ends: Sequence[int] = ()
    counted: int = 0
    ended: bool = False
    rules: Callable[[Tensor, Tensor], Tensor] | None = None
    room: int | None = None


def search(job: Job) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, best first."""
    way = DecodingSpec(job.decoding, job.eos, tuple(job.forbidden), tuple(job.ends), job.counted, job.ended, job.rules)
    given = job.given or [() for _ in job.limits]
    asked = [
        RequestState(limit, name, prompt, job.decoding.seed, job.stops)
        for limit, name, prompt in zip(job.limits, job.names, given, strict=True)
    ]
    crew = RunningBatch(job.model, job.states, [(way, asked)], job.room)
    crew.choose(job.last)
    while crew.searches:
        crew.read()
    return [one.hypotheses for one in asked]


def searching(way: DecodingSpec, asked: Sequence[RequestState], device: torch.device) -> Search:
    beams = way.decoding.method == "beam" and way.decoding.beam > 1
    return BeamSearch(way, asked, device) if beams else IndependentSearch(way, asked, device)


class RunningBatch:
    """`asked`: who stands where in the states, way by way, all with as many rows each (`group`), of which there is only
    one before they `choose` the first time. `room`: so many tokens of a row the model can place."""

    def __init__(
        self,
        model: Decoder,
        states: States,
        asked: Sequence[tuple[DecodingSpec, Sequence[RequestState]]],
        room: int | None = None,
    ) -> None:
        self.model, self.states, self.room = model, states, room
        self.searches = [searching(way, some, states.device) for way, some in asked]
        self.rows: list[list[int]] = []  # of each search, among those of the states
        for one in self.searches:
            begin = sum(map(len, self.rows))
            self.rows.append(list(range(begin, begin + len(one.requests))))
        (self.group,) = {one.group for one in self.searches}

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def read(self) -> None:
        """The model reads what was just said, and more is said."""
        newest = self.searches[0].last_tokens
        if len(self.searches) > 1:
            newest = torch.empty(len(self), dtype=torch.long, device=self.states.device)
            for one, rows in zip(self.searches, self.rows, strict=True):
                newest[rows] = one.last_tokens
        self.choose(self.model.advance(Rows(newest[:, None]), self.states)[:, -1])

    def choose(self, last: Tensor) -> None:
        """Say the next token after these hidden states (rows, width). Who is done, leaves."""
        logits: Tensor = self.model.head(last).float()
        tight = self.room is not None and max(self.states.lengths) >= self.room
        if self.searches[0].fresh and self.group > 1:
            self.states.repeat_rows(self.group)
            fanned = [[row * self.group + line for row in rows for line in range(self.group)] for rows in self.rows]
        else:
            fanned = self.rows
        orders = [
            one.step(logits if len(self.searches) == 1 else logits[rows], tight)
            for one, rows in zip(self.searches, self.rows, strict=True)
        ]
        self.rows = fanned
        if any(order is not None for order in orders):
            self.rearrange(orders)

    def rearrange(self, orders: Sequence[list[int] | None]) -> None:
        """Row i of a search goes on with the past of its row `order[i]`. Nothing moves when nothing changes."""
        moved: list[int] = []
        placed: list[tuple[Search, list[int]]] = []
        for one, rows, order in zip(self.searches, self.rows, orders, strict=True):
            past = rows if order is None else [rows[row] for row in order]
            if past:
                placed.append((one, list(range(len(moved), len(moved) + len(past)))))
                moved += past
        self.searches, self.rows = [one for one, _ in placed], [rows for _, rows in placed]
        if not moved:
            self.states.close()
        elif moved != list(range(len(self.states.lengths))):
            self.states.select(moved)

    def leave(self) -> None:
        """Rows that need not go on leave now."""
        orders = [one.drop_finished(True) for one in self.searches]
        if any(order is not None for order in orders):
            self.rearrange(orders)

    def part(self, asked: RequestState) -> RunningBatch:
        """One who asks goes on alone."""
        number = next(n for n, one in enumerate(self.searches) if asked in one.requests)
        search, rows = self.searches[number], self.rows[number]
        place, new = search.requests.index(asked), copy(self)
        own = slice(place * search.group, (place + 1) * search.group)
        new.searches, new.states = [search.copy_requests([place])], self.states.copy_rows(rows[own])
        new.rows = [list(range(search.group))]
        orders: list[list[int] | None] = [None] * len(self.searches)
        orders[number] = search.keep_requests([n for n in range(len(search.requests)) if n != place])
        self.rearrange(orders)
        return new

    def join(self, other: RunningBatch) -> None:
        """Go on together with others who have chosen their first token."""
        begin = len(self.states.lengths)
        self.states.join(other.states)
        kinds = {one.batch_key: place for place, one in enumerate(self.searches)}
        for one, rows in zip(other.searches, other.rows, strict=True):
            here = [begin + row for row in rows]
            if one.batch_key in kinds:
                self.searches[kinds[one.batch_key]].join(one)
                self.rows[kinds[one.batch_key]] += here
            else:
                self.searches.append(one)
                self.rows.append(here)
