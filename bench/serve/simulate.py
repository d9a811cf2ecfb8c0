"""The closed loop of gpu.py as an event simulation: what postponed prefills and cheaper ones change.

    python bench/serve/simulate.py                   # a few seconds, no device
    python bench/serve/simulate.py --postponed 0 8   # other bounds (infer/scheduling/admission.py POSTPONED)

The engine's thread admits requests, launches prefills and runs of decode steps, and waits for the run before; the
device computes one thing after another. Requests and answers pass through queues: the engine process, 8 API processes,
the load generator. The rule (`Postponement`), the passes (`plan`) and the lengths of runs are the product's own; times
are those that gpu.py printed on an H200 for TinyLlama's shape, or were fitted to its numbers of prefills.

"before": a prefill copies all slots, 5 ms. "now": only its own rows. Lengths are the same for all answers (256, as in
gpu.py), where those that leave together come back together, or mixed (32 to 480). Printed: tokens per second
(of `Engine`, if lengths are equal), prefills, prompts of each, and how long a request waits until it is launched.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace

from allyouneed.infer.cuda_graph.device_search import RUN_STEPS
from allyouneed.infer.cuda_graph.paged_prefill import PrefillChunk, plan
from allyouneed.infer.cuda_graph.runner import JOIN_STEPS
from allyouneed.infer.scheduling import admission

GIVEN, NEW, BUDGET, ROUNDS = 128, 256, 8192, 3
PROMPT = range(GIVEN)
# milliseconds
TOKEN, PASS_FLOOR, PASS = 0.0035, 4.0, 1.0  # of a prefill: each token, a pass at least, what a pass has besides
COPIES = {"before": 5.0, "now": 0.3}  # into slots
HOST, HOST_ROW, HOST_STEP, HOST_SLOT = 5.0, 0.15, 0.5, 0.006  # engine's thread: a prefill, its rows; a step, its rows
REQUEST = {"api": 1.0, "engine": 0.4}  # to pass through a process
ANSWER = {"engine": 0.1, "api": 4.0, "client": 0.2}
API_PROCESSES = 8


def step_time(rows: int) -> float:
    return 0.75 + 0.0055 * rows


def prefill_time(rows: int, most: int) -> float:
    chunks = [PrefillChunk(row, 0, PROMPT) for row in range(rows)]
    return sum(PASS + max(PASS_FLOOR, TOKEN * size.rows * size.tokens) for _, size in plan(chunks, most))


@dataclass
class Queue:
    """Requests that wait for one of several servers."""

    servers: int
    free: list[float] = field(default_factory=list)

    def pass_through(self, now: float, duration: float) -> float:
        self.free = self.free or [0.0] * self.servers
        begin = max(now, heapq.heappop(self.free))
        heapq.heappush(self.free, begin + duration)
        return begin + duration


class Clients:
    """Each sends its next request when it has its answer; `arrived`: those that are at the engine."""

    def __init__(self, number: int) -> None:
        self.queues = {"engine": Queue(1), "api": Queue(API_PROCESSES), "client": Queue(1)}
        self.left, self.events, self.order = (
            [ROUNDS] * number,
            list[tuple[float, int, int, list[tuple[str, float]]]](),
            count(),
        )
        self.arrived: list[tuple[float, int]] = []
        self.end = 0.0
        for client in range(number):
            self._later(0.0, client, [*REQUEST.items()])

    def answer(self, now: float, client: int) -> None:
        self._later(now, client, [*ANSWER.items(), *REQUEST.items()] if self.left[client] else [*ANSWER.items()])

    def _later(self, now: float, client: int, way: list[tuple[str, float]]) -> None:
        heapq.heappush(self.events, (now, next(self.order), client, way))

    def advance(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            now, _, client, way = heapq.heappop(self.events)
            if way:
                (place, duration), *rest = way
                self._later(self.queues[place].pass_through(now, duration), client, rest)
            elif self.left[client]:
                self.left[client] -= 1
                self.arrived.append((now, client))
            self.end = max(self.end, now)


@dataclass
class Outcome:
    tokens: int = 0
    milliseconds: float = 0.0
    groups: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        prompts, wait = sum(self.groups) / len(self.groups), sum(self.waits) / len(self.waits)
        return f"{len(self.groups)} | {prompts:.0f} | {wait:.0f} ms"


def simulate(clients: int, copies: float, length: Callable[[int, int], int]) -> Outcome:
    """`length(client, round)`: tokens of an answer."""
    rows, found, others, rule = clients, Outcome(), Clients(clients), admission.Postponement()
    now = device = 0.0
    decoding: dict[int, int] = {}  # client -> tokens left, of what is launched
    known: set[int] = set()  # rows that the engine knows to be occupied
    waiting: list[tuple[float, int]] = []
    runs: list[tuple[float, list[int]]] = []  # end, and whose answers end there
    unfinished = clients * ROUNDS
    request = SimpleNamespace(finished=False, spec=SimpleNamespace(decoding=SimpleNamespace(rows=1)))
    while unfinished:
        others.advance(now)
        waiting += others.arrived
        others.arrived = []
        free = rows - len(known)
        taken = waiting[: min(free, BUDGET // GIVEN)]
        if taken and not rule.applies([request] * len(waiting), len(known), free):  # type: ignore[list-item]
            rule.end()
            waiting = waiting[len(taken) :]
            host = HOST + HOST_ROW * len(taken)
            device = max(device, now + host / 2) + copies + prefill_time(len(taken), rows)
            now += host
            found.groups.append(len(taken))
            for since, client in taken:
                decoding[client] = length(client, others.left[client])
                found.tokens += decoding[client]
                found.waits.append(now - since)
            known |= set(decoding)
        steps = min(JOIN_STEPS if len(decoding) < rows else RUN_STEPS, max(decoding.values(), default=0))
        if steps:
            device = max(device, now) + steps * step_time(rows)
            decoding = {client: left - steps for client, left in decoding.items()}
            runs.append((device, [client for client, left in decoding.items() if left <= 0]))
            decoding = {client: left for client, left in decoding.items() if left > 0}
        if len(runs) > 1 or (runs and not steps):
            end, ended = runs.pop(0)
            now = max(now, end) + HOST_STEP + HOST_SLOT * len(known)
            known -= set(ended)
            unfinished -= len(ended)
            for client in ended:
                others.answer(now, client)
        elif not steps and not runs:
            now = max(now, others.events[0][0]) if others.events else now
    others.advance(float("inf"))
    found.milliseconds = others.end
    return found


def bounds(given: list[int]) -> Iterator[int]:
    """Each bound on postponed prefills in turn, set while the caller uses it."""
    before = admission.POSTPONED
    for bound in given:
        admission.POSTPONED = bound
        yield bound
    admission.POSTPONED = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--postponed", type=int, nargs="+", default=[0, admission.POSTPONED], help="steps, at most")
    given = parser.parse_args()
    print("| clients | lengths | copies | postponed | tokens/s | of Engine | prefills | prompts each | waits |")
    print(f"|---:|---|---|---:|{'---:|' * 5}")
    for clients in given.clients:
        engine = clients * NEW / (NEW * step_time(clients) + 3.3e-3 * clients * GIVEN)
        lengths = {"equal": lambda *_: NEW, "mixed": lambda *key: Random(str(key)).randrange(32, 481)}
        for name, length in lengths.items():
            for copies, duration in COPIES.items():
                for bound in bounds(given.postponed):
                    found = simulate(clients, duration, length)
                    speed = found.tokens / found.milliseconds
                    ratio = f"{speed / engine:.2f}" if name == "equal" else ""
                    print(f"| {clients} | {name} | {copies} | {bound} | {1000 * speed:,.0f} | {ratio} | {found} |")


if __name__ == "__main__":
    main()
