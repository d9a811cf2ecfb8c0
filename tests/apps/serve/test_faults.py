"""Faults of a model are errors of the server (5xx): numbers that are not finite, folders that cannot be loaded. And
one client's requests do not take the places of all."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from allyouneed.apps.serve.engine.forward import CHUNK, ForwardJob, ForwardQueue, current_client
from allyouneed.apps.serve.engine.places import SHARE, refusal
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Settings
from allyouneed.infer.decoding.rules import NonFiniteError
from served import BOTH_WAYS, served_client
from waiting import PATIENCE, until

GREEDY = {"temperature": 0, "max_tokens": 6}
START = "the cat sat on the mat and the dog sat on the log"


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def poison(running: Any, name: str, text: str) -> None:
    """From now on the model computes NaN for texts with this token."""
    model = running.model(name)
    folder = model.predictor.folder
    (token,) = folder.tokenizers.source.encode(text)[-1:]

    def change() -> None:
        with torch.no_grad():
            model.predictor.model.embed.tokens.weight[token] = math.nan

    model.loop.run(change).result(PATIENCE)


@BOTH_WAYS
def test_non_finite_logits_are_an_error_and_leave_nothing_behind(
    folders: dict[str, Path], split: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with served_client({"lm": folders["lm"]}, split=split) as (running, client), ThreadPoolExecutor(8) as pool:

        def ask(prompt: str, **more: Any) -> httpx.Response:
            return client.post("/v1/completions", json=GREEDY | {"prompt": prompt} | more)

        model = ask("x").json()["model"]
        running.model(model).predictor.model.head.weight = torch.nn.Parameter(  # not tied to the embeddings
            running.model(model).predictor.model.head.weight.detach().clone()
        )
        expected = [ask(f"{START} {n}").json()["choices"] for n in range(4)]
        poison(running, model, "é")
        for _ in range(3):
            broken = [pool.submit(ask, f"{START} é {n}") for n in range(4)]
            right = [pool.submit(ask, f"{START} {n}") for n in range(4)]
            for one in broken:
                assert one.result().status_code == 500 and one.result().json()["error"]["code"] == "non_finite"
                assert "not finite" in one.result().json()["error"]["message"]
            assert [one.result().json()["choices"] for one in right] == expected
        assert ask("é", stream=True).status_code == 500
        (token,) = running.model("lm").text.tokenizer.encode("é")[-1:]
        forced = ask(START, stream=True, logit_bias={str(token): 100}).text.split("\n\n")
        events = [json.loads(line[6:]) for line in forced if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "non_finite" and "choices" not in events[-1]
        assert [ask(f"{START} {n}").json()["choices"] for n in range(4)] == expected
        if not split:
            assert metric(client, 'vllm:request_success_total{finished_reason="error"') == 14
        assert "a request of lm failed: the model computed numbers that are not finite" in caplog.text
        assert "Traceback" not in caplog.text


def test_embeddings_that_are_not_finite_are_an_error(folders: dict[str, Path]) -> None:
    with served_client({"embedder": folders["embedder"]}) as (running, client), ThreadPoolExecutor(8) as pool:

        def ask(text: str, kind: str) -> httpx.Response:
            return client.post("/v1/embeddings", json={"input": text, "encoding_format": kind})

        expected = ask("a dog", "float").json()["data"]
        poison(running, "embedder", "é")
        for kind in ("float", "base64"):
            both = [pool.submit(ask, text, kind) for text in ("é", "a dog", "a é dog", "a dog") * 3]
            assert [one.result().status_code for one in both] == [500, 200] * 6
            assert both[0].result().json()["error"]["code"] == "non_finite"
        found = ask("a dog", "float").json()["data"][0]["embedding"]
        assert found == pytest.approx(expected[0]["embedding"], abs=1e-5)


def test_a_pass_that_is_not_finite_fails_its_own_job_as_a_fault_of_the_server() -> None:
    def compute(some: list[Any]) -> list[Any]:
        if "sound" in some:
            raise NonFiniteError  # as decoding a sound
        return [torch.tensor([math.nan if one == "bad" else 1.0]) for one in some]

    queue, jobs = ForwardQueue(), [ForwardJob("k", [name, "x"], compute) for name in ("bad", "good", "sound")]
    for job in jobs:
        queue.add(job)
    while queue.jobs:
        queue.run_round()
    assert len(jobs[1].future.result()) == 2
    for job in (jobs[0], jobs[2]):
        with pytest.raises(ApiError, match="not finite") as found:
            job.future.result()
        assert (found.value.status, found.value.code) == (500, "non_finite")


@BOTH_WAYS
def test_a_folder_that_cannot_be_loaded_is_a_fault_of_the_server(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, split: bool
) -> None:
    """The log says why; a client learns neither that nor where it is."""
    secret = tmp_path / "secret-place"
    for name in ("config", "weights"):
        shutil.copytree(folders["lm"], secret / name)
    (secret / "config" / "config.json").write_text("{")
    (secret / "weights" / "model.safetensors").write_bytes(b"nothing")
    with served_client({name: secret / name for name in ("config", "weights")}, split=split) as (_, client):
        for name in ("config", "weights"):
            for path in ("/v1/completions", "/v1/embeddings"):
                body = {"model": name, "prompt": "x"} if path == "/v1/completions" else {"model": name, "input": "x"}
                answer = client.post(path, json=body)
                assert answer.status_code == 500 and "secret-place" not in answer.text, answer.text
                assert f"the model {name} cannot be loaded" in answer.json()["error"]["message"]
        assert str(secret / "config") in caplog.text
        assert "secret-place" not in client.get("/readyz").text + client.get("/metrics").text


def test_one_client_cannot_take_all_places_of_the_queue(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Settings().limits.model_copy(update={"queue": 64})
    keys = ("first-key", "second-key")
    with (
        served_client({"lm": folders["lm"]}, keys=keys, limits=limits) as (running, client),
        ThreadPoolExecutor(40) as pool,
    ):

        def ask(key: str, n: int) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json=GREEDY | {"prompt": "x", "n": n}, headers=headers)

        assert ask("first-key", 1).status_code == 200
        loop, go = running.model("lm").loop, threading.Event()
        scheduler = loop.schedulers[False]
        step = scheduler.step
        monkeypatch.setattr(scheduler, "step", lambda: (go.wait(PATIENCE), step()))
        many = [pool.submit(ask, "first-key", 8) for _ in range(16)]
        until(lambda: sum(one.done() for one in many) == 16 - 64 * SHARE // (SHARE + 1) // 8)
        refused = [one.result() for one in many if one.done()]
        assert {one.status_code for one in refused} == {429}
        assert "48 sequences of yours are running or waiting" in refused[0].json()["error"]["message"]
        others = [pool.submit(ask, "second-key", 4) for _ in range(2)]
        until(lambda: loop.sequences == 48 + 8)
        go.set()
        assert [one.result().status_code for one in others] == [200, 200]
        assert sorted(one.result().status_code for one in many) == [200] * 6 + [429] * 10
        until(lambda: not loop.sequences)
        assert not any(loop.held.values())


def test_each_client_has_a_share_and_there_is_room_for_another() -> None:
    taken = Counter[str]()
    for clients in (1, 2, 3, 9):
        taken = Counter({f"client {n}": 0 for n in range(clients)})
        while any(not refusal(4096, taken, name, 1, "sequences") for name in taken):
            for name in taken:
                taken[name] += not refusal(4096, taken, name, 1, "sequences")
        assert max(taken.values()) - min(taken.values()) <= 1
        assert abs(min(taken.values()) - SHARE * 4096 / (SHARE * clients + 1)) <= 2
        assert not refusal(4096, taken, "another", 16, "sequences")
    assert "the limit is 4096" in str(refusal(4096, taken, "another", 4000, "sequences"))
    assert not refusal(4, Counter(), "one", 3, "sequences") and not refusal(1, Counter(), "one", 1, "sequences")


def test_a_long_document_waits_for_its_own_places(folders: dict[str, Path]) -> None:
    """The parts of a text that a translator splits take places one by one, no more than the share of their client."""
    limits = Settings().limits.model_copy(update={"queue": 8})
    with served_client({"translator": folders["translator"]}, limits=limits) as (_, client):
        texts = [f"the cat {n} sat on the mat" for n in range(30)]
        answer = client.post("/translate", json={"q": texts, "source": "auto", "target": "en"})
        assert answer.status_code == 200 and len(answer.json()["translatedText"]) == 30


def test_forward_jobs_of_one_client_hold_up_no_other() -> None:
    queue = ForwardQueue()
    many = [ForwardJob("k", range(50), lambda some: some, client="many") for _ in range(3 * CHUNK)]
    few = ForwardJob("k", range(60), lambda some: some, client="few")
    for job in (*many, few):
        queue.add(job)
    assert queue.sizes() == {"many": 150 * CHUNK, "few": 60}
    queue.run_round()
    assert few.future.done() and not any(job.future.done() for job in many)
    while queue.jobs:
        queue.run_round()
    assert all(job.future.result() == list(range(50)) for job in many)


def test_places_for_forward_passes_are_shared_too(folders: dict[str, Path]) -> None:
    limits = Settings().limits.model_copy(update={"queue": 40})
    with served_client({"embedder": folders["embedder"]}, limits=limits) as (running, client):
        client.post("/v1/embeddings", json={"input": "x"})
        loop, go = running.model("embedder").loop, threading.Event()
        begun = threading.Event()
        loop.run(lambda: (begun.set(), go.wait(PATIENCE)))
        assert begun.wait(PATIENCE)

        def add(client: str, count: int) -> Any:
            current_client.set(client)
            return loop.compute("k", range(count), list)

        jobs = [add("first", 30)]
        with pytest.raises(Exception, match="30 inputs of yours are running or waiting and 1 are new"):
            add("first", 1)
        jobs.append(add("second", 6))
        go.set()
        assert [len(job.result(PATIENCE)) for job in jobs] == [30, 6]


def test_prompt_tokens_of_forward_passes_are_counted(folders: dict[str, Path]) -> None:
    served = {name: folders[name] for name in ("embedder", "classifier", "masked")}
    with served_client(served) as (_, client):

        def tokens(model: str) -> float:
            return metric(client, f'vllm:prompt_tokens_total{{model_name="{model}"')

        answer = client.post("/v1/embeddings", json={"model": "embedder", "input": ["a dog", "the cat"]}).json()
        until(lambda: tokens("embedder") == answer["usage"]["prompt_tokens"] > 4)
        client.post("/v1/tasks/classification", json={"model": "classifier", "inputs": ["a dog"]})
        client.post("/v1/tasks/fill-mask", json={"model": "masked", "inputs": ["a <mask> dog"]})
        until(lambda: tokens("classifier") > 0 and tokens("masked") > 0)
