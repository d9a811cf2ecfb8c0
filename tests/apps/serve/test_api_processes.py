"""HTTP in API processes, models in engine processes: what happens when one of them ends. (Other tests run with
`BOTH_SERVERS` or `BOTH_WAYS`.)"""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers import supervisor as supervising
from allyouneed.apps.serve.workers.channel import (
    HEADER,
    Kind,
    MessageChannel,
    pack_numbers,
    pack_requests,
    split_ends,
    split_numbers,
    split_requests,
    split_tokens,
    with_body,
)
from allyouneed.apps.serve.workers.engine_process import RemoteGeneration
from allyouneed.apps.serve.workers.supervisor import ServerTask, Supervisor, default_api_processes
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.request import Request
from allyouneed.runtime.process import pause_gc
from served import served_client
from waiting import PATIENCE, until

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

    class Receiver(MessageChannel):
        def on_message(self, kind: int, number: int, payload: bytes) -> None:
            split = {Kind.TOKENS: split_tokens, Kind.ENDS: split_ends}.get(Kind(kind))
            seen.append((kind, payload if split is None else list(split(payload))))

    class Transport:
        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            sent.append(data)

    async def send() -> None:
        channel: Any = MessageChannel()
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


@pytest.mark.parametrize("prompts", [[[5]], [[1, 2, 3], [70000], [4, 5]], [[7] * 1000, [8] * 3]])
def test_requests_are_the_same_after_a_message(prompts: list[list[int]]) -> None:
    requests = [Request(ids, 1000 * len(ids), ()) for ids in prompts]
    for seed in (0, 5, (1 << 64) - 2):
        assert split_requests(pack_requests(requests, seed)) == (requests, seed)


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
    supervisor = Supervisor(
        ServerTask({}, Settings(port=0)), 1, ["cuda:1"], [sys.executable, "-c", FAKE], api_processes=2
    )
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    log = tmp_path / "log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
    assert sorted(log.read_text().splitlines()) == ["api start 1 cpu 1", "api start 1 cpu 1", "engine start 6 cuda:1 1"]
    supervisor._on_signal(signal.SIGTERM, None)
    thread.join(PATIENCE)
    assert not thread.is_alive() and log.read_text().splitlines()[3:] == ["api end", "api end", "engine end"]
    assert default_api_processes(["cuda:0"]) == 3 and default_api_processes(["cpu"]) == 0


class RawProcess:
    """An API process as the engine process sees it: bytes on a Unix socket."""

    def __init__(self, running: Any, model: str = "lm") -> None:
        self.model = model
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(Path(running.folder.name) / "engine"))
        self.received = b""

    def __enter__(self) -> RawProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(
        self,
        number: int,
        prompts: list[list[int]],
        streams: bool = False,
        bias: dict[int, float] | None = None,
        min_tokens: int = 0,
        max_tokens: int = 4,
    ) -> bytes:
        """A message, not sent yet."""
        content = {
            "model": self.model,
            "decoding": {"method": "greedy", "loops": None, "min_length": min_tokens},
            "rules": None if bias is None else [bias, 0.0, 0.0, None],
            "draws": 1,
            "exact": False,
            "client": "someone",
            "streams": streams,
        }
        requests = [Request(ids, max_tokens, ()) for ids in prompts]
        return message(Kind.GENERATE, number, *with_body(content, pack_requests(requests, 0)))

    def read(self) -> tuple[int, int, bytes]:
        """The next message: kind, number, payload."""
        while True:
            if len(self.received) >= HEADER.size:
                length, kind, number = HEADER.unpack_from(self.received)
                end = HEADER.size + length
                if len(self.received) >= end:
                    payload, self.received = self.received[HEADER.size : end], self.received[end:]
                    return kind, number, payload
            self.received += self.socket.recv(65536)

    def read_until_ended(self, count: int) -> tuple[list[list[int]], dict[int, Any], dict[int, Hypothesis]]:
        """The numbers of each ACCEPTED message, errors, and answers, once `count` requests have ended."""
        accepted: list[list[int]] = []
        failed: dict[int, Any] = {}
        answers: dict[int, Hypothesis] = {}
        while len(failed) + len(answers) < count:
            kind, number, payload = self.read()
            if kind == Kind.ACCEPTED:
                accepted.append(split_numbers(payload))
            elif kind == Kind.FAIL:
                failed[number] = json.loads(payload)
            elif kind == Kind.ENDS:
                answers |= {owner: found for owner, _, found in split_ends(payload)}
        return accepted, failed, answers


def message(kind: Kind, number: int, *parts: bytes) -> bytes:
    return HEADER.pack(sum(map(len, parts)), kind, number) + b"".join(parts)


def test_requests_that_arrive_together_are_submitted_together_and_fail_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_client({"lm": folders["lm"]}, split=True) as (running, client), RawProcess(running) as process:
        process.socket.sendall(process.ask(1, [[5, 6]]))  # loads the model
        assert process.read_until_ended(1)[0] == [[1]]
        loop, calls = slow_steps(running), []
        submit = loop.submit_each
        monkeypatch.setattr(loop, "submit_each", lambda some: calls.append(len(some)) or submit(some))
        process.socket.sendall(
            process.ask(2, [[5, 6], [7]])  # two sequences
            + process.ask(3, [[5, 100_000]])
            + process.ask(4, [[5, 6, 7]], bias={100_000: 1.0})
            + process.ask(5, [[5, 6, 7]], min_tokens=9)
            + process.ask(6, [[8, 9]], max_tokens=200)
            + message(Kind.CANCEL, 6)
            + process.ask(7, [[9, 8, 7]])
            + process.ask(8, [[5]]).replace(b'"lm"', b'"ml"')
        )
        accepted, failed, answers = process.read_until_ended(6)
        assert set(failed) == {3, 4, 5, 8} and set(answers) == {2, 7}
        assert [failed[number]["status"] for number in (3, 4, 5, 8)] == [400, 400, 400, 404]
        assert (failed[4]["param"], failed[5]["param"]) == ("logit_bias", "min_tokens")
        assert accepted == [[2, 6], [7]] and calls == [3, 1]  # the message that cancels comes between
        until(lambda: not loop.sequences and loop.schedulers[False].idle)
        assert running.registry.entries["lm"].used == 0
        for number, prompt in ((2, [7]), (7, [9, 8, 7])):  # of the first request, the end of the last sequence
            body = {"model": "lm", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert running.model("lm").text.tokenizer.decode(answers[number].tokens) == expected


def test_requests_beyond_the_queue_limit_are_refused(folders: dict[str, Path]) -> None:
    limits = Settings().limits.model_copy(update={"queue": 3})
    with (
        served_client({"lm": folders["lm"]}, split=True, limits=limits) as (running, _),
        RawProcess(running) as process,
    ):
        process.socket.sendall(process.ask(1, [[5, 6]]))
        process.read_until_ended(1)
        until(lambda: not running.model("lm").loop.sequences)
        process.socket.sendall(
            b"".join(process.ask(number, [[5, 6], [7, 8]]) for number in (2, 3)) + process.ask(4, [[5]])
        )
        accepted, failed, answers = process.read_until_ended(3)
        assert accepted == [[2, 4]] and set(answers) == {2, 4}
        assert failed[3]["status"] == 429 and "2 sequences are running or waiting and 2 are new" in failed[3]["message"]


def test_streams_and_many_requests_of_an_api_process_that_ends(folders: dict[str, Path]) -> None:
    def is_left(one: Any) -> bool:
        return type(one) is RemoteGeneration and one.entry is entry

    with served_client({"lm": folders["lm"]}, split=True) as (running, _), pause_gc():
        with RawProcess(running) as process:
            process.socket.sendall(process.ask(1, [[5, 6]]))
            process.read_until_ended(1)
            loop, entry = slow_steps(running), running.registry.entries["lm"]
            process.socket.sendall(
                b"".join(process.ask(2 + n, [[5, 6, n + 7]], streams=n % 2 == 0, max_tokens=200) for n in range(20))
            )
            assert process.read()[0] == Kind.ACCEPTED
            kind, _, payload = process.read()
            assert kind == Kind.TOKENS and len(list(split_tokens(payload))) > 1  # those of a step in one message
            assert {number % 2 for number, _, _ in split_tokens(payload)} == {0}
            assert loop.sequences == entry.used == 20
        until(lambda: not loop.sequences and loop.schedulers[False].idle)
        assert entry.used == 0 and not loop.delivery.batches and not loop.schedulers[False].active
        assert len(running.engine.connections) == 1  # that of the other API process
        until(lambda: not any(map(is_left, gc.get_objects())))  # without a collection
