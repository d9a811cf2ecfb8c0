"""In which order waiting requests are admitted: fairly, as they arrive (`FairQueue`), or, when all are known from the
start, in batches of similar size (`LargestFirst`). And when: `Postponement`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import islice

from allyouneed.infer.decoding.base import RequestState

PATIENCE = 64  # steps after which a waiting request gains one level of priority among those of its client
MANY_CLIENTS = 1024  # whose grants are remembered after they have left
POSTPONED = 4  # steps that a prefill is postponed at most
WORTH = 16  # decoding rows that a prefill may stop for each row it reads
SHORT = 16  # tokens a request counts for at least: short ones still need logits over the whole vocabulary


class FairQueue:
    """Clients take turns: the one that has been granted the fewest tokens is next, however long others have waited. Of
    its requests the one with the highest priority, which grows with waiting, then the oldest."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, str], deque[RequestState]] = {}  # by priority and client, oldest first
        self.granted: dict[str, int] = {}  # tokens read and granted, by client

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def add(self, arrivals: deque[RequestState], active: Collection[RequestState]) -> None:
        """A client that arrives counts as the one granted least so far: earlier grants to others are not made up for
        (the counters of Sheng et al. 2024, "Fairness in Serving Large Language Models", arXiv:2401.00588, 4.1)."""
        here = {client for _, client in self.waiting} | {state.request.client for state in active}
        if not here:
            self.granted.clear()
        if len(self.granted) > MANY_CLIENTS + 2 * len(here):
            self.granted = {client: self.granted.get(client, 0) for client in here}
        least = min((self.granted.get(client, 0) for client in here), default=0)
        while arrivals:
            state = arrivals[0]  # removed last: an interrupt loses no request (one that is here twice is admitted once)
            client = state.request.client
            if client not in here:
                self.granted[client] = max(self.granted.get(client, 0), least)
            self.waiting.setdefault((state.request.priority, client), deque()).append(state)
            arrivals.popleft()

    def peek(self, step: int) -> RequestState | None:
        """The most urgent request that is still waiting."""
        heads = list[RequestState]()
        for lane, queue in list(self.waiting.items()):
            while queue and (queue[0].finished or queue[0].admitted):
                queue.popleft()
            if queue:
                heads.append(queue[0])
            else:
                del self.waiting[lane]
        return min(heads, key=partial(self.urgency, step=step), default=None)

    def pop(self, state: RequestState, tokens: int) -> None:
        """Remove a request that `peek` returned and charge its client."""
        request = state.request
        self.waiting[request.priority, request.client].popleft()
        self.granted[request.client] = self.granted.get(request.client, 0) + tokens

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self.waiting.values():
            yield from queue

    def urgency(self, state: RequestState, step: int) -> tuple[int, int, int]:
        """The sort key of a request: the smaller, the more urgent."""
        request, waited = state.request, (step - state.arrived) // PATIENCE
        return self.granted.get(request.client, 0), -request.priority - waited, state.number


class Postponement:
    """A prefill stops all rows that are decoding in captured graphs, for a time that hardly depends on how many prompts
    it reads; as long as it could read only a few, but more at each step, it is therefore postponed."""

    def __init__(self) -> None:
        self.steps = self.rows = 0  # that it has been postponed by, and that it could have read then

    def applies(self, waiting: Iterable[RequestState], decoding: int, free: int) -> bool:
        """Whether this step prefills nothing. `decoding`, `free`: rows. The caller sets `steps` to 0 when it has
        admitted requests."""
        if free <= 0 or self.steps >= POSTPONED:
            return False
        worth = -(-decoding // WORTH)
        rows = (state.spec.rows for state in waiting if not state.finished)
        found = min(sum(islice(rows, worth)), free)  # a request has one row at least
        if found >= worth or (self.steps and found <= self.rows):
            return False
        self.steps, self.rows = self.steps + 1, found
        return True


class LargestFirst:
    """Requests of similar size together, the largest first: a batch that does not fit in memory fails at once."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.waiting: list[RequestState] = []  # smallest first

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def add(self, arrivals: deque[RequestState]) -> None:
        """Removed from `arrivals` last: an interrupt loses no request."""
        if arrivals:
            new = list(arrivals)
            known = dict.fromkeys([*reversed(self.waiting), *new])
            self.waiting = sorted(known, key=lambda state: -state.request.size)[::-1]
            for _ in new:
                arrivals.popleft()

    def drop_admitted(self) -> None:
        """Drop the largest requests while they are not waiting any more."""
        while self.waiting and (self.waiting[-1].admitted or self.waiting[-1].finished):
            self.waiting.pop()

    def next_batch(self, most: int | None = None) -> list[RequestState]:
        """The next requests: as many as the budget allows, and at most `most`. A draft multiplies the tokens of a
        pass."""
        self.drop_admitted()
        batch: list[RequestState] = []
        largest = 0
        for state in reversed(self.waiting):
            if len(batch) == most:
                break
            if state.cancelled:
                continue
            draft, rows = state.spec.draft, state.spec.rows
            largest = largest or max(state.request.size, SHORT)
            if batch and (len(batch) + 1) * largest * rows * (1 if draft is None else 1 + draft.ahead) > self.budget:
                break
            batch.append(state)
        return batch
