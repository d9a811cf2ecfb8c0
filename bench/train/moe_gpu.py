"""Training a mixture of experts on one GPU in bf16: tokens per second against the dense model of the same active FLOPs.

    python bench/train/moe_gpu.py                     experts: 2 of 8, each half as wide as the dense channel
    python bench/train/moe_gpu.py --device cpu --tiny a rehearsal
    python bench/train/moe_gpu.py --eager             without compiling

12 layers of width 768, 12 heads, a gated channel of 2,048, vocabulary 32k, 16 rows of 1,024 tokens. Both train as
`allyouneed train` does (train/gpu.py: Ours), in turns. Before, one eager step of the experts runs where waiting for the
device is an error. Decoding is measured by family_speed/gpu.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.runtime.process import forbid_cuda_sync
from allyouneed.tasks.language.causal_lm import CausalLM
from allyouneed.training.backend import Backend
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.optim.optimiser import Adam
from allyouneed.training.prefetch import DataPosition, Update
from allyouneed.training.step import fetch_results


def tree(width: int, heads: int, layers: int, hidden: int, vocab: int, experts: int) -> dict[str, Any]:
    channel: dict[str, Any] = {"kind": "glu", "hidden": hidden}
    if experts:
        channel = {"kind": "moe", "experts": experts, "top": 2, "expert": channel | {"hidden": hidden // 2}}
    mixer = {"kind": "attention", "heads": heads, "pattern": "causal", "positions": {"kind": "rotary"}}
    layer = {"repeat": layers, "wiring": "pre-norm", "mixer": mixer, "channel": channel}
    embed = {"tied": True}
    return {"kind": "decoder", "vocab": vocab, "width": width, "norm": "rms", "embed": embed, "decoder": [layer]}


class Trained:
    def __init__(self, keys: dict[str, Any], backend: Backend, rows: int, length: int) -> None:
        torch.manual_seed(0)
        config = parse(Model, keys)  # type: ignore[type-abstract]
        self.model, self.backend, self.task = config.build().to(backend.device).train(), backend, CausalLM()
        self.flops, self.tokens, self.number = 3 * config.cost(length).flops, rows * length, 0
        backend.compile_model(self.model)
        self.updates = CapturedUpdates(self.model, self.task, Adam().build(self.model), 1.0, backend)
        text = torch.randint(1, keys["vocab"], (rows, length + 1), device=backend.device)
        self.batch = Batch(Rows(text[:, :-1].contiguous()), labels=text[:, 1:].contiguous())
        self.update = Update([self.batch], [DataPosition(0, 0)], self.tokens, DataPosition(0, 0))

    def step(self) -> None:
        self.number += 1
        pending = self.updates.run(self.update, self.number, 1e-4)
        if self.number % 10 == 0:
            (now,) = fetch_results([pending])
            assert now.finite, now

    def turn(self, steps: int) -> float:
        """Tokens per second."""
        wait = torch.cuda.synchronize if self.backend.cuda else lambda: None
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait()
        return steps * self.tokens / (time.perf_counter() - begin)

    def check_no_waiting(self) -> None:
        def once() -> None:
            with self.backend.eager(), self.backend.autocast():
                self.task.loss(self.model, self.batch).total.backward()
            self.model.zero_grad()

        once()  # allocates, and creates tables
        if self.backend.cuda:
            with forbid_cuda_sync():
                once()
            print("an eager step of the experts never waits for the device", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without compiling")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    cuda = given.device == "cuda"
    backend = Backend(torch.device(given.device), bf16=True, compiled=cuda and not given.eager, summary="")
    sizes = (32, 4, 2, 48, 99) if given.tiny else (768, 12, 12, 2048, 32000)
    shape, steps = ((2, 16), 2) if given.tiny else ((16, 1024), 12)
    models = {}
    for name, experts in (("dense", 0), ("experts", 8)):
        begin = time.perf_counter()
        models[name] = Trained(tree(*sizes, experts), backend, *shape)
        if experts:
            models[name].check_no_waiting()
        models[name].turn(6)  # compiles and captures
        print(f"{name}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.turns):
        for name, model in models.items():
            speeds[name].append(model.turn(steps))
    for name, model in models.items():
        median = statistics.median(speeds[name])
        work = f"{model.flops / 1e6:.0f} MFLOPs a token, {model.flops * median / 1e12:.1f} TFLOP/s"
        captured = "captured" if model.updates.enabled else "not captured"
        print(f"{name:8s} {median:12,.0f} tokens/s   {work}   {captured}")
    found, dense = (statistics.median(speeds[name]) for name in ("experts", "dense"))
    print(f"experts / dense: {found / dense:.2f} (at least 0.6)")


if __name__ == "__main__":
    main()
