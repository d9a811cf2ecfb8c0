"""The engine loop and the registry: disconnects, failures, fairness, loading and unloading."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from allyouneed.apps.serve.engine import loop as engine_loop
from allyouneed.apps.serve.engine.delivery import CROWD, Delivery, TokenOutlet
from allyouneed.apps.serve.engine.forward import CHUNK, ForwardJob, ForwardQueue
from allyouneed.apps.serve.engine.loop import MANY, CallCancelled
from allyouneed.apps.serve.engine.registry import parse_folders
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.models import shipped
from served import BOTH_WAYS, Running, served_client
from waiting import PATIENCE, until

LONG = {"model": "lm", "prompt": "x", "max_tokens": 240, "temperature": 0}


@BOTH_WAYS
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_a_step(folders: dict[str, Path], stream: bool, split: bool) -> None:
    with served_client({"lm": folders["lm"]}, split=split) as (running, client):
        client.post("/v1/completions", json=LONG | {"max_tokens": 1})
        loop = running.model("lm").loop
        scheduler = loop.schedulers[False]
        ended: list[tuple[int, int]] = []
        report, steps = loop._report, []

        def watch(exact: bool, scheduler: Any) -> None:
            cancelled = [state for state in loop.states[exact] if state.cancelled]
            report(exact, scheduler)
            ended.extend((scheduler.steps, len(state.tokens)) for state in cancelled)
            steps.append(scheduler.steps)
            if len(steps) == 3:  # so that the request lasts until the server knows that its client has left
                until(lambda: all(state.cancelled for state in loop.states[exact]))

        loop._report = watch
        if stream:
            with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
                next(answer.iter_lines())
        else:
            body = json.dumps(LONG).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            with socket.create_connection(("127.0.0.1", running.port)) as leaving:
                leaving.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
                until(lambda: len(steps) == 3)
        until(lambda: bool(ended))
        assert ended[0][0] == steps[2] + 1 and ended[0][1] < 240 and not loop.sequences
        until(lambda: scheduler.idle)
        assert not scheduler.active
        assert running.gate.in_progress == 0


def test_a_call_whose_client_leaves_ends_quietly(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """An error in it, which no client receives, is logged without its message."""
    with served_client({"translator": folders["translator"]}) as (running, client):
        client.post("/translate", json={"q": "x", "source": "auto", "target": "en"})
        model = running.model("translator")
        for error in (CallCancelled(), RuntimeError("secret")):
            begun, go, ended = threading.Event(), threading.Event(), threading.Event()

            def function(error: Exception = error, begun: Any = begun, go: Any = go, ended: Any = ended) -> None:
                begun.set()
                go.wait(PATIENCE)
                ended.set()
                raise error

            call = asyncio.run_coroutine_threadsafe(model.call(function, "", False), model.loop.delivery.event_loop)
            assert begun.wait(PATIENCE)
            call.cancel()
            for _ in range(3):  # until the event loop has cancelled it
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), model.loop.delivery.event_loop).result(PATIENCE)
            go.set()
            assert ended.wait(PATIENCE)
        until(lambda: "after its client had left" in caplog.text)
        gc.collect()
        assert "RuntimeError" in caplog.text and "secret" not in caplog.text
        assert "never retrieved" not in caplog.text and "CallCancelled" not in caplog.text


@BOTH_WAYS
def test_a_failed_step_fails_its_requests_and_the_server_lives(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, split: bool
) -> None:
    with served_client({"lm": folders["lm"]}, split=split) as (_, client):
        good = client.post("/v1/completions", json=LONG | {"max_tokens": 5})
        with monkeypatch.context() as patch:
            patch.setattr(RunningBatch, "append_tokens", lambda *_: 1 / 0)
            failed = client.post("/v1/completions", json=LONG | {"prompt": "my secret"})
            assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        again = client.post("/v1/completions", json=LONG | {"max_tokens": 5})
        assert again.json()["choices"] == good.json()["choices"]
        assert "secret" not in caplog.text


def test_a_short_request_does_not_wait_for_a_long_one(server: Running, client: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as pool, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as long:
        lines = long.iter_lines()
        next(lines)
        short = pool.submit(lambda: client.post("/v1/completions", json=LONG | {"max_tokens": 2, "model": "gpt"}))
        assert short.result().status_code == 200
        loop = server.model("lm").loop
        running = [len(state.tokens) for state in loop.states[False]]
        assert running and running[0] < 240  # still there
        assert json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["choices"]


@BOTH_WAYS
def test_models_are_loaded_when_asked_for_and_the_least_recent_is_unloaded(
    folders: dict[str, Path], split: bool
) -> None:
    three = {name: folders[name] for name in ("lm", "seq2seq", "translator")}
    size = max((path / "model.safetensors").stat().st_size for path in three.values())
    with served_client(three, default="seq2seq", memory=2 * size, split=split) as (running, client):

        def ask(**body: Any) -> str:
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "temperature": 0} | body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["model"])

        def loaded() -> set[str]:
            return {name for name, entry in running.registry.entries.items() if entry.model is not None}

        assert loaded() == set()
        assert ask() == "seq2seq" and loaded() == {"seq2seq"}
        assert ask(model="lm") == "lm" and ask() == "seq2seq"
        assert ask(model="translator") == "translator" and loaded() == {"seq2seq", "translator"}
        assert ask(model="lm") == "lm" and loaded() == {"lm", "translator"}
        assert len(client.get("/v1/models").json()["data"]) == 3
    with served_client(three, memory=size // 2, split=split) as (_, client):
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "limit" in refused.json()["error"]["message"]


def test_after_many_answers_the_next_requests_are_read_together(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "PAUSE", 20.0)
    monkeypatch.setattr(engine_loop, "LONGEST_WAIT", 20.0)
    with served_client({"lm": folders["lm"]}) as (running, client), ThreadPoolExecutor(MANY) as pool:
        client.post("/v1/completions", json=LONG | {"max_tokens": 1})
        loop = running.model("lm").loop
        prefill, started = loop.schedulers[False].prefill, []
        start = prefill.start
        monkeypatch.setattr(prefill, "start", lambda requests: (started.append(len(requests)), start(requests)))
        until(lambda: not loop.sequences)
        with loop.changed:
            loop.ended_together = MANY  # as if that many had just ended

        def ask(number: int) -> int:
            loop.wake()  # for another reason: it does not end the wait
            body = LONG | {"prompt": f"x {number}", "max_tokens": 3}
            return client.post("/v1/completions", json=body).status_code

        assert set(pool.map(ask, range(MANY))) == {200} and started == [MANY]


def test_names_of_folders(folders: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "my-run" / "model"
    run.mkdir(parents=True)
    assert parse_folders([str(run), f"a={folders['lm']}"]) == {"my-run": run, "a": folders["lm"]}
    assert parse_folders([]) == parse_folders(["translator"]) == {"translator": shipped()}
    assert parse_folders(["translator", f"a={folders['lm']}"]) == {"translator": shipped(), "a": folders["lm"]}
    assert parse_folders(["de=translator"]) == {"de": shipped()}
    for wrong in (["no/such"], [f"a={run}", f"a={run}"], [f"={run}"]):
        with pytest.raises(UserError):
            parse_folders(wrong)


def test_forward_jobs_that_arrive_together_are_computed_together() -> None:
    queue, batches = ForwardQueue(), []

    def compute(some: list[int]) -> list[int]:
        batches.append(len(some))
        if 13 in some:
            raise UserError("13")
        return [-number for number in some]

    jobs = [ForwardJob("k", numbers, compute) for numbers in (range(14, 2000), [1, 2], [13], [3])]
    other = ForwardJob("other", [5], compute)
    for job in (*jobs, other):
        queue.add(job)
    rounds = 0
    while queue.jobs:
        queue.run_round()
        rounds += 1
        if rounds == 1:  # a long list does not hold up short ones
            assert jobs[1].future.result() == [-1, -2] and jobs[3].future.result() == [-3]
            with pytest.raises(UserError):
                jobs[2].future.result()
        if rounds == 2:
            assert other.future.result() == [-5]
    assert jobs[0].future.result() == [-number for number in range(14, 2000)]
    assert max(batches) <= CHUNK and batches[0] > 64


def test_many_streams_get_their_tokens_together_but_first_and_last_ones_at_once() -> None:
    delivered: list[tuple[Any, Any]] = []

    event_loop: Any = SimpleNamespace(
        is_closed=lambda: False, call_soon_threadsafe=lambda _, outbox: delivered.extend(outbox)
    )

    def step(tokens: int, ends: Any = None) -> dict[str, list[Any]]:
        delivered.clear()
        for outlet in outlets:
            for token in range(tokens):
                outlet(token)
        if ends is not None:
            delivery.post_end(ends, 1, ended)
        delivery.deliver()
        found: dict[str, list[Any]] = {}
        for queue, (_, given) in delivered:
            found.setdefault(queue, []).append(given)
        return found

    delivery = Delivery(event_loop)
    ended: Any = SimpleNamespace(request=SimpleNamespace(sample_key=(0, 0)))
    outlets = [TokenOutlet(delivery, f"queue {n}", 0) for n in range(CROWD + 1)]
    first = step(1)
    assert len(first) == len(outlets) and first["queue 3"] == [[0]]
    delivery.delivered = time.monotonic() + 60  # as if all of them had just been delivered
    assert step(2) == {}
    assert step(1, ends=outlets[5].queue) == {"queue 5": [[0, 1, 0], None]}  # in order
    delivery.delivered = 0.0
    rest = step(1)
    assert rest["queue 5"] == [[0]] and rest["queue 7"] == [[0, 1, 0, 0]]
    outlets = outlets[:CROWD]
    delivery.delivered = time.monotonic() + 60
    assert len(step(1)) == CROWD  # up to this many get them after every step


def test_equal_options_share_a_specification_but_no_seed(server: Running, client: httpx.Client) -> None:
    client.post("/tokenize", json={"model": "lm", "prompt": "x"})  # loads it
    text = server.model("lm").text
    prompt = [5, 6]

    def spec(**fields: Any) -> DecodingSpec:
        given = SamplingFields(**fields)
        found: DecodingSpec = text.spec(text.encode(prompt, given, 9), given)
        return found

    greedy = {"temperature": 0.0}
    assert spec(**greedy) is spec(**greedy)
    assert spec(**greedy, min_tokens=3).decoding.min_length == 3 and spec(**greedy).decoding.min_length == 0
    assert spec(**greedy, stop="a").decoding.stop == ("a",) and spec(**greedy).decoding.stop == ()
    assert spec(seed=4) is spec(seed=4) and spec(seed=4).decoding.seed == 4 and spec(seed=5).decoding.seed == 5
    assert len({spec(top_k=7).decoding.seed for _ in range(8)}) == 8
    assert spec(top_k=7).decoding.top_k == 7 and spec(top_k=8).decoding.top_k == 8
    body = {"model": "lm", "prompt": prompt, "max_tokens": 9, "min_tokens": 10, "temperature": 0}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
