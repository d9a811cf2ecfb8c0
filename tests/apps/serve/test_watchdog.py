"""Readiness follows the engine: a step that hangs, an engine loop that has ended, a process that does not answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from allyouneed.apps.serve.engine import watchdog
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers import phases as phases_module
from allyouneed.apps.serve.workers.phases import Phases
from allyouneed.apps.serve.workers.supervisor import ServerTask, Supervisor
from served import BOTH_WAYS, served_client
from waiting import PATIENCE, until

ASK = {"model": "lm", "prompt": "x", "max_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 0.02)


def limits(**changes: float) -> Any:
    return Settings().limits.model_copy(update={"step_seconds": 0.1} | changes)


def stuck_seconds(client: httpx.Client) -> float:
    (line,) = (line for line in client.get("/metrics").text.splitlines() if line.startswith("allyouneed:engine_stuck"))
    return float(line.rsplit(" ", 1)[1])


def test_a_server_whose_step_hangs_is_not_ready_until_it_ends(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served_client({"lm": folders["lm"]}, limits=limits()) as (running, client), ThreadPoolExecutor(1) as pool:
        expected = client.post("/v1/completions", json=ASK).json()["choices"]
        until(lambda: client.get("/readyz").status_code == 200)
        assert stuck_seconds(client) == 0
        scheduler, go = running.model("lm").loop.schedulers[False], threading.Event()
        step = scheduler.step

        def hang_in_a_driver() -> None:
            go.wait(PATIENCE)
            step()

        monkeypatch.setattr(scheduler, "step", hang_in_a_driver)
        waiting = pool.submit(lambda: client.post("/v1/completions", json=ASK))
        until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/readyz").json()["status"].startswith("a step of lm has taken ")
        assert stuck_seconds(client) > 0.1 and not waiting.done()
        assert client.get("/healthz").status_code == 200  # requests wait for it
        assert "a step of lm" in caplog.text and "hang_in_a_driver" in caplog.text  # where it hangs
        go.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert waiting.result().json()["choices"] == expected
        assert stuck_seconds(client) == 0 and "the engine of lm continues" in caplog.text


def test_a_process_whose_step_hangs_for_longer_than_a_request_waits_is_not_healthy(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_client({"lm": folders["lm"]}, limits=limits()) as (running, client):
        client.post("/v1/completions", json=ASK)
        go, scheduler = threading.Event(), running.model("lm").loop.schedulers[False]
        running.gate.limits.__dict__["request_seconds"] = 0.3
        monkeypatch.setattr(scheduler, "step", lambda: go.wait(PATIENCE))
        assert client.post("/v1/completions", json=ASK).status_code == 504
        until(lambda: client.get("/healthz").status_code == 503)
        assert "a step of lm" in client.get("/healthz").json()["status"]
        go.set()
        until(lambda: client.get("/healthz").status_code == 200)


@pytest.mark.parametrize("fatal", [False, True])
def test_an_engine_loop_that_fails_answers_and_one_that_ends_is_not_ready(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fatal: bool
) -> None:
    with served_client({"lm": folders["lm"]}, limits=limits()) as (running, client):
        expected = client.post("/v1/completions", json=ASK).json()["choices"]
        loop = running.model("lm").loop
        until(lambda: not loop.sequences)
        with monkeypatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda _: None)

            def fail(*_: Any) -> None:
                raise SystemExit if fatal else ZeroDivisionError

            patch.setattr(loop, "_report", fail)
            failed = client.post("/v1/completions", json=ASK)
            assert failed.status_code == (503 if fatal else 500), failed.text
            if fatal:
                loop.thread.join(PATIENCE)
        again = client.post("/v1/completions", json=ASK)
        if fatal:
            assert again.status_code == 503 and "has stopped computing" in again.json()["error"]["message"]
            until(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/readyz").json()["status"] == "the engine of lm has ended"
        else:
            assert again.json()["choices"] == expected
            until(lambda: client.get("/readyz").status_code == 200)


def test_a_worker_without_a_sign_of_life_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped, or hangs with the interpreter's lock held."""
    phases = Phases(tmp_path, 2, own=1)
    phases.publish("ready")
    assert phases.read() == [{"pid": None, "status": "starting"}, {"pid": os.getpid(), "status": "ready"}]
    monkeypatch.setattr(phases_module, "SILENT", -1.0)
    assert phases.read()[1]["status"].startswith("not responding for ")
    phases.publish("loading lm")
    assert phases.read()[1]["status"] == "loading lm"
    assert phases.silence(1, os.getpid()) < PATIENCE and phases.silence(1, os.getpid() + 1) == 0
    phases.publish("a step of lm has taken 700 s", since=-700.0)
    assert phases.silence(1, os.getpid()) > 700
    monkeypatch.setattr(Path, "replace", lambda *_: os.remove("/no/such/file"))  # as on a full disk
    phases.publish("ready")
    assert phases.silence(1, os.getpid()) == 0 and phases.read()[1]["status"] == "starting"


FAKE = """\
import json, os, sys, time
from pathlib import Path
task = json.loads(sys.stdin.buffer.readline())
name = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"worker-{task['worker']}")
late = 1000.0 if task["worker"] == 0 and not name.exists() else 0.0  # stuck, the first time
while True:
    content = {"pid": os.getpid(), "status": "ready", "beat": time.monotonic() - late}
    name.with_suffix(".new").write_text(json.dumps(content))
    name.with_suffix(".new").replace(name)
    time.sleep(0.05)
"""


def test_the_supervisor_ends_a_worker_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(ServerTask({}, Settings(port=0)), 2, ["cpu"], [sys.executable, "-c", FAKE])
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    until(lambda: all(worker.process is not None for worker in supervisor.workers))
    until(lambda: "it is ended" in caplog.text)
    until(lambda: [one["status"] for one in supervisor.phases.read()] == ["ready", "ready"])
    assert [worker.failures for worker in supervisor.workers] == [1, 0]
    supervisor._on_signal(signal.SIGTERM, None)
    thread.join(PATIENCE)
    assert not thread.is_alive() and "worker 0 (pid " in caplog.text and "has been stuck for 10" in caplog.text


@BOTH_WAYS
@pytest.mark.parametrize("open_probes", [True, False])
def test_probes_need_no_key_unless_they_are_closed(folders: dict[str, Path], split: bool, open_probes: bool) -> None:
    key = {"authorization": "Bearer secret-key"}
    with served_client({"lm": folders["lm"]}, keys=("secret-key",), open_probes=open_probes, split=split) as (
        _,
        client,
    ):
        for path in ("/healthz", "/readyz", "/metrics"):
            until(lambda path=path: client.get(path, headers=key).status_code == 200)
            assert client.get(path).status_code == (200 if open_probes else 401)
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == (
                200 if open_probes else 401
            )
        assert client.get("/v1/models").status_code == 401
        assert json.loads(client.get("/healthz", headers=key).text) == {"status": "ok"}
