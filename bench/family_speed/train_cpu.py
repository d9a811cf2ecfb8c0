"""Training speed of every mixer in one skeleton on a CPU (bench/train/cpu.py --family).

The skeleton: 6 layers of width 256, 4 heads, a gated channel of 704, vocabulary 2,000, fp32, one thread; a step is
forward and backward of 4 rows of 256 tokens. FLOPs are those of the cost functions, three times the forward pass; a
share is GFLOP/s over attention's. All mixers alternate; time is CPU time of this process, so that other load on the
machine counts little, and the best turn counts. Tensorized attention is left out: its cost grows with the cube.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.lab.mixer_sizes import CPU, variants
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.language.causal_lm import CausalLM

SIZES = replace(CPU, vocab=2000, segment=64)
ROWS, TIME = 4, 256
LEFT_OUT = ("tensorized", "rwkv-both", "yoco", "bitnet-packed", "grouped-queries", "window", "alibi", "t5", "shaw",
            "transformer-xl")  # fmt: skip


def models() -> dict[str, dict[str, Any]]:
    return {name: keys for name, keys in variants(SIZES).items() if name not in LEFT_OUT}


class Trained:
    def __init__(self, keys: dict[str, Any], rows: int = ROWS, length: int = TIME) -> None:
        torch.manual_seed(0)
        config = parse(Model, keys)  # type: ignore[type-abstract]
        self.model, self.task = config.build().train(), CausalLM()
        self.flops = 3 * config.cost(length).flops
        text = torch.randint(1, keys["vocab"], (rows, length + 1))
        self.batch = Batch(Rows(text[:, :-1].contiguous()), labels=text[:, 1:].contiguous())

    def step(self, clock: Callable[[], float] = time.process_time) -> float:
        """Seconds by this clock; default: CPU time."""
        begin = clock()
        self.model.zero_grad()
        self.task.loss(self.model, self.batch).total.backward()
        return clock() - begin


def profile(trained: Trained) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watched

    with watched(activities=[ProfilerActivity.CPU]) as seen:
        trained.step()
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


def family(names: list[str], turns: int, profiled: bool) -> None:
    torch.set_num_threads(1)
    chosen = {name: keys for name, keys in models().items() if not names or name in {*names, "attention"}}
    all_of_them = {name: Trained(keys) for name, keys in chosen.items()}
    best = {name: float("inf") for name in chosen}
    for turn in range(turns + 1):  # the first warms up
        for name, trained in all_of_them.items():
            seconds = trained.step()
            best[name] = min(best[name], seconds) if turn else best[name]
    tokens = ROWS * TIME
    rates = {name: trained.flops * tokens / best[name] / 1e9 for name, trained in all_of_them.items()}
    print(f"torch {torch.__version__}, best of {turns} turns\n")
    print("| mixer | tokens per CPU second | MFLOPs per token | GFLOP/s | share of attention's |")
    print("|---|--:|--:|--:|--:|")
    for name in sorted(rates, key=lambda name: -rates[name]):
        words = f"{tokens / best[name]:,.0f} | {all_of_them[name].flops / 1e6:.1f} | {rates[name]:.1f}"
        print(f"| {name} | {words} | {rates[name] / rates['attention']:.2f} |")
    if profiled:
        for name in names:
            profile(all_of_them[name])
