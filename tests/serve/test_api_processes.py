"""HTTP in API processes, models in engine processes: what happens when one of them ends. (Other tests run with
`BOTH_SERVERS` or `BOTH_WAYS`.)"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.serve.settings import Settings
from allyouneed.serve.workers import supervisor as supervising
from allyouneed.serve.workers.channel import Channel, Kind, pack_numbers, split_ends, split_tokens
from allyouneed.serve.workers.supervisor import Supervisor, Task, default_api_processes
from served import served_client, until

LONG = {"model": "lm", "prompt": "x", "max_tokens": 240, "temperature": 0}


def slow_steps(running: Any) -> Any:
    """Steps of the language model take a while from now on; its engine loop."""
    loop = running.model("lm").loop
    report = loop._report

    def slow(*args: Any) -> None:
        report(*args)
        time.sleep(0.01)

    loop._report = slow
    return loop


def test_an_engine_process_that_ends_fails_its_requests_and_new_ones_wait_for_the_next(
    folders: dict[str, Path],
) -> None:
    with served_client({"lm": folders["lm"]}, split=True) as (running, client), ThreadPoolExecutor(2) as pool:
        expected = client.post("/v1/completions", json=LONG | {"max_tokens": 5}).json()["choices"]
        slow_steps(running)
        whole = pool.submit(client.post, "/v1/completions", json=LONG)
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: running.model("lm").loop.sequences == 2)
            running.stop_engine()
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
        assert last["error"]["code"] == "engine_ended"
        assert whole.result().status_code == 503 and whole.result().headers["retry-after"] == "1"
        waiting = [pool.submit(client.post, "/v1/completions", json=LONG | {"max_tokens": 5})]
        waiting += [pool.submit(client.get, "/v1/models")]  # a route of the engine process
        time.sleep(0.1)
        assert not any(one.done() for one in waiting)
        running.start_engine()
        assert waiting[0].result().json()["choices"] == expected
        assert waiting[1].result().status_code == 200


def test_an_api_process_that_ends_frees_the_slots_of_its_requests(folders: dict[str, Path]) -> None:
    with served_client({"lm": folders["lm"]}, split=True) as (running, client), ThreadPoolExecutor(1) as pool:
        client.post("/v1/completions", json=LONG | {"max_tokens": 1})
        loop = slow_steps(running)
        pool.submit(client.post, "/v1/completions", json=LONG)
        until(lambda: loop.sequences == 1)
        (connection,) = running.engine.connections
        running.engine_loop.call_soon_threadsafe(
            connection.transport.abort
        )  # as if the process at its other end had died
        until(lambda: not loop.sequences and loop.schedulers[False].idle)
        assert not connection.tasks and not loop.schedulers[False].active


def test_messages_arrive_in_order_whatever_their_pieces() -> None:
    sent: list[bytes] = []
    seen: list[Any] = []

    class Receiver(Channel):
        def on_message(self, kind: int, number: int, payload: bytes) -> None:
            split = {Kind.TOKENS: split_tokens, Kind.ENDS: split_ends}.get(Kind(kind))
            seen.append((kind, payload if split is None else list(split(payload))))

    class Transport:
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            sent.append(data)

    async def send() -> None:
        channel: Any = Channel()
        channel.transport = Transport()
        channel.send_end(7, 1, Hypothesis([5, 6], 0.0, -1.5, [-1.0, -0.5], True), [5, 6])
        channel.send(Kind.TOKENS, 0, pack_numbers([7, 0, 2, 1, 2, 8, 3, 1, 70000]))
        channel.send_end(8, 3, Hypothesis([4], 0.0, -2.0, [-2.0], False), [])
        channel.send(Kind.END, 7, b"end")

    import asyncio

    async def both() -> Receiver:
        await send()
        await asyncio.sleep(0)
        return Receiver()

    receiver = asyncio.run(both())
    assert len(sent) == 1  # one write for all of them
    for at in range(0, len(sent[0]), 5):
        receiver.data_received(sent[0][at : at + 5])
    ends = [
        (7, 1, Hypothesis([5, 6], 0.0, -1.5, [0.0, 0.0], True)),
        (8, 3, Hypothesis([], 0.0, -2.0, [0.0], False)),
    ]
    assert seen == [(Kind.TOKENS, [(7, 0, [1, 2]), (8, 3, [70000])]), (Kind.END, b"end"), (Kind.ENDS, ends)]


# Writes when it starts and when it is told to stop; an API process takes a while to finish.
FAKE = """\
import json, os, signal, sys, time
task = json.loads(sys.stdin.buffer.readline())
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
log = open(os.environ["LOG"], "a", buffering=1)
print(task["role"], "start", os.environ["OMP_NUM_THREADS"], task["settings"]["device"], len(task["engines"]), file=log)
while not stopping:
    time.sleep(0.01)
time.sleep(0.2 if task["role"] == "api" else 0)
print(task["role"], "end", file=log)
"""


def test_engine_processes_are_stopped_after_api_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # not in the main thread
    monkeypatch.setattr(supervising, "usable_cpus", lambda: 6)
    supervisor = Supervisor(Task({}, Settings(port=0)), 1, ["cuda:1"], [sys.executable, "-c", FAKE], api_processes=2)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    log = tmp_path / "log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
    assert sorted(log.read_text().splitlines()) == ["api start 1 cpu 1", "api start 1 cpu 1", "engine start 6 cuda:1 1"]
    supervisor._on_signal(signal.SIGTERM, None)
    thread.join(20)
    assert not thread.is_alive() and log.read_text().splitlines()[3:] == ["api end", "api end", "engine end"]
    assert default_api_processes(["cuda:0"]) == 3 and default_api_processes(["cpu"]) == 0
