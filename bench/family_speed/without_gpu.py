"""What without.py does on a GPU: each model has a process of its own. They compile side by side; whichever is ready
measures, while the others are stopped."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from allyouneed.config import preset_tree
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.lab.mixer_sizes import SkeletonSizes
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention import select
from allyouneed.nn.ops.attention.dense import ScoreMod
from allyouneed.nn.patterns.core import Causal, Pattern
from allyouneed.nn.states.paged import BlockPool
from allyouneed.training.backend import Backend
from bench.family_speed import train_model
from bench.family_speed.without import Found, Job, Turn, build, fusions, gpt2, models, off, variants, within

Prepared = dict[str, dict[str, Turn]]  # by size and path


def clocked(work: Callable[[], Any], count: int) -> float:
    """Seconds per repetition."""
    wait()
    began = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return (time.perf_counter() - began) / count


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def requests(keys: dict[str, Any], s: SkeletonSizes, rows: int, given: int, new: int) -> list[Request]:
    texts = [[3 + (7 * row + n) % (s.vocab - 3) for n in range(given)] for row in range(rows)]
    if keys["kind"] == "encoder-decoder":
        return [Request([1], new, (row,), text) for row, text in enumerate(texts)]
    return [Request(text, new, (row,)) for row, text in enumerate(texts)]


def prepare_decode(job: Job, s: SkeletonSizes, device: str, found: Found) -> Prepared:
    keys, prepared = models(s)[job.model], dict[str, dict[str, Turn]]()
    model, how = build(keys, device), {"beam": 4} if job.kind == "beams" else {"method": "greedy"}
    for rows in s.rows:
        for path, doing_without in variants(job, True).items():
            with found.guarded(f"{path} {rows}"), doing_without(), torch.inference_mode():
                engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
                spec = engine.runner.spec(Decoding(min_length=s.new, max_length=s.new, **how))
                states = [RequestState(one, spec, s.new) for one in requests(keys, s, rows, s.given, s.new)]
                batch = engine.graphs.batch(states)
                while batch.active:
                    batch.step()
                batch.close()
                runner = next(reversed(engine.graphs.kept.values()))
                prepared.setdefault(f"{rows}", {})[path] = partial(step, runner, s.given + s.new // 2)
    return prepared


@torch.inference_mode()
def step(runner: Any, context: int) -> float:
    """Seconds of a decode step with `context` tokens of context."""
    runner.states.device_lengths.fill_(context)
    count = runner.search.run_steps  # that are launched at once
    return clocked(lambda: runner.launch(count), -(-32 // count)) / count


def prepare_prefill(job: Job, s: SkeletonSizes, device: str, found: Found) -> Prepared:
    keys, prepared = models(s)[job.model], dict[str, dict[str, Turn]]()
    model, decoding = build(keys, device), Decoding(method="greedy", min_length=8, max_length=8)
    for rows in s.rows:
        for path, doing_without in variants(job, True).items():
            engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
            texts = requests(keys, s, rows, 16 * s.given, 8)
            run = partial(engine.decode, texts, engine.runner.spec(decoding))
            if job.kind != "prefill":  # as a server does, with blocks, and with or without graphs
                graphs = engine.graphs if job.kind == "served" else None
                pool = BlockPool(2 * rows * (16 * s.given + 8))
                scheduler = Scheduler(engine.runner, budget=8192, pool=pool, graphs=graphs)
                run = partial(serve, scheduler, texts, engine.runner.spec(decoding))
            turn = partial(within, doing_without, partial(clocked, run, 3))
            with found.guarded(f"{path} {rows}"):
                for _ in range(3):  # sizes that recur are captured
                    turn()
                prepared.setdefault(f"{rows}", {})[path] = turn
    return prepared


def serve(scheduler: Scheduler, texts: list[Request], spec: DecodingSpec) -> None:
    scheduler.submit_all([(text, spec) for text in texts])
    scheduler.run()


def prepare_train(job: Job, s: SkeletonSizes, device: str, found: Found) -> Prepared:
    cuda, half, short = device != "cpu", replace(s, layers=max(1, s.layers // 2)), job.model == "plain-packed"
    if cuda:
        torch._dynamo.config.recompile_limit = 64
    backend = Backend(torch.device(device), bf16=cuda, compiled=cuda, summary="")
    translates, given = job.model == "translation", 12 if job.model == "translation" else 32
    rows, length = ((128 if translates else 64, 128) if short or translates else (8, 1024)) if cuda else (2, 32)
    own = {"gpt2": gpt2, "plain-packed": gpt2, "translation": transformer}
    keys = own[job.model](half) if job.model in own else train_model.models(half, length)[job.model]
    torch.manual_seed(0)
    text = torch.randint(1, s.vocab, (rows, length + 1), device=device)
    segments = sentences(rows, length, given, device) if short or translates else None
    target = Rows(text[:, :-1].contiguous(), segments=segments)
    source = Rows(text[:, 1:].contiguous(), segments=segments) if translates else None
    batch = Batch(target, source, text[:, 1:].contiguous())
    turns: dict[str, Turn] = {}
    for path in ("", *job.paths):
        left = fusions().get(path)
        doing_without = nullcontext if left is not None or not path else off(path, True)
        compiles = partialmethod(Backend.compile_model, fusions=left)
        with found.guarded(path), doing_without(), patch.object(Backend, "compile_model", compiles):
            trained = train_model.Trained(keys, backend, [batch])
            for _ in range(6):
                trained.step()
            wait()
            if cuda and not trained.captured:
                found.failed[f"{path or 'base'} captured"] = "not captured"
            turns[path] = partial(within, doing_without, partial(clocked, trained.step, 3))
    return {f"{rows} × {length}": turns}


def transformer(s: SkeletonSizes) -> dict[str, Any]:
    """The paper's base model, tiny in a rehearsal."""
    keys = preset_tree("transformer-base") | {"vocab": s.vocab}
    if s.width < 64:
        keys |= {name: [keys[name][0] | {"repeat": 1}] for name in ("encoder", "decoder")}
    return keys


def sentences(rows: int, length: int, each: int, device: str) -> torch.Tensor:
    """Segments of packed rows."""
    return (torch.arange(length, device=device) // each + 1).expand(rows, -1).contiguous()


# rows, length, tokens of a sentence (0: rows are whole) and pattern
ATTENDED = {
    "short-rows": (64, 128, 32, "causal"),
    "short-rows-full": (64, 128, 32, "full"),
    "packed": (16, 1024, 256, "causal"),
    "bigbird": (4, 4096, 0, "causal & (block-window(64, 2) | global-prefix(64) | random-blocks(64, 3, 0))"),
    "dilated": (4, 4096, 0, "causal & dilated(256, 8)"),
    "window": (4, 4096, 0, "causal & window(256)"),
}


def prepare_attend(job: Job, s: SkeletonSizes, device: str, found: Found) -> Prepared:
    """Forward and backward of attention as it is chosen, and by what torch has."""
    rows, length, each, text = ATTENDED[job.model]
    rows, length, pattern = (rows, length, Pattern.from_text(text)) if device != "cpu" else (2, 128, Causal())
    segments = sentences(rows, length, each, device) if each else None
    positions = torch.arange(length, device=device)[None] % (each or length)
    layout = TokenLayout(positions, segments, start=None if each else 0, packed=bool(each))
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device != "cpu" else torch.float32}
    q, k, v = (torch.randn(rows, s.heads, length, s.head, **like).requires_grad_() for _ in "qkv")
    slope, score_mod = torch.randn_like(q), ScoreMod(s.head**-0.5)
    ways: dict[str, Callable[[], Any]] = {
        "": lambda: select.select_attention(pattern, layout, layout, score_mod),
        "torch: mask": lambda: select.dense(pattern, layout, layout),
        "torch: flex": lambda: select.flex(pattern, layout, layout),
    }
    if each:
        ways["torch: varlen"] = lambda: by_varlen(rows * length, each, isinstance(pattern, Causal), device)
    prepared, size = dict[str, Turn](), ""
    for name, make in ways.items():
        with found.guarded(name):
            attend = make()
            size = size or f"{rows} × {length}, {type(attend).__name__}"

            def both(attend: Any = attend) -> None:
                torch.autograd.grad(attend(q, k, v, 0.0, score_mod), (q, k, v), slope)

            prepared[name] = partial(clocked, replayed(both, device), 10)
    return {size: prepared}


def by_varlen(tokens: int, each: int, causal: bool, device: str) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.arange(0, tokens + 1, each, device=device, dtype=torch.int32)

    def attend(q: Any, k: Any, v: Any, dropout: float, score_mod: ScoreMod) -> Any:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        try:
            found = varlen_attn(*flat, ends, ends, each, each, window_size=(-1, 0 if causal else -1))
        except TypeError:  # before torch 2.11
            found = varlen_attn(*flat, ends, ends, each, each, is_causal=causal)
        return found.unflatten(0, (len(q), -1)).transpose(1, 2)

    return attend


def replayed(work: Callable[[], None], device: str) -> Callable[[], None]:
    """As a CUDA graph."""
    if device == "cpu":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(kept: Callable[[], None] = work) -> None:  # with what it holds: the graph reads that
        graph.replay()

    return replay


PREPARE = {"decode": prepare_decode, "beams": prepare_decode, "prefill": prepare_prefill, "served": prepare_prefill,
           "blocks": prepare_prefill, "train": prepare_train, "attend": prepare_attend}  # fmt: skip


def child(job: Job, s: SkeletonSizes, device: str, rounds: int) -> None:
    """Prepare, report that, and measure at each request."""
    found, prepared = Found(), dict[str, dict[str, Turn]]()
    with found.guarded("all"):
        prepared = PREPARE[job.kind](job, s, device, found)
        wait()
    print("ready", flush=True)
    sys.stdin.readline()
    for size, turns in prepared.items():
        with found.guarded(size):
            found.measure(size, turns, rounds)
    print(json.dumps(vars(found)), flush=True)


@dataclass
class Worker:
    job: Job
    process: subprocess.Popen[str]

    def signal(self, which: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, which)  # it has processes that compile

    def answer(self, to: str = "") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        if to:
            print(to, file=self.process.stdin, flush=True)
        while found := self.process.stdout.readline():
            if found.startswith(("ready", "{")):
                return found
        raise RuntimeError(f"ended with {self.process.wait()}")


def side_by_side(
    jobs: list[Job], only: list[str], given: argparse.Namespace, note: Callable[[Job, Found], None]
) -> None:
    jobs = jobs + [Job("attend", name, ()) for name in ATTENDED if not only or any(p in f"attend {name}" for p in only)]
    # training compiles longest and takes most memory: it begins first, beside others
    training, others = ([job for job in jobs if (job.kind == "train") is first] for first in (True, False))
    waiting = [job for pair in zip_longest(training, others) for job in pair if job is not None]
    running, end = list[Worker](), time.monotonic() + given.seconds
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < given.at_once:
                running.append(start(waiting.pop(0), given))
            with selectors.DefaultSelector() as selector:
                for worker in running:
                    assert worker.process.stdout is not None
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                ready = [key.data for key, _ in selector.select(timeout=0.5)]
            for worker in ready:
                running.remove(worker)
                note(worker.job, measure(worker, running + [one for one in ready if one is not worker]))
    finally:
        for worker in running:
            worker.signal(signal.SIGKILL)
    for job in (*(worker.job for worker in running), *waiting):
        print(f"{job}: no time left", flush=True)


def start(job: Job, given: argparse.Namespace) -> Worker:
    options = ["--device", given.device, "--rounds", str(given.rounds), *["--tiny"] * given.tiny]
    options += ["--gpu-paths"] * given.gpu_paths
    command = [sys.executable, str(Path(__file__).with_name("without.py")), "--child", json.dumps(job), *options]
    around = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
    log: Any = subprocess.DEVNULL
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
        log = (given.logs / f"{job.kind}_{job.model}_{len(job.paths)}.log").open("a")
    process = subprocess.Popen(
        command, text=True, start_new_session=True, env=around, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log,
    )  # fmt: skip
    return Worker(job, process)


def measure(worker: Worker, others: list[Worker]) -> Found:
    found = Found()
    with found.guarded("process"):
        worker.answer()
        for other in others:
            other.signal(signal.SIGSTOP)
        time.sleep(0.05)  # what they have launched ends
        found = Found(**json.loads(worker.answer("now")))
    for other in others:
        other.signal(signal.SIGCONT)
    worker.signal(signal.SIGKILL)
    return found
