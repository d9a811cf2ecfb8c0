"""Continuous batching: requests of unequal lengths join and leave at every step, each in its own way of decoding.

A step is one pass of the model over every row that is being written, and, beside it, a pass over new requests that is
no larger than the budget: sources are encoded together, prompts are read piece after piece, so that a long one never
stalls the others. Whoever has been read chooses its first token at once and joins those who write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.infer.crew import Crew
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.engine import Engine, Request
from allyouneed.infer.search import Asked, Hypothesis, Stops, Way
from allyouneed.nn.batch import Rows
from allyouneed.nn.state import States

PATIENCE = 64  # steps: who has waited so long counts as one more urgent


@dataclass(eq=False)
class Ticket:
    """What became of a request. `tokens`: those it has heard so far; of a beam search all of the best, at its end.
    `answer`: the hypotheses, best first, once it is `done`. `error`: what its own listener raised."""

    request: Request
    decoding: Decoding
    priority: int
    client: str
    number: int
    asked: Asked
    listener: Callable[[int], None] | None = None
    tokens: list[int] = field(default_factory=list)
    answer: list[Hypothesis] | None = None
    error: Exception | None = None
    since: int = 0  # the step in which it came

    @property
    def done(self) -> bool:
        return self.answer is not None or self.asked.gone

    @property
    def cancelled(self) -> bool:
        return self.asked.gone

    def cancel(self) -> None:
        """Nobody waits for it any more. What has been said stays in `tokens`; of one that is done, everything."""
        if not self.asked.done:
            self.asked.gone = True

    def hear(self, token: int) -> None:
        """A listener that fails loses its own request and nobody else's."""
        if self.error is not None:
            return
        self.tokens.append(token)
        if self.listener is not None:
            try:
                self.listener(token)
            except Exception as error:
                self.error = error
                self.cancel()


@dataclass(eq=False)
class Reading:
    """Requests whose prompts are being read: how many tokens of each have been."""

    states: States
    tickets: list[Ticket]
    read: list[int]


class Scheduler:
    """`rows`: so many are written at once, beams counted. `budget`: tokens read of new requests in one step. `memory`:
    bytes that the states may need in all, as their config declares; None: as many as it takes.

    One thread makes the steps; any thread may `submit` and `cancel`.
    """

    def __init__(self, engine: Engine, rows: int = 64, budget: int = 512, memory: int | None = None) -> None:
        if rows < 1 or budget < 1:
            raise UserError(f"rows={rows}, budget={budget}: both must be at least 1")
        self.engine, self.rows, self.budget, self.memory = engine, rows, budget, memory
        self.arrivals: deque[Ticket] = deque()
        self.waiting: dict[tuple[int, str], deque[Ticket]] = {}  # by priority and client, first come first
        self.readings: list[Reading] = []
        self.crews: list[Crew] = []
        self.held: list[Ticket] = []  # those who are read or written
        self.served: dict[str, int] = {}  # tokens read and granted so far, by client
        self.steps, self._numbers = 0, count()

    # --- asking ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        decoding: Decoding | None = None,
        *,
        stops: Stops | None = None,
        priority: int = 0,
        client: str = "",
        listener: Callable[[int], None] | None = None,
    ) -> Ticket:
        """Higher `priority` first; among equals the `client` who has been given least, then who came first.
        `listener` is told each token as it is said."""
        decoding = decoding or Decoding()
        asked = Asked(self._limit(request), request.place, request.prompt, decoding.seed, stops)
        ticket = Ticket(request, decoding, priority, client, next(self._numbers), asked, listener)
        asked.hear = ticket.hear
        if request.source is not None and not len(request.source):
            ticket.answer = [Hypothesis([], 0.0, 0.0, [], True)]  # nothing in, nothing out
            return ticket
        self._check(ticket)
        ticket.since = self.steps
        self.arrivals.append(ticket)
        return ticket

    def _limit(self, request: Request) -> int:
        places = self.engine.limit  # the last token is never read back, so it needs no place
        return request.limit if places is None else max(1, min(request.limit, places + 1 - len(request.prompt)))

    def _check(self, ticket: Ticket) -> None:
        request, places = ticket.request, self.engine.limit
        if not request.prompt:
            raise UserError("a prompt of no tokens: begin it with the begin mark")
        if places is not None and len(request.prompt) > places:
            raise UserError(f"a prompt of {len(request.prompt)} tokens, the model has places for {places}; shorten it")
        if ticket.decoding.rows > self.rows:
            raise UserError(
                f"{ticket.decoding.rows} rows for one request (beam, best), there are {self.rows}; ask for fewer"
            )
        if self.memory is not None and (needs := self._needs([ticket])) > self.memory:
            raise UserError(f"a request that needs {needs:,} bytes of state, there are {self.memory:,}; shorten it")
        config = getattr(self.engine.model, "config", None)
        if config is not None and config.vocabs is not None:
            sides = ((request.source or (), config.vocabs.source), (request.prompt, config.vocabs.target))
            for tokens, size in sides:
                if strange := [token for token in tokens if not 0 <= token < size]:
                    raise UserError(f"token {strange[0]}: the model knows {size}")

    def _needs(self, tickets: Sequence[Ticket]) -> int:
        """Bytes of state they may come to have together, by the config's word: a row has places for the longest."""
        length = max(len(ticket.request.prompt) + ticket.asked.limit for ticket in tickets)
        source = max(len(ticket.request.source or ()) for ticket in tickets)
        cost = self.engine.model.config.cost(max(length, source))
        each = (cost.state_per_token * length + cost.state_constant) * next(self.engine.model.parameters()).itemsize
        return round(each * sum(ticket.decoding.rows for ticket in tickets))

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.arrivals or self.waiting or self.readings or self.crews)

    def run(self) -> None:
        """Until everyone is done."""
        while not self.idle:
            self.step()

    def stream(self, ticket: Ticket) -> Iterator[int]:
        """The tokens of one request as they are said; everyone else goes on meanwhile."""
        told = 0
        while True:
            new = ticket.tokens[told:]
            yield from new
            told += len(new)
            if ticket.done and told == len(ticket.tokens):
                return
            if not new:
                self.step()

    def step(self) -> None:
        model = self.engine.model
        was_training: bool = model.training
        if was_training:
            model.eval()
        try:
            with torch.inference_mode():
                self._admit()
                for crew in self.crews:
                    crew.read()
                self.crews = [crew for crew in self.crews if crew.searches]
                self._read()
        finally:
            if was_training:
                model.train()
        self.steps += 1
        self._settle()

    def _admit(self) -> None:
        """Take in whoever has room, in order: one for whom there is none is not overtaken by a smaller one."""
        while self.arrivals:
            ticket = self.arrivals.popleft()
            self.waiting.setdefault((ticket.priority, ticket.client), deque()).append(ticket)
        taken: list[Ticket] = []
        rows, tokens = sum(held.decoding.rows for held in self.held), 0
        while (ticket := self._next()) is not None:  # type: ignore[assignment]
            size = len(ticket.request.source or ticket.request.prompt)
            rows, tokens = rows + ticket.decoding.rows, tokens + size
            full = rows > self.rows or (self.memory is not None and self._needs([*self.held, ticket]) > self.memory)
            if full or (taken and tokens > self.budget):
                break
            taken.append(self.waiting[ticket.priority, ticket.client].popleft())
            self.held.append(ticket)
            self.served[ticket.client] = self.served.get(ticket.client, 0) + size + ticket.asked.limit
        if taken:
            self.readings.append(Reading(self._start(taken), taken, [0] * len(taken)))

    def _next(self) -> Ticket | None:
        """The most urgent of those who wait: of one priority and client, who came first."""
        for lane, queue in list(self.waiting.items()):
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                del self.waiting[lane]
        return min((queue[0] for queue in self.waiting.values()), key=self._urgency, default=None)

    def _urgency(self, ticket: Ticket) -> tuple[int, int, int]:
        waited = (self.steps - ticket.since) // PATIENCE
        return -ticket.priority - waited, self.served.get(ticket.client, 0), ticket.number

    def _start(self, tickets: Sequence[Ticket]) -> States:
        """Nothing of the prompts read yet; sources are encoded together."""
        engine = self.engine
        begin: Any = engine.model.start if engine.search is None else partial(engine.model.start, search=engine.search)
        sources = [ticket.request.source for ticket in tickets if ticket.request.source is not None]
        if sources and len(sources) != len(tickets):
            raise UserError("some requests have a source and some have none; a model reads one or it does not")
        device = next(engine.model.parameters()).device
        states: States = begin(Rows.of(sources, engine.pad).to(device) if sources else len(tickets))
        return states

    def _read(self) -> None:
        """A piece of every prompt that is not yet read; all pieces together are no larger than the budget."""
        share = max(1, self.budget // max(1, len(self.readings)))
        for reading in self.readings:
            self._drop(reading)
            if reading.tickets:
                self._piece(reading, max(1, share // len(reading.tickets)))
        self.readings = [reading for reading in self.readings if reading.tickets]

    def _drop(self, reading: Reading) -> None:
        """Those who were cancelled leave before they are read any further."""
        stay = [n for n, ticket in enumerate(reading.tickets) if not ticket.cancelled]
        if len(stay) < len(reading.tickets):
            self._keep(reading, stay)

    def _keep(self, reading: Reading, stay: list[int]) -> None:
        if stay:
            reading.states.select(stay)
        reading.tickets, reading.read = [reading.tickets[n] for n in stay], [reading.read[n] for n in stay]

    def _piece(self, reading: Reading, size: int) -> None:
        engine, states = self.engine, reading.states
        prompts = [ticket.request.prompt for ticket in reading.tickets]
        if engine.seen_whole:  # tokens that see each other are read at once
            size = max(map(len, prompts))
        pieces = [prompt[at : at + size] for prompt, at in zip(prompts, reading.read, strict=True)]
        rows = Rows.of(pieces, engine.pad).to(states.device)
        if engine.seen_whole:
            given = torch.tensor([len(piece) for piece in pieces], device=states.device)
            rows = replace(rows, prompt=torch.arange(rows.tokens.shape[1], device=states.device) < given[:, None])
        last = engine.model.advance(rows, states, last=True)[:, 0]
        reading.read = [at + len(piece) for at, piece in zip(reading.read, pieces, strict=True)]
        done = [n for n, prompt in enumerate(prompts) if reading.read[n] == len(prompt)]
        for width in sorted({reading.tickets[n].decoding.rows for n in done}):
            some = [n for n in done if reading.tickets[n].decoding.rows == width]
            self._begin(reading, some, last)
        self._keep(reading, [n for n in range(len(prompts)) if n not in done])

    def _begin(self, reading: Reading, some: list[int], last: torch.Tensor) -> None:
        """Those who have been read say their first token, and join the others."""
        ways: dict[Way, list[int]] = {}
        for n in some:
            ways.setdefault(self.engine.way(reading.tickets[n].decoding).kind, []).append(n)
        order = [n for numbers in ways.values() for n in numbers]
        whole = order == list(range(len(reading.tickets)))
        states = reading.states if whole else reading.states.pick(order)
        asked = [(way, [reading.tickets[n].asked for n in numbers]) for way, numbers in ways.items()]
        crew = Crew(self.engine.model, states, asked, self.engine.limit)
        crew.choose(last[order])
        if not crew.searches:
            return
        crew.states.ungroup()
        for other in self.crews:
            if states.joins and other.states.joins and other.states.group == states.group:
                other.join(crew)
                return
        self.crews.append(crew)

    def _settle(self) -> None:
        """Whoever is done gets the answer; whose rows have left holds nothing any more."""
        here = {asked for crew in self.crews for one in crew.searches for asked in one.asked}
        here |= {ticket.asked for reading in self.readings for ticket in reading.tickets}
        for ticket in self.held:
            if ticket.asked.done and not ticket.done:
                ticket.answer = ticket.asked.found
                if ticket.decoding.rows > 1:
                    for token in ticket.answer[0].tokens:
                        ticket.hear(token)
        self.held = [ticket for ticket in self.held if ticket.asked in here]
