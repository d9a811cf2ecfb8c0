"""The blocks behind the server: prefixes and prompts of all clients are read once, answers stay those of the library,
every block comes back, and a long prompt does not hold up short ones. Work is counted in engine steps and tokens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from allyouneed.apps.serve.engine import served_model
from allyouneed.apps.serve.engine.served_model import LEAST_PREFIXES, PoolSize, ServedModel
from allyouneed.infer.block_manager import block_bytes
from allyouneed.infer.cuda_graph import paged_prefill
from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from served import Running, served_client
from waiting import PATIENCE, until

START = "the cat sat on the mat and the dog sat on the log while it was raining in the garden "
BODY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def paged(folders: dict[str, Path]) -> Any:
    with served_client({"lm": folders["lm"], "translator": folders["translator"]}, budget=48) as both:
        yield both


def ask(client: httpx.Client, **body: Any) -> list[str]:
    answer = client.post("/v1/completions", json=BODY | body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def scheduler_of(running: Running, exact: bool = False) -> Scheduler:
    found: Scheduler = running.model("lm").loop.schedulers[exact]
    return found


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def read_tokens(running: Running, patch: pytest.MonkeyPatch, exact: bool = False) -> list[int]:
    """Tokens of each prefill from now on: rows times time."""
    found: list[int] = []
    runner = scheduler_of(running, exact).runner
    prefill = runner.prefill_chunk

    def watched(states: Any, chunks: Any, *rest: Any) -> Any:
        found.append(sum(map(len, chunks)))
        return prefill(states, chunks, *rest)

    patch.setattr(runner, "prefill_chunk", watched)
    return found


def test_graphs_are_captured_before_the_first_request(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the graphs themselves."""
    monkeypatch.setattr(ServedModel, "captures", True)
    monkeypatch.setattr(ModelRunner, "captures", True)
    monkeypatch.setattr(PagedPrefill, "enabled", True)
    monkeypatch.setattr(paged_prefill, "WARM_LENGTHS", (32, 64))
    monkeypatch.setattr(
        GraphRunnerCache, "admits", lambda self, some: self.suits(some[0].spec, [state.request for state in some])
    )
    with served_client({"lm": folders["lm"]}, rows=4) as (running, client):
        phases: list[str] = []
        running.registry.on_phase = phases.append
        assert ask(client, prompt="warm") and phases[:2] == ["loading lm", "loading lm: capturing CUDA graphs"]
        scheduler = scheduler_of(running)
        assert scheduler.prefill.captured is not None and scheduler.slots is not None
        captured = set(scheduler.prefill.captured.graphs)
        assert captured and len(scheduler.slots.batches) == 2  # greedy and sampled
        tokens = len(client.post("/tokenize", json={"model": "lm", "prompt": "warm"}).json()["tokens"])
        assert metric(client, "vllm:prefix_cache_queries_total") == tokens
        read = read_tokens(running, monkeypatch)
        prompts = [START[:n] for n in (10, 40, 80)] * 2
        found = [ask(client, prompt=prompt) for prompt in prompts]
        assert not read and set(scheduler.prefill.captured.graphs) == captured
    with served_client({"lm": folders["lm"]}, exact=True) as (_, client):
        assert [ask(client, prompt=prompt) for prompt in prompts] == found


def test_clients_share_prefixes_and_get_the_answers_of_the_library(paged: tuple[Running, httpx.Client]) -> None:
    running, client = paged
    prompts = [START + end for end in ("", "and", "but it", "then the bird", "and")] * 3
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(client, prompt=prompt), prompts))
    predictor = running.model("lm").predictor
    shared, predictor.engine.shared = predictor.engine.shared, None  # a scheduler of its own, not paged
    try:
        for prompt, answers in zip(prompts[:5], found, strict=False):
            whole = predictor.generate([prompt], method="greedy", max_length=12, loops=None)[0]
            assert [prompt + answers[0]] == [whole] or answers[0] == whole.removeprefix(prompt)
    finally:
        predictor.engine.shared = shared
    assert found == found[:5] * 3
    tokens = len(client.post("/tokenize", json={"model": "lm", "prompt": START}).json()["tokens"])
    assert metric(client, "vllm:prefix_cache_hits_total") >= tokens // 8 * 8
    blocks = scheduler_of(running).blocks
    assert blocks is not None and blocks.pool.used == blocks.pool.evictable == len(blocks.prefixes.blocks) > 0
    assert metric(client, 'allyouneed:kv_cache_blocks{model_name="lm",state="used"}') == 0
    assert metric(client, 'vllm:kv_cache_usage_perc{model_name="lm"}') == 0
    assert metric(client, "vllm:cache_config_info{") == 1


@pytest.mark.parametrize("exact", [False, True])
def test_samples_of_one_prompt_are_prefilled_once(
    paged: tuple[Running, httpx.Client], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, client = paged
    body: dict[str, Any] = {"temperature": 1, "seed": 3, "exact": exact, "logprobs": 1}
    ask(client, prompt="x", **body)  # so that there is a scheduler
    read = read_tokens(running, monkeypatch, exact)
    prompt = f"a prompt that no other test has, {exact}"
    answer = client.post("/v1/completions", json=BODY | body | {"prompt": prompt, "n": 4, "best_of": 6}).json()
    assert answer["usage"]["prompt_tokens"] == sum(read)
    # each sample is the one of a request for fewer: bit for bit in exact mode
    fewer = client.post("/v1/completions", json=BODY | body | {"prompt": prompt, "n": 6}).json()["choices"]
    alone = client.post("/v1/completions", json=BODY | body | {"prompt": prompt, "n": 1}).json()["choices"][0]
    assert alone["text"] == fewer[0]["text"] and (not exact or alone["logprobs"] == fewer[0]["logprobs"])
    assert {one["text"] for one in answer["choices"]} <= {one["text"] for one in fewer}


def test_a_client_that_leaves_frees_its_blocks(
    paged: tuple[Running, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next step. Between two steps the engine waits here until the client has left, and the server knows."""
    running, client = paged
    ask(client, prompt="x")
    loop, blocks = running.model("lm").loop, scheduler_of(running).blocks
    assert blocks is not None
    report, begun = loop._report, threading.Event()
    held: list[int] = []  # blocks, after each step

    def watch(exact: bool, scheduler: Any) -> None:
        report(exact, scheduler)
        held.append(blocks.pool.used - blocks.pool.evictable)
        if len(held) == 2:  # each row has written a block of its own
            begun.set()
            until(lambda: all(state.cancelled for state in loop.states[exact]))

    monkeypatch.setattr(loop, "_report", watch)
    long = {"prompt": "a long answer", "max_tokens": 200, "temperature": 0, "n": 3, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as answer:
        next(answer.iter_lines())
        assert begun.wait(PATIENCE)
    until(lambda: not loop.sequences and len(held) > 2)
    assert held[1] >= 3 and held[2] == 0 and not scheduler_of(running).active


def test_a_model_without_shared_prefixes_is_not_paged(
    paged: tuple[Running, httpx.Client], folders: dict[str, Path]
) -> None:
    running, client = paged
    ask(client, model="translator", prompt="the cat", temperature=1)
    assert running.model("translator").loop.schedulers[False].blocks is None
    with served_client({"lm": folders["lm"]}, paged=False) as (unpaged, other):
        assert ask(other, prompt=START, n=2) == ask(client, prompt=START, n=2)
        assert scheduler_of(unpaged).blocks is None and scheduler_of(running).blocks is not None
    with served_client({"lm": folders["lm"]}, kv_memory=20_000) as (small, other):
        refused = other.post("/v1/completions", json=BODY | {"model": "lm", "prompt": START, "max_tokens": 100})
        assert refused.status_code == 400 and "the pool has" in refused.json()["error"]["message"]
        blocks = small.model("lm").loop.schedulers[False].blocks
        assert blocks.pool.blocks * block_bytes(small.model("lm").predictor.engine.runner) <= 20_000


def test_short_requests_beside_a_very_long_one(
    paged: tuple[Running, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is read in chunks beside the short ones. These are finished while it is read, each in a few steps
    more than it has tokens; and it advances at every step, however many short ones arrive."""
    running, client = paged
    ask(client, prompt="x")
    scheduler, model = scheduler_of(running), running.model("lm")
    loop, tokens, waves = model.loop, 4, 6
    monkeypatch.setattr(scheduler, "budget", 12)
    spec = model.predictor.engine.runner.spec(Decoding(method="greedy", min_length=tokens))
    states: list[RequestState] = []
    first_step: dict[RequestState, int] = {}
    steps: dict[RequestState, int] = {}
    progress: list[int] = []
    finished, report = threading.Event(), loop._report

    def submit(prompts: list[list[int]], limit: int) -> None:
        wanted = [(Request(one, limit, (0,)), spec) for one in prompts]
        states.extend(loop.submit(wanted))
        first_step.update(dict.fromkeys(states[-len(wanted) :], scheduler.steps))

    def watch(exact: bool, scheduler: Any) -> None:
        progress.extend(batch.read[0] for batch in scheduler.prefill.batches if states[0] in batch.requests)
        steps.update((one, scheduler.steps - first_step[one]) for one in states if one.done and one not in steps)
        if len(states) < 1 + 3 * waves and scheduler.steps % 2:
            submit([[5 + len(states) + n, 6, 7] for n in range(3)], tokens)
        report(exact, scheduler)
        if len(steps) == 1 + 3 * waves:
            finished.set()

    monkeypatch.setattr(loop, "_report", watch)
    with loop.changed:  # the loop waits
        submit([[3 + n % 200 for n in range(240)]], 8)
    assert finished.wait(PATIENCE) and len(steps) == 1 + 3 * waves
    assert max(steps[one] for one in states[1:]) <= tokens + 6
    assert all(one.done for one in states) and steps[states[0]] > 240 // 12
    chunks = [after - before for before, after in pairwise([0, *progress])]
    assert min(chunks) >= 3 and max(chunks) <= 12  # a share at every step, and never more than the bound


def test_cached_prefixes_stay_within_their_share(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """By default as many bytes as the model has, so that a server does not grow until its pool is full."""
    caplog.set_level("INFO")
    size = PoolSize(0, 0, 0)
    with served_client({"lm": folders["lm"]}) as (running, client):
        ask(client, prompt="x")
        size = running.model("lm").pool_size
        assert size.evictable == min(size.blocks, LEAST_PREFIXES // size.block_bytes)  # the model is tiny
        assert metric(client, 'allyouneed:prefix_cache_bytes{model_name="lm",state="limit"}') == (
            size.evictable * size.block_bytes
        )
    assert "lm: keys and values take up to" in caplog.text and "(--prefix-memory)" in caplog.text
    with served_client({"lm": folders["lm"]}, prefix_memory=5 * size.block_bytes + 1) as (running, client):
        answers = [ask(client, prompt=f"{n} {START}") for n in range(6)]
        pool = scheduler_of(running).blocks.pool  # type: ignore[union-attr]
        assert pool.most_evictable == pool.evictable == 5 and pool.used == 5
        for state, count in (("used", 5), ("limit", 5)):
            name = f'allyouneed:prefix_cache_bytes{{model_name="lm",state="{state}"}}'
            until(lambda name=name, count=count: metric(client, name) == count * size.block_bytes)
        assert [ask(client, prompt=f"{n} {START}") for n in range(6)] == answers
    with served_client({"lm": folders["lm"]}, prefix_memory=0) as (running, client):
        assert ask(client, prompt=f"0 {START}") == answers[0]
        assert scheduler_of(running).blocks.pool.used == 0  # type: ignore[union-attr]


def test_the_share_of_cached_prefixes_follows_model_and_machine(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_client({"lm": folders["lm"]}) as (running, client):
        ask(client, prompt="x")
        model, module = running.model("lm"), running.model("lm").predictor.model
        block, weights = model.pool_size.block_bytes, sum(one.nbytes for one in module.parameters())
        monkeypatch.setattr(served_model, "LEAST_PREFIXES", 0)
        for free, expected in ((1 << 40, weights), (weights * 4, weights // 2), (None, weights)):
            monkeypatch.setattr(served_model, "available_memory", lambda _, free=free: free)
            del model.pool_size
            blocks = model.pool_size.blocks
            longest = -(-model.max_model_len // 8) + 2
            assert model.pool_size.evictable == min(blocks, max(longest, expected // block))
