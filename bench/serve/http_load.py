"""An HTTP load generator with little overhead, in a process of its own. `LoadProcess` is its handle.

A request is sent when its time has come, however many are unanswered (open loop), and its latency counts from then on;
or `clients` send one request after another (closed loop). One connection per request in progress, kept alive.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HEADER_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Call:
    """A request. `at`: seconds after the start of the job; closed loops ignore it."""

    path: str
    body: Any
    at: float = 0.0


@dataclass
class Job:
    """`clients`: of a closed loop; 0: open loop. `give_up`: unanswered requests at which to stop sending. `keep`:
    return bodies. `drain`: seconds to wait for answers after the last request was due."""

    port: int
    calls: list[Call]
    clients: int = 0
    give_up: int = 0
    keep: bool = False
    drain: float = 30.0


@dataclass
class Answer:
    """Seconds since the request was due; `status` 0: none came. `events`: server-sent ones."""

    number: int
    status: int = 0
    first: float = 0.0
    end: float = 0.0
    events: int = 0
    body: str = ""


@dataclass
class Result:
    answers: list[Answer]
    seconds: float  # from the first request to the last answer
    gave_up: bool = False
    late: float = 0.0  # the most that a request was sent too late: the generator's own delay

    def latencies(self, field: str = "end", skip: int = 0) -> list[float]:
        """Sorted; a request without an answer took for ever."""
        return sorted(getattr(one, field) if one.status == 200 else float("inf") for one in self.answers[skip:])


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Connection(asyncio.Protocol):
    """One request at a time. Bodies with a length or chunked; chunks are separated only where they are counted."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.future: asyncio.Future[None] | None = None
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, content: bytes, answer: Answer, due: float, keep: bool) -> asyncio.Future[None]:
        self.answer, self.due, self.keep = answer, due, keep
        self.head, self.length, self.parts, self.size, self.last = b"", -1, [], 0, b""
        self.future = asyncio.get_running_loop().create_future()
        self.transport.write(content)
        return self.future

    def data_received(self, data: bytes) -> None:
        if self.future is None:
            return
        answer = self.answer
        if not answer.status:
            self.head += data
            head, found, data = self.head.partition(HEADER_END)
            if not found:
                return
            answer.status = int(head[9:12])
            lines = head.lower().split(b"\r\n")
            self.length = next((int(one[15:]) for one in lines if one.startswith(b"content-length:")), -1)
        if data and not answer.first:
            answer.first = time.perf_counter() - self.due
        answer.events += data.count(b"data: ")
        self.size += len(data)
        self.last = (self.last + data)[-len(LAST_CHUNK) :]
        if self.keep:
            self.parts.append(data)
        if self.size == self.length or (self.length < 0 and self.last == LAST_CHUNK):
            answer.end = time.perf_counter() - self.due
            answer.body = b"".join(self.parts).decode("utf-8", "replace")
            future, self.future = self.future, None
            if not future.done():
                future.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.future is not None and not self.future.done():
            self.answer.status = 0
            self.future.set_result(None)


async def run(job: Job) -> Result:
    event_loop = asyncio.get_running_loop()
    idle: deque[Connection] = deque()
    every: list[Connection] = []
    answers = [Answer(number) for number in range(len(job.calls))]
    contents = []
    for call in job.calls:
        body = json.dumps(call.body, ensure_ascii=False).encode()
        head = f"POST {call.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        contents.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    waiting, late = 0, 0.0

    async def ask(number: int, due: float) -> None:
        nonlocal waiting
        waiting += 1
        try:
            while idle and idle[0].lost:  # the server closes connections that are not used
                idle.popleft()
            if idle:
                connection = idle.popleft()  # the oldest: with several workers all of them get requests
            else:
                _, connection = await event_loop.create_connection(Connection, "127.0.0.1", job.port)
                every.append(connection)
            await connection.send(contents[number], answers[number], due, job.keep)
            if answers[number].status:
                idle.append(connection)
        finally:
            waiting -= 1

    async def client(numbers: Sequence[int]) -> None:
        for number in numbers:
            await ask(number, time.perf_counter())

    gave_up, tasks = False, []
    started = time.perf_counter()
    if job.clients:
        tasks = [asyncio.create_task(client(range(n, len(contents), job.clients))) for n in range(job.clients)]
    else:
        for number, call in enumerate(job.calls):
            due = started + call.at
            if (delay := due - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            late = max(late, time.perf_counter() - due)
            tasks.append(asyncio.create_task(ask(number, due)))
            if job.give_up and waiting > job.give_up:
                gave_up = True
                answers = answers[: number + 1]
                break
    _, unanswered = await asyncio.wait(tasks, timeout=job.drain)
    seconds = time.perf_counter() - started
    for task in unanswered:
        task.cancel()
    for connection in every:
        connection.transport.close()
    await asyncio.sleep(0)
    for answer in answers:
        answer.status = answer.status if answer.end else 0
    return Result(answers, seconds, gave_up or bool(unanswered), late)


class LoadProcess:
    """The generator's process. `cores`: those it may use."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if cores:
            os.sched_setaffinity(self.process.pid, cores)

    def run(self, job: Job) -> Result:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return Result(**found | {"answers": [Answer(**one) for one in found["answers"]]})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    for line in sys.stdin.buffer:
        tree = json.loads(line)
        job = Job(**tree | {"calls": [Call(**call) for call in tree["calls"]]})
        gc.collect()
        gc.disable()  # so that a collection does not count as latency
        result = asyncio.run(run(job))
        gc.enable()
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
