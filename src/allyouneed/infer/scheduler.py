"""Continuous batching: requests of unequal lengths join and leave at every step, each in its own way of decoding.

A step is one pass of the model over every row that is being written, and, beside it, a pass over new requests that is
no larger than the budget: sources are encoded together, prompts are read piece after piece, so that a long one never
stalls the others. Whoever has been read chooses its first token at once and joins those who write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.infer.cuda_graph.scheduler_slots import SchedulerSlots
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, StopCondition
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine, Request
from allyouneed.infer.prefix_cache import Declared, Prefixes
from allyouneed.infer.request import PrefillBatch, RequestHandle
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import BlockPool, PagedStates, PoolFullError

PATIENCE = 64  # steps: who has waited so long counts as one more urgent


class Scheduler:
    """`rows`: so many are written at once, beams counted. `budget`: tokens read of new requests in one step. `memory`:
    bytes that the states may need in all, as their config declares; None: as many as it takes. `pool`: blocks that the
    states lie in; when there are too few, who is least urgent is put aside and goes on later.

    One thread makes the steps; any thread may `submit` and `cancel`.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int = 64,
        budget: int = 512,
        memory: int | None = None,
        pool: BlockPool | None = None,
    ) -> None:
        if rows < 1 or budget < 1:
            raise UserError(f"rows={rows}, budget={budget}: both must be at least 1")
        if engine.exact and pool is not None:
            raise UserError("exact: with a pool, who begins alike is read together; leave out one of them")
        self.engine, self.rows, self.budget, self.memory = engine, rows, budget, memory
        self.arrivals: deque[RequestHandle] = deque()
        self.waiting: dict[tuple[int, str], deque[RequestHandle]] = {}  # by priority and client, first come first
        self.readings: list[PrefillBatch] = []
        self.crews: list[RunningBatch] = []
        self.held: list[RequestHandle] = []  # those who are read or written
        self.served: dict[str, int] = {}  # tokens read and granted, by client
        self.steps, self._numbers = 0, count()
        self.aside: list[RunningBatch] = []  # put aside until there are blocks again
        self.pool, self.prefixes = pool, None if pool is None else Prefixes(pool)
        self.declared: Declared | None = None
        self.preempted = 0
        shared = pool is None and memory is None and not engine.exact
        self.seating = SchedulerSlots(engine, rows) if shared else None  # where the engine has seats
        if pool is not None:
            trial = PagedStates(engine.model.start(1) if _reads_nothing(engine) else _heard(engine), pool)
            self.declared = Declared(engine.model.config, pool.size, trial.has_pages)

    # --- asking ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        decoding: Decoding | None = None,
        *,
        stops: StopCondition | None = None,
        priority: int = 0,
        client: str = "",
        listener: Callable[[int], None] | None = None,
    ) -> RequestHandle:
        """Higher `priority` first; among equals the `client` who has been given least, then who came first.
        `listener` is told each token as it is said."""
        decoding = decoding or Decoding()
        asked = RequestState(self._limit(request), request.place, request.prompt, decoding.seed, stops)
        ticket = RequestHandle(request, decoding, priority, client, next(self._numbers), asked, listener)
        asked.on_token = ticket.hear
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

    def _check(self, ticket: RequestHandle) -> None:
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
        if self.pool is not None and (blocks := self._most(ticket)) > self.pool.blocks:
            raise UserError(f"a request that needs {blocks} blocks of state, there are {self.pool.blocks}; shorten it")
        config = getattr(self.engine.model, "config", None)
        if config is not None and config.vocabs is not None:
            sides = ((request.source or (), config.vocabs.source), (request.prompt, config.vocabs.target))
            for tokens, size in sides:
                if strange := [token for token in tokens if not 0 <= token < size]:
                    raise UserError(f"token {strange[0]}: the model knows {size}")

    def _needs(self, tickets: Sequence[RequestHandle]) -> int:
        """Bytes of state they may come to have together, by the config's word: a row has places for the longest."""
        length = max(len(ticket.request.prompt) + ticket.asked.limit for ticket in tickets)
        source = max(len(ticket.request.source or ()) for ticket in tickets)
        cost = self.engine.model.config.cost(max(length, source))
        each = (cost.state_per_token * length + cost.state_constant) * next(self.engine.model.parameters()).itemsize
        return round(each * sum(ticket.decoding.rows for ticket in tickets))

    def _own(self, ticket: RequestHandle) -> int:
        """Blocks to reserve for what does not lie in blocks."""
        assert self.declared is not None
        length = len(ticket.request.prompt) + ticket.asked.limit
        return self.declared.own(length, len(ticket.request.source or ())) * ticket.decoding.rows

    def _most(self, ticket: RequestHandle) -> int:
        """Blocks it can come to need."""
        assert self.declared is not None
        length = len(ticket.request.prompt) + ticket.asked.limit
        blocks = self.declared.pages_of(length)
        return self._own(ticket) + (blocks and blocks + 1) * ticket.decoding.rows

    def _soon(self, ticket: RequestHandle, left: int) -> int:
        """Blocks it will need while so many tokens are read, and for its first token."""
        assert self.declared is not None
        return self.declared.pages_of(left) + 2 * ticket.decoding.rows * self.declared.pages

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.arrivals or self.waiting or self.readings or self.crews or self.aside or self._seated)

    @property
    def _seated(self) -> bool:
        return self.seating is not None and bool(self.seating.asked)

    def run(self) -> None:
        """Until everyone is done."""
        while not self.idle:
            self.step()

    def stream(self, ticket: RequestHandle) -> Iterator[int]:
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
                for crew in list(self.crews):
                    self._roomily(crew.read, crew)
                self.crews = [crew for crew in self.crews if crew.searches]
                if self.seating is not None:
                    self.seating.step()
                self._read()
        finally:
            if was_training:
                model.train()
        self.steps += 1
        self._settle()

    def _admit(self) -> None:
        """Take in whoever has room, in order: one for whom there is none is not overtaken by a smaller one."""
        self._resume()
        self._arrive()
        if not self.waiting:
            return
        taken: list[RequestHandle] = []
        rows, tokens = sum(held.decoding.rows for held in self.held), 0
        free = 0 if self.pool is None else self._free()
        while (ticket := self._next()) is not None:
            if self.aside and self._urgency(self._of(self.aside[0])[0]) < self._urgency(ticket):
                break
            size = len(ticket.request.source or ticket.request.prompt)
            rows, tokens = rows + ticket.decoding.rows, tokens + size
            full = rows > self.rows or (self.memory is not None and self._needs([*self.held, ticket]) > self.memory)
            if self.pool is not None:
                free -= self._own(ticket) + self._soon(ticket, len(ticket.request.prompt))
                full = full or (free < 0 and bool(self.held))
            if full or (taken and tokens > self.budget):
                break
            if self.pool is not None:
                while len(self.pool.free) < self._own(ticket) and self.prefixes is not None and self.prefixes.drop():
                    pass
                ticket.reserved = self.pool.allocate(self._own(ticket))
            taken.append(self.waiting[ticket.priority, ticket.client].popleft())
            self.held.append(ticket)
            self.served[ticket.client] = self.served.get(ticket.client, 0) + size + ticket.asked.limit
        for some in [[one] for one in taken] if self.engine.exact else [taken] if taken else []:
            states = self._start(some)
            if isinstance(states, PagedStates) and self._alike(states):
                assert self.prefixes is not None
                for row, ticket in enumerate(some):
                    states.adopt_blocks(row, self.prefixes.find(ticket.request.prompt))
            self.readings.append(PrefillBatch(states, some, list(states.lengths)))

    def _arrive(self) -> None:
        """Who comes is served like the one who has been given least so far: what others got before is not made up for
        (the counters of Sheng et al. 2024, "Fairness in Serving Large Language Models", arXiv:2401.00588, 4.1)."""
        here = {client for _, client in self.waiting} | {held.client for held in self.held}
        if not here:
            self.served.clear()
        least = min((self.served.get(client, 0) for client in here), default=0)
        while self.arrivals:
            ticket = self.arrivals.popleft()
            if ticket.client not in here:
                self.served[ticket.client] = max(self.served.get(ticket.client, 0), least)
            self.waiting.setdefault((ticket.priority, ticket.client), deque()).append(ticket)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _alike(self, states: PagedStates) -> bool:
        """Texts that begin alike can share their beginning: all of it lies in blocks and depends on nothing else."""
        return states.fully_paged and not states.has_sources and not self.engine.seen_whole

    def _free(self) -> int:
        """Blocks that nobody holds or is about to take; those kept for others to come count as free."""
        assert self.pool is not None and self.prefixes is not None
        kept = sum(self.pool.ref_counts[block] == 1 for block in self.prefixes.known.values())
        coming = sum(self._soon(*both) for r in self.readings for both in zip(r.tickets, r.left, strict=True))
        return len(self.pool.free) + kept - coming

    def _roomily(self, act: Callable[[], None], crew: RunningBatch | None = None) -> None:
        """Do it; as long as there are too few blocks for it, somebody lets go of some."""
        while crew is None or crew.searches:
            try:
                act()
                return
            except PoolFullError:
                if not self._make_room():
                    raise

    def _make_room(self) -> bool:
        for crew in self.crews:
            before = len(crew)
            crew.leave()
            if len(crew) < before:
                return True
        if self.prefixes is not None and self.prefixes.drop():
            return True
        running = [(ticket, crew) for crew in self.crews for ticket in self._of(crew)]
        if not running or len(running) + len(self.readings) < 2:  # those who are read were admitted with blocks enough
            return False
        ticket, crew = max(running, key=lambda both: self._urgency(both[0]))
        alone = crew.part(ticket.asked)
        assert isinstance(alone.states, PagedStates)
        alone.states.swap_out()
        self.aside.append(alone)
        self._let_go(ticket)
        self.preempted += 1
        return True

    def _let_go(self, ticket: RequestHandle) -> None:
        if self.pool is not None:
            self.pool.release(ticket.reserved)
        ticket.reserved = []

    def _of(self, crew: RunningBatch) -> list[RequestHandle]:
        here = {asked for one in crew.searches for asked in one.requests}
        return [ticket for ticket in self.held if ticket.asked in here]

    def _resume(self) -> None:
        """Those who were put aside go on, the most urgent first, as soon as there are blocks for them."""
        self.aside = [crew for crew in self.aside if not crew.searches[0].requests[0].cancelled]
        self.aside.sort(key=lambda crew: self._urgency(self._of(crew)[0]))
        while self.aside:
            crew, states = self.aside[0], self.aside[0].states
            assert self.pool is not None and isinstance(states, PagedStates)
            (ticket,) = self._of(crew)
            own = self._own(ticket)
            needs = own + states.swapped_blocks + 2 * len(crew)
            while len(self.pool.free) < needs and self.prefixes is not None and self.prefixes.drop():
                pass
            if len(self.pool.free) < needs and (self.crews or self.readings):
                return
            ticket.reserved = self.pool.allocate(own)
            states.swap_in()
            self._gather(self.aside.pop(0))

    def waste(self) -> float:
        """Which share of the blocks in use holds nothing."""
        assert self.pool is not None
        filled: dict[int, int] = {}
        for states in [crew.states for crew in self.crews] + [reading.states for reading in self.readings]:
            assert isinstance(states, PagedStates)
            for blocks, length in zip(states.block_tables, states.lengths, strict=True):
                for number, block in enumerate(blocks):
                    used = min(self.pool.size, length - number * self.pool.size)
                    filled[block] = max(filled.get(block, 0), used)
        return 1 - sum(filled.values()) / (len(filled) * self.pool.size) if filled else 0.0

    # --- reading -----------------------------------------------------------------------------------------------------

    def _next(self) -> RequestHandle | None:
        """The most urgent of those who wait: of one priority and client, who came first."""
        for lane, queue in list(self.waiting.items()):
            while queue and queue[0].cancelled:
                queue.popleft()
            if not queue:
                del self.waiting[lane]
        return min((queue[0] for queue in self.waiting.values()), key=self._urgency, default=None)

    def _urgency(self, ticket: RequestHandle) -> tuple[int, int, int]:
        waited = (self.steps - ticket.since) // PATIENCE
        return -ticket.priority - waited, self.served.get(ticket.client, 0), ticket.number

    def _start(self, tickets: Sequence[RequestHandle]) -> States:
        """Nothing of the prompts read yet; sources are encoded together."""
        engine = self.engine
        model = engine.decoder
        begin: Any = model.start if engine.search is None else partial(model.start, search=engine.search)
        sources = [ticket.request.source for ticket in tickets if ticket.request.source is not None]
        if sources and len(sources) != len(tickets):
            raise UserError("some requests have a source and some have none; a model reads one or it does not")
        device = next(engine.model.parameters()).device
        states: States = begin(Rows.of(sources, engine.pad).to(device) if sources else len(tickets))
        return states if self.pool is None else PagedStates(states, self.pool)

    def _read(self) -> None:
        """A piece of every prompt that is not yet read; all pieces together are no larger than the budget."""
        share = max(1, self.budget // max(1, len(self.readings)))
        for reading in self.readings:
            self._drop(reading)
            if reading.tickets:
                self._roomily(partial(self._piece, reading, max(1, share // len(reading.tickets))))
        self.readings = [reading for reading in self.readings if reading.tickets]

    def _drop(self, reading: PrefillBatch) -> None:
        """Those who were cancelled leave before they are read any further."""
        stay = [n for n, ticket in enumerate(reading.tickets) if not ticket.cancelled]
        if len(stay) < len(reading.tickets):
            self._keep(reading, stay)

    def _keep(self, reading: PrefillBatch, stay: list[int]) -> None:
        if stay:
            reading.states.select(stay)
        elif not reading.taken:
            reading.states.close()
        reading.tickets, reading.read = [reading.tickets[n] for n in stay], [reading.read[n] for n in stay]

    def _piece(self, reading: PrefillBatch, size: int) -> None:
        engine, states = self.engine, reading.states
        prompts = [ticket.request.prompt for ticket in reading.tickets]
        if engine.seen_whole or engine.exact:  # tokens that see each other are read at once; pieces change last bits
            size = max(map(len, prompts))
        pieces = [prompt[at : at + size] for prompt, at in zip(prompts, reading.read, strict=True)]
        rows = Rows.of(pieces, engine.pad).to(states.device)
        if engine.seen_whole:
            given = torch.tensor([len(piece) for piece in pieces], device=states.device)
            rows = replace(rows, prompt=torch.arange(rows.tokens.shape[1], device=states.device) < given[:, None])
        last = engine.decoder.advance(rows, states, last=True)[:, 0]
        reading.read = [at + len(piece) for at, piece in zip(reading.read, pieces, strict=True)]
        done = [n for n, prompt in enumerate(prompts) if reading.read[n] == len(prompt)]
        for width in sorted({reading.tickets[n].decoding.rows for n in done}):
            some = [n for n in done if reading.tickets[n].decoding.rows == width]
            self._begin(reading, some, last)
        self._keep(reading, [n for n in range(len(prompts)) if n not in done])

    def _begin(self, reading: PrefillBatch, some: list[int], last: torch.Tensor) -> None:
        """Those who have been read say their first token, and join the others."""
        some = some if self.seating is None else self.seating.sit(reading, some)
        if not some:
            return
        ways: dict[DecodingSpec, list[int]] = {}
        for n in some:
            ways.setdefault(self.engine.way(reading.tickets[n].decoding).batch_key, []).append(n)
        order = [n for numbers in ways.values() for n in numbers]
        whole = order == list(range(len(reading.tickets)))
        if isinstance(reading.states, PagedStates) and self._alike(reading.states) and self.prefixes is not None:
            for n in some:
                self.prefixes.keep(reading.tickets[n].request.prompt, reading.states.block_tables[n])
        states, reading.taken = (reading.states, True) if whole else (reading.states.copy_rows(order), False)
        asked = [(way, [reading.tickets[n].asked for n in numbers]) for way, numbers in ways.items()]
        crew = RunningBatch(self.engine.decoder, states, asked, self.engine.limit)
        crew.choose(last[order])
        if not crew.searches:
            return
        crew.states.ungroup()
        self._gather(crew)

    def _gather(self, crew: RunningBatch) -> None:
        for other in [] if self.engine.exact else self.crews:
            if other.searches and crew.states.joins and other.states.group == crew.states.group:
                other.join(crew)
                return
        self.crews.append(crew)

    def _settle(self) -> None:
        """Whoever is done gets the answer; whose rows have left holds nothing any more."""
        here = {asked for crew in self.crews for one in crew.searches for asked in one.requests}
        here |= {asked for crew in self.aside for asked in crew.searches[0].requests}
        here |= {ticket.asked for reading in self.readings for ticket in reading.tickets}
        here |= set() if self.seating is None else self.seating.asked
        for ticket in self.held:
            if ticket.asked.done and not ticket.done:
                ticket.answer = ticket.asked.hypotheses
                if ticket.decoding.rows > 1:
                    for token in ticket.answer[0].tokens:
                        ticket.hear(token)
        for ticket in self.held:
            if ticket.asked not in here:
                self._let_go(ticket)
        self.held = [ticket for ticket in self.held if ticket.asked in here]


def _reads_nothing(engine: Engine) -> bool:
    return not hasattr(engine.model, "encode") or engine.search is not None


def _heard(engine: Engine) -> States:
    """States of the shortest source there is, to see what they are made of."""
    states: States = engine.model.start(Rows(torch.tensor([[engine.eos]])).to(next(engine.model.parameters()).device))
    return states
