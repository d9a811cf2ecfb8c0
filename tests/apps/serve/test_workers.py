"""Several workers behind one port: dead ones are started again, and a stop loses nothing that was accepted."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from allyouneed import plugins
from allyouneed.apps.serve.listener import listeners
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.supervisor import ServerTask, Supervisor
from allyouneed.errors import UserError
from allyouneed.runtime.process import stop_signals_handled
from waiting import PATIENCE, until

# A worker without a model: it publishes its phase, greets every connection and answers with its pid after some seconds.
FAKE = """\
import json, os, signal, socket, sys, threading, time
from pathlib import Path
task = json.loads(sys.stdin.buffer.readline())
stopping, busy = [], []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
name = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"worker-{task['worker']}")
name.write_text(json.dumps({"pid": os.getpid(), "status": "ready"}))
listener = socket.socket(fileno=task["listener"])
listener.settimeout(0.02)
def answer(connection):
    connection.recv(100)
    time.sleep(task["settings"]["limits"]["template_seconds"])
    connection.sendall(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']} {task['settings']['device']}".encode())
    connection.close()
    busy.pop()
while not stopping or busy:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        continue
    connection.settimeout(None)
    busy.append(1)
    connection.sendall(b"+")
    threading.Thread(target=answer, args=[connection]).start()
"""


def ask_fake(address: tuple[str, int], accepted: threading.Semaphore | None = None) -> list[str]:
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(b"?")
        if connection.recv(1) and accepted is not None:
            accepted.release()
        return connection.recv(100).decode().split()


def test_the_supervisor_keeps_its_workers_alive_and_lets_them_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settings = Settings(port=0, limits={"template_seconds": 0.2})
    supervisor = Supervisor(ServerTask({}, settings), 2, ["cuda:0", "cuda:1"], [sys.executable, "-c", FAKE])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # not in the main thread
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    until(lambda: all(worker.process is not None for worker in supervisor.workers))

    def ready() -> list[int]:
        found = supervisor.phases.read()
        return [one["pid"] for one in found] if all(one["status"] == "ready" for one in found) else []

    until(lambda: bool(ready()))
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: ask_fake(supervisor.address), range(24)))
        assert {int(pid) for pid, _, _ in answers} == set(ready())  # both of them answer
        assert {device for _, _, device in answers} == {"cuda:0", "cuda:1"}
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert {int(count) for _, count, _ in answers} == {threads}
        dead, alive = ready()
        os.kill(dead, signal.SIGKILL)
        waiting = [pool.submit(ask_fake, supervisor.address) for _ in range(12)]  # some wait for the new worker
        assert all(int(one.result()[0]) != dead for one in waiting)
        until(lambda: bool(ready()) and ready() != [dead, alive])
        assert ready()[1] == alive
        workers = set(ready())
        accepted = threading.Semaphore(0)
        asked = [pool.submit(ask_fake, supervisor.address, accepted) for _ in range(8)]
        assert all(accepted.acquire(timeout=PATIENCE) for _ in asked)  # and not yet answered
        supervisor._on_signal(signal.SIGTERM, None)
        assert {int(one.result()[0]) for one in asked} <= workers
    thread.join(PATIENCE)
    assert not thread.is_alive() and [worker.process.returncode for worker in supervisor.workers] == [0, 0]  # type: ignore[union-attr]
    with pytest.raises(OSError):
        ask_fake(supervisor.address)


def test_a_worker_that_keeps_dying_is_started_again_later_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(ServerTask({}, Settings(port=0)), 1, ["cpu"], [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    (worker,) = supervisor.workers
    until(lambda: worker.failures >= 3)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.partition(" again")[2] for text in messages[:3]] == ["", " in 0.5 s", " in 1 s"]
    supervisor._on_signal(signal.SIGTERM, None)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_port_that_is_taken_is_refused() -> None:
    first = Supervisor(ServerTask({}, Settings(port=0)), 2)
    with pytest.raises(UserError, match="cannot listen"):
        Supervisor(ServerTask({}, Settings(port=first.address[1])), 2)
    first._kill()


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_is_free_again_at_once_after_a_server_has_ended(count: int) -> None:
    """The side that closes a connection first keeps its address for a minute."""
    settings = Settings(port=0)
    first = listeners(settings, count)
    port = first[0].getsockname()[1]
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", port)) as client:
            (ready, *_), _, _ = select.select(first, [], [], PATIENCE)
            ready.accept()[0].close()
            assert client.recv(1) == b""
    for one in first:
        one.close()
    for one in listeners(Settings(port=port), count):
        one.close()


PLUGIN = """\
from typing import Literal
from allyouneed.nn.channels.feedforward import FFN

class Served(FFN):
    kind: Literal["served-plugin"] = "served-plugin"
"""


@pytest.mark.parametrize("api_processes", [0, 1])
def test_workers_load_the_plugins_of_their_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api_processes: int
) -> None:
    plugin, log = tmp_path / "served_plugin.py", tmp_path / "log"
    plugin.write_text(PLUGIN)
    monkeypatch.setattr(plugins, "_plugins", {})
    plugins._plugins["served"] = plugins.Plugin(plugin.name, str(plugin), "served", plugins.sha256(plugin))
    # the real worker, but for what it serves
    code = """\
import os
from pathlib import Path
from allyouneed import plugins
from allyouneed.apps.serve.workers import worker
def serve(folders, settings, task, phases, listener):
    with open(os.environ["LOG"], "a") as log:
        print(task["role"], [kind for slot, kind in plugins._parts if kind.startswith("served")], file=log)
    import time; time.sleep(600)
worker._serve_http = worker._serve_engine = serve
worker.main()
"""
    monkeypatch.setenv("LOG", str(log))
    supervisor = Supervisor(
        ServerTask({}, Settings(port=0, grace_seconds=0.1)), 1, ["cpu"], [sys.executable, "-c", code], api_processes
    )
    with stopping(supervisor):
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 1 + api_processes)
    expected = ["api ['served-plugin']", "engine ['served-plugin']"] if api_processes else ["worker ['served-plugin']"]
    assert sorted(log.read_text().splitlines()) == expected


@contextmanager
def stopping(supervisor: Supervisor) -> Iterator[None]:
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield
    finally:
        supervisor._on_signal(signal.SIGTERM, None)
        supervisor._on_signal(signal.SIGTERM, None)
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_supervisor_whose_terminal_hangs_up_lets_its_workers_finish() -> None:
    """The kernel and the shell may both send SIGHUP; only a second one of the others ends the workers at once."""
    supervisor = Supervisor(ServerTask({}, Settings(port=0)), 1)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a background shell ignores
    with stop_signals_handled(supervisor._on_signal):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert supervisor.signals == 1
        signal.raise_signal(signal.SIGTERM)
        assert supervisor.signals == 2
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with stop_signals_handled(supervisor._on_signal):
        signal.raise_signal(signal.SIGHUP)
    assert supervisor.signals == 2 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)
    supervisor._kill()


@pytest.mark.slow
@pytest.mark.parametrize(("option", "count"), [("--workers", 2), ("--api-processes", 3)])
def test_real_workers(folders: dict[str, Path], option: str, count: int) -> None:
    """Metrics are sums, a killed worker (or engine process) comes back, and SIGTERM under load loses nothing."""
    command = [sys.executable, "-m", "allyouneed", "serve", f"lm={folders['lm']}", option, "2"]
    process = subprocess.Popen([*command, "--port", "0", "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = process.stderr.readline().split()[3]
    threading.Thread(target=process.stderr.read, daemon=True).start()
    body = {"prompt": "x", "temperature": 0, "max_tokens": 200}

    def get(path: str) -> httpx.Response:
        return httpx.get(url + path, timeout=PATIENCE)

    def pids() -> list[int]:
        found = get("/readyz")
        return [one["pid"] for one in found.json()["workers"]] if found.status_code == 200 else []

    def ask(_: Any = None) -> Any:
        return httpx.post(url + "/v1/completions", json=body, timeout=PATIENCE).json()["choices"]

    try:
        until(lambda: len(pids()) == count)
        with ThreadPoolExecutor(16) as pool:
            expected = ask()
            assert list(pool.map(ask, range(31))) == [expected] * 31
            counted = [line for line in get("/metrics").text.splitlines() if line.startswith("vllm:request_success")]
            assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 32
            dead, *alive = pids()
            os.kill(dead, signal.SIGKILL)
            until(lambda: pids()[1:] == alive and dead not in pids())
            until(lambda: len(pids()) == count)
            assert ask() == expected
            streams = [httpx.stream("POST", url + "/v1/completions", json=body | {"stream": True}) for _ in range(8)]
            opened = [one.__enter__() for one in streams]
            lines = [answer.iter_lines() for answer in opened]
            firsts = [next(one) for one in lines]
            process.send_signal(signal.SIGTERM)
            for first, rest, one in zip(firsts, lines, streams, strict=True):
                data = [json.loads(line[6:]) for line in [first, *rest] if line.startswith("data: {")]
                assert "".join(part["choices"][0]["text"] for part in data) == expected[0]["text"]
                one.__exit__(None, None, None)
        assert process.wait(PATIENCE) == 0
        again = [*command, "--port", url.rpartition(":")[2].strip("/")]
        process = subprocess.Popen([*again, "--device", "cpu"], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None and url in process.stderr.readline()  # at once
    finally:
        process.kill()
