"""Training speed of every mixer in one skeleton on a GPU, bf16: tokens per second and share of the matrix ceiling
against attention in the same run, experts against the dense model of the same active FLOPs, MLA against Hugging Face.

    python bench/train_family_gpu.py                              # 16 rows of 1,024 tokens
    python bench/train_family_gpu.py --length 16384               # one row: what is linear must pass attention
    python bench/train_family_gpu.py --only retention,rwkv,mla    # some of them, and attention
    python bench/train_family_gpu.py --packed                     # documents of 64 to 512 tokens fill the rows
    python bench/train_family_gpu.py --device cpu --tiny          # rehearsal

The skeleton: 12 layers of width 768, 12 heads, a gated channel of 2048, vocabulary 32k (family_gpu.py). A step is that
of `allyouneed train`: blocks compiled (identical layers share one graph), the update captured as a CUDA graph.

Each model has a process of its own: they compile side by side, `--at-once` of them, the most important first; then they
measure one after another, each in several turns, while the others wait. Attention stays from wave to wave. What is not
ready in time is stopped while the others measure, and continues afterwards. A row is printed as soon as it is measured;
results are written as JSON into $OUT, if set.
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
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.causal_lm import CausalLM
from allyouneed.train.backend import Backend
from allyouneed.train.cuda.capture import CapturedUpdates
from allyouneed.train.optimiser import Adam
from allyouneed.train.prefetch import DataPosition, Update
from allyouneed.train.step import fetch_results
from family_gpu import TINY, Sizes, mixers, tree

TOKENS = 16384  # of a batch
DOCUMENTS = (64, 512)  # lengths in packed rows
# beside 0.75 of attention's share; attention is the dense model of the experts' active FLOPs
ASKED = {"experts": ("attention", 0.6), "mla": ("hf mla", 1.2)}
# in the order of their importance; LINEAR: faster than attention at 16k tokens
ORDER = (
    "attention", "experts", "mla", "hf mla", "retention", "rwkv", "gated-retention", "performer", "longnet", "infini",
    "alibi", "bigbird", "window", "mamba2", "mamba", "sparse", "t5", "dilated",
)  # fmt: skip
MORE = ("convolution", "lightweight-convolution", "dynamic-convolution", "lsra", "mixed-chunk")  # only by name
LINEAR = (
    "retention", "gated-retention", "rwkv", "performer", "infini", "mamba", "mamba2", "window", "longnet", "bigbird",
    "sparse", "dilated",
)  # fmt: skip


def models(s: Sizes, length: int) -> dict[str, dict[str, Any]]:
    known, root = mixers(s), max(2, round(math.sqrt(length)))
    attention, block = known["attention"], s.head
    patterns = {
        "bigbird": f"causal & (block-window({block}, 2) | global-prefix({block}) | random-blocks({block}, 3, 0))",
        "sparse": f"causal & (window({root}) | strided({root}))",
        "dilated": f"causal & dilated({4 * s.head}, 8)",
    }
    known |= {name: attention | {"pattern": pattern} for name, pattern in patterns.items()}
    known["t5"] = attention | {"positions": "buckets"}
    found = {name: tree(s, known[name]) for name in (*ORDER, *MORE) if name in known}
    expert = {"kind": "glu", "hidden": s.hidden // 2, "bias": False}
    found["experts"] = tree(s, attention, {"kind": "moe", "experts": 8, "top": 2, "expert": expert})
    found["hf mla"] = found["mla"]
    return {name: found[name] for name in (*ORDER, *MORE)}


# --- a process for each model -----------------------------------------------------------------------------------------


class Trained:
    """What `allyouneed train` does."""

    def __init__(self, keys: dict[str, Any], backend: Backend, batches: list[Batch]) -> None:
        config = parse(Model, keys)  # type: ignore[type-abstract]
        self.model = config.build().to(backend.device).train()
        backend.compile_model(self.model)
        self.updates = CapturedUpdates(self.model, CausalLM(), Adam().build(self.model), 1.0, backend)
        at = DataPosition(0, 0)
        self.steps = [Update([batch], [at], batch.rows.tokens.numel(), at) for batch in batches]
        self.number = 0

    def step(self) -> None:
        self.number += 1
        pending = self.updates.run(self.steps[self.number % len(self.steps)], self.number, 1e-4)
        if self.number in (1, 8):
            (now,) = fetch_results([pending])
            assert now.finite, now

    @property
    def captured(self) -> bool:
        return self.updates.update is not None


class HuggingFace:
    """Their model of the same sizes; every layer and the loss compiled."""

    captured = False

    def __init__(self, s: Sizes, backend: Backend, batch: Batch) -> None:
        import transformers

        heads = {"num_attention_heads": s.heads, "num_key_value_heads": s.heads}
        config = transformers.DeepseekV3Config(
            vocab_size=s.vocab, hidden_size=s.width, num_hidden_layers=s.layers, tie_word_embeddings=True, **heads,
            intermediate_size=s.hidden, kv_lora_rank=4 * s.head, q_lora_rank=None, qk_nope_head_dim=s.head,
            qk_rope_head_dim=s.head // 2, v_head_dim=s.head, first_k_dense_replace=s.layers, n_routed_experts=2,
            num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8, use_cache=False,
            max_position_embeddings=max(1024, batch.rows.tokens.shape[1]), pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
        self.model = transformers.DeepseekV3ForCausalLM(config).to(backend.device).train()
        self.backend, self.batch, cuda = backend, batch, backend.cuda
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=cuda)
        self.loss: Callable[..., Any] = self.cross_entropy
        if backend.compiled:
            self.loss = torch.compile(self.cross_entropy)
            for layer in self.model.model.layers:
                layer.compile()

    def cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model.lm_head(hidden).float().flatten(0, 1), labels.flatten())

    def step(self) -> None:
        assert self.batch.labels is not None
        with torch.autocast(self.backend.device.type, torch.bfloat16):
            hidden = self.model.model(self.batch.rows.tokens).last_hidden_state
            loss = self.loss(hidden, self.batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


def batch_of(s: Sizes, rows: int, length: int, given: argparse.Namespace, device: torch.device) -> Batch:
    """Whole rows, or packed ones, whose last document is cut off."""
    text = torch.randint(1, s.vocab, (rows, length + 1), device=device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if not given.packed:
        return Batch(Rows(tokens), labels=labels)
    least, most = (4, 16) if given.tiny else DOCUMENTS
    ends = torch.randint(least, most + 1, (rows, -(-length // least))).cumsum(1)
    segments = torch.searchsorted(ends, torch.arange(length).expand(rows, -1).contiguous(), right=True) + 1
    last = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (0, 1))
    labels[last.to(device)] = IGNORE
    return Batch(Rows(tokens, segments=segments.to(device)), labels=labels)


def child(name: str, given: argparse.Namespace) -> None:
    """Compile, print a line of JSON, and measure once for each line of seconds read from standard input."""
    begun, s = time.perf_counter(), TINY if given.tiny else Sizes()
    cuda = given.device == "cuda"
    backend = Backend(torch.device(given.device), bf16=cuda, compiled=cuda, summary="")
    length, total = (32, 64) if given.tiny else (given.length, TOKENS)
    keys = models(s, length)[name]
    torch.manual_seed(0)
    batches = [batch_of(s, total // length, length, given, backend.device) for _ in range(4 if given.packed else 1)]

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    try:
        net: Any = HuggingFace(s, backend, batches[0]) if name == "hf mla" else Trained(keys, backend, batches)
        net.step()
        wait()
        compiled = time.perf_counter() - begun
        for _ in range(7):  # warms up and captures
            net.step()
        wait()
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        torch.cuda.empty_cache()
        say(ready=time.perf_counter() - begun, compiled=compiled, captured=net.captured, peak=peak)
        for line in sys.stdin:
            steps, start = 0, time.perf_counter()
            while not steps or time.perf_counter() - start < float(line):
                for _ in range(4):
                    net.step()
                wait()
                steps += 4
            say(speed=steps * total / (time.perf_counter() - start))
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        text_of = f"{type(failure).__name__}: {str(failure)[:300]} ({Path(where.filename).name}:{where.lineno})"
        say(failed=text_of)


# --- the parent process -------------------------------------------------------------------------------------------


@dataclass
class Worker:
    name: str
    process: subprocess.Popen[str]
    told: dict[str, Any] | None = None  # what it said when it was ready, or failed

    @property
    def ready(self) -> bool:
        return self.told is not None and "ready" in self.told

    def read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                self.told = json.loads(line)
                return
        self.told = {"failed": f"ended with {self.process.wait()}"}

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
    flops: dict[str, float]  # of a token, forward and backward
    logs: str  # a folder for what the processes write beside their results
    ceiling: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return float(self.given.seconds) - (time.perf_counter() - self.begun)

    def start(self, name: str) -> Worker:
        options = ["--device", self.given.device, "--length", str(self.given.length)]
        options += ["--tiny"] * self.given.tiny + ["--packed"] * self.given.packed
        command = [sys.executable, __file__, "--child", name, *options]
        around = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ}
        with Path(self.logs, f"{name.replace(' ', '_')}.log").open("w") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            return Worker(name, subprocess.Popen(command, text=True, start_new_session=True, env=around, **pipes))

    def wait(self, workers: list[Worker], until: float) -> None:
        """Until all are ready or have failed, or so many seconds are left."""
        with selectors.DefaultSelector() as waiting:
            for worker in workers:
                if worker.told is None:
                    assert worker.process.stdout is not None
                    waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)
            while waiting.get_map() and self.left > until:
                for key, _ in waiting.select(timeout=0.5):
                    key.data.read()
                    waiting.unregister(key.fileobj)
                    self.note(key.data.name, **key.data.told)
                    if "failed" in key.data.told:
                        print(f"{key.data.name:18s} FAILED {key.data.told['failed']}", flush=True)

    def note(self, name: str, **values: Any) -> None:
        self.results.setdefault(name, {}).update(values)
        if os.environ.get("OUT"):
            kind = "_packed" if self.given.packed else ""
            path = Path(os.environ["OUT"], f"train_family_gpu_{self.given.length}{kind}.json")
            path.write_text(json.dumps({"ceiling": self.ceiling, "results": self.results}, indent=1))

    def wave(self, workers: list[Worker], reserve: float) -> None:
        """Compile side by side, measure one after another; those that are late afterwards."""
        self.wait(workers, reserve)
        for _ in range(2):
            late = [worker for worker in workers if worker.told is None]
            for worker in late:
                worker.signal(signal.SIGSTOP)
            if self.given.device == "cuda" and not self.ceiling:
                from train_turns import ceiling

                self.ceiling = ceiling()
            self.measure([worker for worker in workers if worker.ready])
            if not late or self.left < 10:
                return
            for worker in late:
                worker.signal(signal.SIGCONT)
            self.wait(late, 5)
            workers = [*workers[:1], *(worker for worker in late if worker.ready)]

    def measure(self, workers: list[Worker]) -> None:
        speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for _ in range(self.given.turns):
            for worker in list(workers):
                try:
                    speeds[worker.name].append(worker.measure(self.given.turn))
                except (RuntimeError, ValueError) as failure:
                    print(f"{worker.name:18s} FAILED {failure}", flush=True)
                    workers.remove(worker)
        for worker in workers:
            self.note(worker.name, speed=statistics.median(speeds[worker.name]), all=speeds[worker.name])
        for worker in workers:
            self.show(worker.name)

    def show(self, name: str) -> None:
        found, base = self.results[name], self.results.get("attention", {})
        work = self.flops[name] * found["speed"]
        share = f"{work / self.ceiling:6.1%}" if self.ceiling else "      "
        words = [f"{name:18s} {found['speed']:10,.0f} tokens/s {share}"]
        if "speed" in base:
            ratio, shares = found["speed"] / base["speed"], work / self.flops["attention"] / base["speed"]
            self.note(name, ratio=ratio, share_ratio=shares)
            words.append(f"{ratio:5.2f} × attention, {shares:5.2f} × its share")
        words.append(f"compiled {found['compiled']:3.0f} s  {found['peak']:4.1f} GiB")
        words += [] if found["captured"] or name == "hf mla" else ["NOT CAPTURED"]
        print("  ".join(words), flush=True)

    def verdicts(self) -> None:
        print()
        speed = {name: found["speed"] for name, found in self.results.items() if "speed" in found}
        for name in [name for name in (*ORDER, *MORE) if name in speed and name not in ("attention", "hf mla")]:
            found = self.results[name]
            checks = [("attention's share", found.get("share_ratio"), 0.75)] if name != "experts" else []
            if name in ASKED and ASKED[name][0] in speed:
                peer, least = ASKED[name]
                checks.append((peer, speed[name] / speed[peer], least))
            if self.given.length > 1024 and not self.given.packed:
                checks = [("attention", found.get("ratio"), 1.0)] if name in LINEAR else []
            for peer, ratio, least in checks:
                if ratio is not None:
                    good = "ok" if ratio >= least else "LESS"
                    print(f"{name:18s} {ratio:5.2f} × {peer} (asked: {least})  {good}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row; a batch has 16,384")
    parser.add_argument("--packed", action="store_true", help="rows of several documents")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--at-once", type=int, default=12, help="processes that compile side by side")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a turn")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given)
        return
    sizes, length = TINY if given.tiny else Sizes(), 32 if given.tiny else given.length
    trees = models(sizes, length)
    least, most = DOCUMENTS
    seen = (least**2 + least * most + most**2) * 2 // (3 * (least + most))  # length of a token's document, on average
    around = min(length, seen) if given.packed else length
    flops = {name: 3 * parse(Model, keys).cost(around).flops for name, keys in trees.items()}  # type: ignore[type-abstract]
    names = list(ORDER) if given.length <= 1024 else ["attention", *LINEAR]
    names = [name for name in names if not given.packed or name != "hf mla"]  # theirs sees across documents
    if given.only:
        names = ["attention", *(name for name in given.only.split(",") if name != "attention")]
        if unknown := set(names) - set(trees):
            parser.error(f"unknown: {', '.join(sorted(unknown))} (allowed: {', '.join(trees)})")
    bench = Bench(given, flops, os.environ.get("OUT") or tempfile.mkdtemp())
    workers: list[Worker] = []
    try:
        base, others = bench.start("attention"), names[1:]
        workers.append(base)
        while others and bench.left > 15:
            now, others = others[: given.at_once - 1], others[given.at_once - 1 :]
            wave = [bench.start(name) for name in now]
            workers += wave
            share = 1 / (1 + math.ceil(len(others) / max(1, given.at_once - 1)))  # of the time that is left
            bench.wave([base, *wave], bench.left * (1 - share) + 12 * share)
            for worker in wave:
                worker.end()
        bench.verdicts()
        print(f"\nmatrix ceiling {bench.ceiling / 1e12:.0f} TFLOP/s; {time.perf_counter() - bench.begun:.0f} s")
    finally:
        for worker in workers:
            worker.end()


if __name__ == "__main__":
    main()
