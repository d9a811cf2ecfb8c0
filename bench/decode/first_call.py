"""What the first calls of a process cost on a GPU: the first answer, a prompt of a length not seen before, the first
streamed token. Each model has two fresh processes: one with empty folders for compiled kernels (those of all models run
at once), one that finds them (one after another).

    python bench/decode/first_call.py                            # attention and retention, a GRU, 64 rows
    python bench/decode/first_call.py attention:1 gru:64         # mixers of lab/mixer_sizes.py, and rows
    python bench/decode/first_call.py --device cpu --tiny        # rehearsal

`start`: until the program's first line has been imported; `load`: of a model folder. Below, where the time of a call
goes: what the host does in each (kernels: compiled or read, with the slowest), and `rest`: decoding, mostly.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.interop.load import load
from allyouneed.kernels import preload
from allyouneed.lab.mixer_sizes import TINY, SkeletonSizes, variants
from allyouneed.nn.models.base import Model

JOBS = ("attention:1", "retention:1", "attention:64", "gru:1")
LENGTHS = (50, 100, 37, 70, 39, 200, 150)  # of prompts; the first calls have 24 tokens
GRAPHS = "allyouneed.infer.cuda_graph"
SHOWN = 5.0  # milliseconds more at a new length for which it is said where they go


@dataclass
class Breakdown:
    """Milliseconds of the host by what it does, each without what is timed inside; names of kernels."""

    spent: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    inside: list[float] = field(default_factory=list)  # of what runs, in what is timed inside

    def timed(self, what: str, function: Callable[..., Any], name: Callable[..., str] | None = None) -> Any:
        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            self.inside.append(0.0)
            try:
                return function(*given, **named)
            finally:
                whole = 1e3 * (time.perf_counter() - begin)
                self.spent[what] += whole - self.inside.pop()
                if self.inside:
                    self.inside[-1] += whole
                if name is not None:
                    self.kernels[name(*given)] += whole

        return run

    def patch(self, what: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(what, getattr(owner, name)))

    def begin(self) -> None:
        self.patch("plain prefill", ModelRunner, "start", "prefill_chunk")
        timed_import, load_triton = self.timed("imports", builtins.__import__), preload._load_triton

        def import_and_patch(*given: Any, **named: Any) -> Any:
            """Patch what the first call imports, once it is whole."""
            found, module = timed_import(*given, **named), sys.modules.get(f"{GRAPHS}.runner")
            if hasattr(module, "device_search"):
                builtins.__import__ = timed_import
                for each in ("runner", "prefill", "slot_loader"):
                    self.patch("capture", sys.modules[f"{GRAPHS}.{each}"], "capture_warm")
                self.patch("warm-up", sys.modules[f"{GRAPHS}.prefill"], "warm_up")
                self.patch("runner", module.GraphRunner, "__init__")  # type: ignore[union-attr]
            return found

        builtins.__import__ = import_and_patch

        def then_patch(device: torch.device) -> None:
            load_triton(device)
            from triton.compiler.compiler import CompiledKernel
            from triton.runtime.jit import JITFunction

            JITFunction._do_compile = self.timed("kernels", JITFunction._do_compile, lambda one, *_: one.fn.__name__)
            self.patch("kernels", CompiledKernel, "_init_handles")

        preload._load_triton = then_patch

    def take(self, whole: float) -> str:
        """What has been spent since the last time, of `whole`."""
        parts = [f"{what} {value:.0f}" for what, value in self.spent.most_common() if value >= 0.5]
        slow = [f"{name} {value:.0f}" for name, value in self.kernels.most_common(6)]
        found = f"{', '.join(parts)}, rest {whole - sum(self.spent.values()):.0f}"
        found += f"; {len(self.kernels)} kernels: {', '.join(slow)}" if slow else ""
        if torch.cuda.is_available():
            found += f"; {torch.cuda.memory_stats().get('num_device_alloc', 0)} device allocations so far"
        self.spent.clear()
        self.kernels.clear()
        return found


def measure(job: str, folder: str, device: str, tiny: bool) -> dict[str, Any]:
    """Milliseconds, in this process."""
    found: dict[str, Any] = {"start": 1e3 * (time.time() - float(os.environ["BEGAN"]))}
    rows, new = int(job.split(":")[1]), 8 if tiny else 64
    breakdown = Breakdown()
    breakdown.begin()
    start = time.perf_counter()
    engine = Engine(load(folder, device).model, 1, 2, 0, budget=1 << 16)
    found["load"] = 1e3 * (time.perf_counter() - start)
    breakdown.take(0)
    decoding = Decoding(method="greedy", min_length=new, max_length=new)
    where: dict[str, str] = {}

    def call(length: int, name: str = "") -> float:
        start = time.perf_counter()
        engine.complete([[1, *(5 + n % 50 for n in range(length - 1))]] * rows, decoding)
        whole = 1e3 * (time.perf_counter() - start)
        spent = breakdown.take(whole)
        if name:
            where[name] = spent
        return whole

    found["first"], found["second"] = call(24, "first"), call(24, "second")
    found["usual"] = min(call(24) for _ in range(4))
    more = {length: call(length, f"{length} tokens") - min(call(length) for _ in range(3)) for length in LENGTHS}
    found["more at a new length"] = {length: round(value, 1) for length, value in more.items()}
    start = time.perf_counter()
    pieces = engine.stream([1, 7, 8, 9, 10, 11], decoding)
    next(pieces)
    found["first streamed"] = 1e3 * (time.perf_counter() - start)
    where["first streamed"] = breakdown.take(found["first streamed"])
    list(pieces)
    quick = {f"{length} tokens" for length, value in more.items() if value < SHOWN}
    found["where"] = {name: spent for name, spent in where.items() if name not in quick}
    return found


def save(job: str, folder: Path, device: str, tiny: bool) -> None:
    model: Any = parse(Model, variants(TINY if tiny else SkeletonSizes())[job.split(":")[0]]).build()  # type: ignore[type-abstract]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    Folder(model.to(dtype).eval(), None, {"kind": "causal-lm"}).save(folder / "model")


def run(job: str, folder: Path, state: str, given: argparse.Namespace) -> None:
    """Measure a job in a process of its own, and print it."""
    around = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, __file__, "--child", job, "--folder", f"{folder}/model", "--device", given.device]
    command += ["--tiny"] * given.tiny
    environment = os.environ | around | {"BEGAN": str(time.time())}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        print(f"{job} {state}: FAILED", flush=True)
        return
    values = json.loads(done.stdout.splitlines()[-1])
    where = values.pop("where")
    shown = [f"{name} {value if isinstance(value, dict) else round(value)}" for name, value in values.items()]
    lines = [f"{job} {state}: {'  '.join(shown)}", *(f"    {name}: {spent}" for name, spent in where.items())]
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"mixer:rows; default: {' '.join(JOBS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.child, given.folder, given.device, given.tiny)))
        return
    print("milliseconds", flush=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        folders = {job: Path(scratch) / job.replace(":", "-") for job in given.jobs or JOBS}
        for folder in folders.values():
            folder.mkdir()
        list(pool.map(lambda one: save(*one, given.device, given.tiny), folders.items()))
        list(pool.map(lambda one: run(*one, "cold", given), folders.items()))
        for job, folder in folders.items():
            run(job, folder, "warm", given)


if __name__ == "__main__":
    main()
