"""Training speed of every mixer in one skeleton on a GPU, bf16: tokens per second and share of the matrix ceiling
against attention in the same run, experts against the dense model of the same active FLOPs, MLA against Hugging Face.

    python bench/family_speed/train_gpu.py                              # 16 rows of 1,024 tokens
    python bench/family_speed/train_gpu.py --lengths 4096,65536,1024,16384      # what is linear must pass attention
    python bench/family_speed/train_gpu.py --only retention,rwkv,mla    # some of them, and attention
    python bench/family_speed/train_gpu.py --packed                     # documents of 64 to 512 tokens fill the rows
    python bench/family_speed/train_gpu.py --device cpu --tiny          # rehearsal
    python bench/family_speed/train_gpu.py --page RUN.json … docs/results/train-gpu.md  # tables and plot of these runs

The skeleton: 12 layers of width 768, 12 heads, a gated channel of 2048, vocabulary 32k, mixers of about equal weights
(sizes.py). A batch has 16,384 tokens, or one row if that is longer. A step is that of `allyouneed train`: blocks
compiled (identical layers share one graph), the update captured as a CUDA graph.

Each model and length has a process of its own. They compile side by side, `--at-once` of them and as many as the memory
holds, in the order of the lengths and then of importance. Whichever is ready is measured at once, in several turns,
while the others are stopped; then it ends and the next one starts. A row is printed as soon as it is measured; `--save
PATH` writes the results as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.lab.mixer_sizes import TINY, SkeletonSizes
from allyouneed.nn.models.base import Model
from bench.family_speed.page import short, write_training
from bench.family_speed.train_model import DOCUMENTS, LINEAR, MORE, ORDER, TOKENS, batch_tokens, child, models

FIXED, EACH = 3.0, 8.0  # GiB of a process: weights, optimiser and context; activations of 16,384 tokens
WIDE = {"s4": 30.0, "lsh": 24.0, "lstm": 24.0, "gru": 20.0, "transformer-xl": 20.0, "shaw": 14.0}  # EACH of others
# beside 0.75 of attention's share; attention is the dense model of the experts' active FLOPs
ASKED = {"experts": ("attention", 0.6), "mla": ("hf mla", 1.2)}


class Job(NamedTuple):
    name: str
    length: int

    def __str__(self) -> str:
        return f"{self.name:18s} {short(self.length):>4s}"


@dataclass
class Worker:
    job: Job
    process: subprocess.Popen[str]
    needs: float  # GiB
    report: dict[str, Any] | None = None  # that it is ready, or has failed

    def read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                self.report = json.loads(line)
                return
        self.report = {"failed": f"ended with {self.process.wait()}"}

    def measure(self, seconds: float) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(seconds, file=self.process.stdin, flush=True)
        found = json.loads(self.process.stdout.readline())
        if "speed" not in found:
            raise RuntimeError(found.get("failed", "no answer"))
        return float(found["speed"])

    def signal(self, which: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, which)  # it has processes that compile

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class Bench:
    given: argparse.Namespace
    flops: dict[Job, float]  # of a token, forward and backward
    logs: str  # a folder for what the processes write beside their results
    memory: float  # GiB for all processes
    ceiling: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    results: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by name and length
    short_of_memory: set[Job] = field(default_factory=set)  # those get a second try with twice the memory

    @property
    def left(self) -> float:
        return float(self.given.seconds) - (time.perf_counter() - self.begun)

    def needs(self, job: Job) -> float:
        tokens = batch_tokens(job.length, self.given.tiny) * (2 if job in self.short_of_memory else 1)
        return FIXED + WIDE.get(job.name, EACH) * tokens / TOKENS

    def start(self, job: Job) -> Worker:
        options = ["--device", self.given.device, "--lengths", str(job.length)]
        options += ["--tiny"] * self.given.tiny + ["--packed"] * self.given.packed
        command = [sys.executable, __file__, "--child", job.name, *options]
        around = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
        with Path(self.logs, f"{job.name.replace(' ', '_')}_{job.length}.log").open("w") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            process = subprocess.Popen(command, text=True, start_new_session=True, env=around, **pipes)
        return Worker(job, process, self.needs(job))

    def note(self, job: Job, **values: Any) -> None:
        self.results.setdefault(job.name, {}).setdefault(job.length, {}).update(values)
        if self.given.save is not None:
            self.given.save.write_text(json.dumps({"ceiling": self.ceiling, "results": self.results}, indent=1))

    def run(self, jobs: list[Job]) -> None:
        """Compile side by side; measure each as soon as it is ready."""
        waiting, running = list(jobs), list[Worker]()
        try:
            while (waiting or running) and self.left > 0:
                while self.left > 25 and (job := next((job for job in waiting if self.fits(job, running)), None)):
                    waiting.remove(job)
                    running.append(self.start(job))
                if not running:
                    break
                for worker in self.heard(running):
                    running.remove(worker)
                    self.finish(worker, running)
                    failure = str(self.results[worker.job.name][worker.job.length].get("failed", ""))
                    if "out of memory" in failure and worker.job not in self.short_of_memory:
                        self.short_of_memory.add(worker.job)
                        waiting.append(worker.job)
        finally:
            for worker in running:
                worker.end()
        for job in [*(worker.job for worker in running), *waiting]:
            print(f"{job} no time left", flush=True)

    def fits(self, job: Job, running: list[Worker]) -> bool:
        needed = self.needs(job) + sum(worker.needs for worker in running)
        there = needed <= self.memory and self.needs(job) <= free_memory(self.given.device)
        return not running or (len(running) < self.given.at_once and there)

    def heard(self, running: list[Worker]) -> list[Worker]:
        """Those that are ready or have failed, after a while."""
        with selectors.DefaultSelector() as waiting:
            for worker in running:
                assert worker.process.stdout is not None
                waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)
            found = [key.data for key, _ in waiting.select(timeout=0.5)]
        for worker in found:
            worker.read()
        return found

    def finish(self, worker: Worker, others: list[Worker]) -> None:
        """Measure one while the others stand still, then end it."""
        assert worker.report is not None
        self.note(worker.job, **worker.report)
        try:
            if "failed" in worker.report:
                raise RuntimeError(worker.report["failed"])
            for other in others:
                other.signal(signal.SIGSTOP)
            if self.given.device == "cuda" and not self.ceiling:
                from bench.train.turns import ceiling

                self.ceiling = ceiling()
            speeds = [worker.measure(self.given.turn) for _ in range(self.given.turns)]
            self.note(worker.job, speed=statistics.median(speeds), all=speeds)
            self.results[worker.job.name][worker.job.length].pop("failed", None)
            self.show(worker.job)
        except (RuntimeError, ValueError) as failure:
            self.note(worker.job, failed=str(failure))
            print(f"{worker.job} FAILED {failure}", flush=True)
        finally:
            worker.end()
            for other in others:
                other.signal(signal.SIGCONT)

    def show(self, job: Job) -> None:
        found, base = self.results[job.name][job.length], self.results.get("attention", {}).get(job.length, {})
        words = [f"{job} {found['speed']:10,.0f} tokens/s"]
        if self.ceiling:
            self.note(job, share=self.flops[job] * found["speed"] / self.ceiling)
            words.append(f"{found['share']:6.1%}")
        if "speed" in base:
            words.append(f"{found['speed'] / base['speed']:5.2f} × attention")
        words.append(f"compiled {found['compiled']:3.0f} s  {found['peak']:4.1f} GiB")
        words += [] if found["captured"] or job.name == "hf mla" else [f"NOT CAPTURED: {found['obstacle']}"]
        print("  ".join(words), flush=True)

    def compare(self) -> None:
        """Against attention, once all are measured."""
        base = self.results.get("attention", {})
        for name, lengths in self.results.items():
            for length, found in lengths.items():
                speed = base.get(length, {}).get("speed")
                if speed and "speed" in found:
                    shares = self.flops[Job(name, length)] / self.flops[Job("attention", length)]
                    ratio = found["speed"] / speed
                    self.note(Job(name, length), ratio=ratio, share_ratio=ratio * shares)

    def verdicts(self) -> None:
        print()
        for name in [name for name in (*ORDER, *MORE) if name in self.results and name not in ("attention", "hf mla")]:
            for length, found in self.results[name].items():
                checks = [("attention's share", found.get("share_ratio"), 0.75)] if name != "experts" else []
                if name in ASKED:
                    peer, least = ASKED[name]
                    theirs = self.results.get(peer, {}).get(length, {}).get("speed")
                    checks += [(peer, found.get("speed", 0) / theirs, least)] if theirs else []
                if length > 1024 and not self.given.packed:
                    checks = [("attention", found.get("ratio"), 1.0)] if name in LINEAR else []
                for peer, ratio, least in checks:
                    if ratio is not None:
                        good = "ok" if ratio >= least else "LESS"
                        print(f"{Job(name, length)} {ratio:5.2f} × {peer} (asked: {least})  {good}")


def free_memory(device: str) -> float:
    """GiB."""
    return torch.cuda.mem_get_info()[0] / 2**30 if device == "cuda" else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lengths", help="tokens of a row, separated by commas, in this order; default: 1024")
    parser.add_argument("--packed", action="store_true", help="rows of several documents")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--at-once", type=int, default=12, help="processes that compile side by side")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a turn")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the results there as JSON")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="PATH", help="JSON files of runs, and the page that gets their tables"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        *files, page = given.page
        write_training(files, page, (*ORDER, *MORE))
        return
    lengths = [int(length) for length in (given.lengths or ("32" if given.tiny else "1024")).split(",")]
    if given.child:
        child(given.child, lengths[0], given)
        return
    sizes = TINY if given.tiny else SkeletonSizes()
    least, most = DOCUMENTS
    seen = (least**2 + least * most + most**2) * 2 // (3 * (least + most))  # length of a token's document, on average
    jobs, flops = list[Job](), dict[Job, float]()
    for length in lengths:
        trees = models(sizes, length)
        names = list(ORDER) if length <= 1024 else ["attention", *LINEAR]
        names = [name for name in names if not given.packed or name != "hf mla"]  # theirs sees across documents
        if given.only:
            names = ["attention", *(name for name in given.only.split(",") if name != "attention")]
            if unknown := set(names) - set(trees):
                parser.error(f"unknown: {', '.join(sorted(unknown))} (allowed: {', '.join(trees)})")
        around = min(length, seen) if given.packed else length
        for job in (Job(name, length) for name in names):
            jobs.append(job)
            flops[job] = 3 * parse(Model, trees[job.name]).cost(around).flops  # type: ignore[type-abstract]
    memory = 0.95 * free_memory(given.device)
    bench = Bench(given, flops, tempfile.mkdtemp(), memory)
    print(f"logs of the processes: {bench.logs}", flush=True)
    bench.run(jobs)
    bench.compare()
    bench.verdicts()
    print(f"\nmatrix ceiling {bench.ceiling / 1e12:.0f} TFLOP/s; {time.perf_counter() - bench.begun:.0f} s")


if __name__ == "__main__":
    main()
