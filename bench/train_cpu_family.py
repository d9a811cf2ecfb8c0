"""Training speed of every mixer in one skeleton on a CPU (train_cpu.py --family).

The skeleton: 6 layers of width 256, 4 heads, a gated channel of 704, vocabulary 2,000, fp32, one thread; a step is
forward and backward of 4 rows of 256 tokens. FLOPs are those of the cost functions, three times the forward pass; a
share is GFLOP/s over attention's. All mixers alternate; time is CPU time of this process, so that other load on the
machine counts little, and the best turn counts. Tensorized attention is left out: its cost grows with the cube.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.causal_lm import CausalLM

WIDTH, HEADS, LAYERS, HIDDEN, VOCAB, ROWS, TIME = 256, 4, 6, 704, 2000, 4, 256
HEAD = WIDTH // HEADS
HEADED, CAUSAL, PAST = {"heads": HEADS}, {"pattern": "causal"}, {"sees": "past"}

MIXERS: dict[str, dict[str, Any]] = {
    "attention": HEADED | CAUSAL,
    "mla": HEADED | CAUSAL | {"kv_rank": 2 * HEAD, "nope_width": HEAD, "rope_width": HEAD // 2, "value_width": HEAD},
    "infini": HEADED | {"segment": 64},
    "longnet": HEADED | {"segments": [64, 256], "dilations": [1, 4]} | PAST,
    "lsh": HEADED | {"buckets": 8},
    "synthesizer": HEADED | CAUSAL | {"length": TIME},
    "mssa": HEADED | CAUSAL,
    "gau": CAUSAL,
    "mixed-chunk": {"chunk": 64},
    "performer": HEADED,
    "retention": HEADED | {"value_width": HEAD},
    "gated-retention": HEADED,
    "mamba": {},
    "mamba2": {"heads": 2 * HEADS},
    "s4": {},
    "rwkv": {},
    "lstm": {},
    "gru": {},
    "convolution": {"size": 3} | PAST,
    "lightweight-convolution": HEADED | {"size": 7} | PAST,
    "dynamic-convolution": HEADED | {"size": 7} | PAST,
    "lsra": HEADED | CAUSAL | {"size": 7},
    "identity": {},
}


def models() -> dict[str, dict[str, Any]]:
    found = {name: tree({"kind": name} | keys) for name, keys in MIXERS.items()}
    expert = {"kind": "glu", "hidden": HIDDEN // 2}
    attention = {"kind": "attention"} | MIXERS["attention"]
    found["experts, 2 of 8"] = tree(attention, {"kind": "moe", "experts": 8, "top": 2, "expert": expert})
    return found


def tree(mixer: dict[str, Any], channel: dict[str, Any] | None = None) -> dict[str, Any]:
    layer = {
        "repeat": LAYERS,
        "wiring": "pre-norm",
        "mixer": mixer,
        "channel": channel or {"kind": "glu", "hidden": HIDDEN},
    }
    return {
        "kind": "decoder",
        "vocab": VOCAB,
        "width": WIDTH,
        "norm": "rms",
        "embed": {"tied": True},
        "decoder": [layer],
    }


class Trained:
    def __init__(self, keys: dict[str, Any]) -> None:
        torch.manual_seed(0)
        config = parse(Model, keys)  # type: ignore[type-abstract]
        self.model, self.task = config.build().train(), CausalLM()
        self.flops = 3 * config.cost(TIME).flops
        rows = torch.randint(1, VOCAB, (ROWS, TIME + 1))
        self.batch = Batch(Rows(rows[:, :-1].contiguous()), labels=rows[:, 1:].contiguous())

    def step(self) -> float:
        """Seconds of CPU time."""
        begin = time.process_time()
        self.model.zero_grad()
        self.task.loss(self.model, self.batch).total.backward()
        return time.process_time() - begin


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
