"""Training with 8-bit products (`precision: fp8`) against bf16 on one GPU, in turns: tokens per second, and the loss
after the same steps on the same data.

    python bench/train/fp8_gpu.py                                 # about a minute on an H200
    python bench/train/fp8_gpu.py --only gpt2,layers --steps 200
    python bench/train/fp8_gpu.py --profile                       # kernels of a turn, too
    python bench/train/fp8_gpu.py --device cpu --tiny             # a rehearsal, emulated

gpt2: GPT-2 124M, 32 rows of 1,024 tokens. base: transformer-base, 64 rows of 256 tokens on each side. Both without
dropout, from the same weights, as `allyouneed train` runs them: compiled, captured, Adam with fp32 weights. A token
follows its predecessor by a fixed permutation in 3 of 4 places, and is drawn by Zipf's law in the others; a target is
its source, permuted.
layers: one linear map forward and backward by its width, which shows from where on 8 bits pay.

Models compile side by side, each in a process of its own, and are trained and measured one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.runtime.float8 import Float8Linear, use_float8
from allyouneed.tasks.language.causal_lm import CausalLM
from allyouneed.tasks.translation.translation import Translation
from allyouneed.training.backend import Backend
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.optim.optimiser import Adam
from allyouneed.training.prefetch import DataPosition, Update
from allyouneed.training.step import fetch_results

PRECISIONS = ("bf16", "fp8")
LAST = 10  # steps whose mean loss is compared
RATE, WARMUP = 6e-4, 20


def structured(count: int, rows: int, length: int, symbols: int = 2000) -> tuple[Tensor, Tensor]:
    """Texts (count, rows, length), and the permutation of their symbols."""
    dice = torch.Generator().manual_seed(1)
    order = torch.randperm(symbols, generator=dice)
    zipf = 1 / torch.arange(1, symbols + 1, dtype=torch.double)
    drawn = torch.multinomial(zipf, count * rows * length, replacement=True, generator=dice).view(count, rows, length)
    free = torch.rand(count, rows, length, generator=dice) < 0.25
    for place in range(1, length):
        drawn[..., place] = torch.where(free[..., place], drawn[..., place], order[drawn[..., place - 1]])
    return drawn, order


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout is for answers


class Trained:
    """One model in one precision."""

    def __init__(self, name: str, precision: str, given: argparse.Namespace) -> None:
        device, cuda = torch.device(given.device), given.device == "cuda"
        self.backend = Backend(device, bf16=True, compiled=cuda, summary="", fp8=precision == "fp8")
        rows, length, vocab = (4, 16, 96) if given.tiny else (32, 1024, 50304) if name == "gpt2" else (64, 256, 32000)
        symbols = 50 if given.tiny else 2000
        changes, self.task = [f"vocab={vocab}", "dropout=0.0"], Translation()  # type: tuple[list[str], Task]
        if name == "gpt2":
            changes, self.task = [*changes, "decoder[0].mixer.dropout=0.0"], CausalLM()
        sides = ("decoder",) if name == "gpt2" else ("encoder", "decoder")
        if given.tiny:
            changes += ["width=96"] + [
                f"{side}[0].{key}" for side in sides for key in ("repeat=1", "channel.hidden=48")
            ]
        tree = override(preset_tree("gpt2" if name == "gpt2" else "transformer-base"), changes)
        config = parse(Model, tree)  # type: ignore[type-abstract]
        torch.manual_seed(0)
        self.model = config.build().to(device).train()
        self.backend.compile_model(self.model)
        self.maps = sum(isinstance(part, Float8Linear) for part in self.model.modules())
        self.updates = CapturedUpdates(self.model, self.task, Adam().build(self.model), 1.0, self.backend, report=warn)
        self.tokens, self.number, self.losses = rows * length, 0, []  # type: tuple[int, int, list[float]]
        texts, order = structured(given.batches, rows, length + 1, symbols)
        self.batches = [self.batch(text, order).to(device) for text in texts]

    def batch(self, text: Tensor, order: Tensor) -> Batch:
        if isinstance(self.task, CausalLM):
            return Batch(Rows(text[:, :-1].contiguous()), labels=text[:, 1:].contiguous())
        source, target = text[:, :-1].contiguous(), order[text]
        return Batch(source=Rows(source), target=Rows(target[:, :-1].contiguous()), labels=target[:, 1:].contiguous())

    def train(self, steps: int) -> list[float]:
        """The losses of these steps."""
        pending = []
        for _ in range(steps):
            batch = self.batches[self.number % len(self.batches)]
            update = Update([batch], [DataPosition(0, 0)], self.tokens, DataPosition(0, 0))
            self.number += 1
            pending.append(self.updates.run(update, self.number, RATE * min(1.0, self.number / WARMUP)))
        return [result.loss for result in fetch_results(pending)]

    # --- what the parent asks for -------------------------------------------------------------------------------------

    def compile(self) -> dict[str, Any]:
        self.train(1)
        return {"maps": self.maps}

    def learn(self, steps: int) -> dict[str, Any]:
        losses = self.train(steps - self.number)
        cuda = self.backend.cuda
        return {
            "loss": statistics.mean(losses[-LAST:]),
            "captured": self.updates.update is not None,
            "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        }

    def turn(self, steps: int, profile: bool = False) -> dict[str, Any]:
        begin = time.perf_counter()
        self.train(steps)  # which ends by reading the losses
        speed = steps * self.tokens / (time.perf_counter() - begin)
        return {"speed": speed, "kernels": self.kernels(steps) if profile else []}

    def kernels(self, steps: int) -> list[tuple[str, float, int]]:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiling

        with profiling(activities=[ProfilerActivity.CUDA if self.backend.cuda else ProfilerActivity.CPU]) as seen:
            self.train(steps)
        found = [(e.key[:90], e.self_device_time_total / 1e3 / steps, e.count // steps) for e in seen.key_averages()]
        return sorted(found, key=lambda one: -one[1])[:25]


class Layers:
    """A single linear map (width, 4 · width)."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device, self.widths = given.device, (32,) if given.tiny else (512, 768, 1024, 2048, 4096)
        self.rows, self.ready = 64 if given.tiny else 16384, {}  # type: tuple[int, dict[tuple[int, str], Any]]

    def compile(self) -> dict[str, Any]:
        for width in self.widths:
            for precision in PRECISIONS:
                part = nn.Sequential(nn.Linear(width, 4 * width, device=self.device)).train()
                if precision == "fp8":
                    swap(part)
                if self.device == "cuda":
                    part.compile(dynamic=False)
                x = torch.randn(self.rows, width, device=self.device, dtype=torch.bfloat16, requires_grad=True)
                gradient = torch.randn(self.rows, 4 * width, device=self.device, dtype=torch.bfloat16)
                self.ready[width, precision] = part, x, gradient
                self.once(width, precision)
        return {}

    def once(self, width: int, precision: str) -> None:
        part, x, gradient = self.ready[width, precision]
        with torch.autocast(self.device, torch.bfloat16):
            y = part(x)
        torch.autograd.grad(y, [x, *part.parameters()], gradient)

    def measure(self) -> dict[str, Any]:
        """Milliseconds by width and precision, the best of several turns."""
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        found: dict[str, float] = {}
        for width, precision in list(self.ready) * 3:
            wait()
            begin = time.perf_counter()
            for _ in range(20):
                self.once(width, precision)
            wait()
            key = f"{width} {precision}"
            found[key] = min(found.get(key, 1e9), (time.perf_counter() - begin) / 20 * 1e3)
        return found


def swap(part: nn.Module) -> None:
    """`use_float8` of a map that is in no sub-layer."""
    from allyouneed.nn.sublayer import SubLayer

    holder = type("Holder", (SubLayer,), {"forward": lambda *given: None})()
    for name, child in part.named_children():
        holder.add_module(f"map{name}", child)
    use_float8(holder)


# --- processes --------------------------------------------------------------------------------------------------------


def work(given: argparse.Namespace) -> None:
    """A worker: one JSON request per line on stdin, one JSON answer per line on stdout."""
    name, _, precision = given.worker.partition("-")
    model: Any = Layers(given) if name == "layers" else Trained(name, precision, given)
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(model, request.pop("do"))(**request)
        print(json.dumps(found), flush=True)


class Worker:
    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name = name
        command = [
            sys.executable,
            __file__,
            "--worker",
            name,
            "--device",
            given.device,
            "--batches",
            str(given.batches),
        ]
        threads = str(max(2, (os.cpu_count() or 2) // 5))  # each would compile with as many as there are cores
        self.process = subprocess.Popen(
            command + ["--tiny"] * given.tiny,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ},
        )

    def ask(self, what: str, **options: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **options}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def get(self, what: str, **options: Any) -> dict[str, Any]:
        self.ask(what, **options)
        return self.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gpt2,base,layers")
    parser.add_argument("--steps", type=int, default=60, help="steps before the losses are compared")
    parser.add_argument("--batches", type=int, default=30, help="different batches")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--length", type=int, default=10, help="steps of a turn")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    begin, names = time.monotonic(), given.only.split(",")
    models = [name for name in ("gpt2", "base") if name in names]
    workers = {f"{n}-{p}": Worker(f"{n}-{p}", given) for n in models for p in PRECISIONS}
    layers = Worker("layers", given) if "layers" in names else None
    everyone = [*workers.values(), *([layers] if layers else [])]
    try:
        for worker in everyone:
            worker.ask("compile")
        ready = {worker.name: worker.answer() for worker in everyone}
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
        learnt = {name: worker.get("learn", steps=given.steps) for name, worker in workers.items()}
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(given.turns):
            for name, worker in workers.items():
                speeds[name].append(worker.get("turn", steps=given.length)["speed"])
        if models:
            steps = f"{given.steps - LAST + 1}–{given.steps}"
            print(f"\n| | tokens/s | × bf16 | loss, steps {steps} | difference | peak GiB |")
            print("|---|---|---|---|---|---|")
        for name in workers:
            plain, speed = name.split("-")[0] + "-bf16", statistics.median(speeds[name])
            loss, peak = learnt[name]["loss"], learnt[name]["peak"] / 2**30
            note = f"{ready[name]['maps']} maps" + (", captured" if learnt[name]["captured"] else ", not captured")
            print(
                f"| {name.replace('-', ', ')} ({note}) | {speed:,.0f} | {speed / statistics.median(speeds[plain]):.3f} "
                f"| {loss:.4f} | {loss - learnt[plain]['loss']:+.4f} | {peak:.1f} |"
            )
        if layers is not None:
            found = layers.get("measure")
            print("\n| width (to 4 × width, 16,384 rows) | bf16, ms | fp8, ms | × |\n|---|---|---|---|")
            for width in sorted({int(key.split()[0]) for key in found}):
                bf16, fp8 = (found[f"{width} {precision}"] for precision in PRECISIONS)
                print(f"| {width} | {bf16:.3f} | {fp8:.3f} | {bf16 / fp8:.2f} |")
        if given.profile:
            for name, worker in workers.items():
                print(f"\n{name}: kernels of a step, ms")
                for key, milliseconds, count in worker.get("turn", steps=5, profile=True)["kernels"]:
                    print(f"  {milliseconds:8.3f} {count:5d} ×  {key}")
    finally:
        for worker in everyone:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
            worker.process.wait(30)
    print(f"\n{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
