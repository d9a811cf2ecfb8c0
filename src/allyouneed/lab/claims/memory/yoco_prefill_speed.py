from __future__ import annotations

import time
from typing import Any

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.speed import heads, model_of
from allyouneed.lab.claims.trees import built
from allyouneed.nn.batch import Rows


def tree(run: ClaimRun) -> dict[str, Any]:
    whole = model_of({"kind": "gated-retention", "heads": run.pick(16, 4)}, run)
    first = whole.pop("decoder")[0]
    first["repeat"] //= 2
    second = {key: value for key, value in first.items() if key != "mixer"} | {
        "cross": heads(run, kv_heads=run.pick(4, 2))
    }
    return whole | {"kind": "decoder-decoder", "first": [first], "second": [second]}


@torch.inference_mode()
def seconds(keys: dict[str, Any], length: int, run: ClaimRun) -> float:
    model = built(keys).eval().to(run.device, torch.bfloat16 if run.device == "cuda" else torch.float32)
    tokens, best = torch.zeros(1, length, dtype=torch.long, device=run.device), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        model.advance(Rows(tokens), model.start(1), last=True).sum().item()
        best = min(best, time.perf_counter() - began)
    return best


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((8192, 32768, 131072), (64, 128))
    trees = {"Transformer": model_of(heads(run, kv_heads=run.pick(4, 2)), run), "YOCO": tree(run)}
    found = {name: {float(n): seconds(keys, n, run) for n in lengths} for name, keys in trees.items()}
    gain = {n: found["Transformer"][n] / found["YOCO"][n] for n in map(float, lengths)}
    return Outcome(
        (
            Figure(
                ("prefill, Transformer over YOCO, longest", "预填充：Transformer/YOCO，最长"),
                (gain[float(lengths[-1])],),
                low=2.0,
            ),
            Figure(
                ("growth of the gain, longest over shortest", "收益的增长，最长/最短"),
                (gain[float(lengths[-1])] / gain[float(lengths[0])],),
                low=1.2,
            ),
        ),
        found,
        ("tokens of the prompt", "seconds of the prefill"),
        log=True,
    )


CLAIM = Claim(
    "Sun et al. 2024, You Only Cache Once, 4.4",
    (
        "Prefilling 512k tokens is 30.3 times faster than with a Transformer (2.87 times at 32k) and throughput 9.6 "
        "times "
        "higher.",
        "512k 词元的预填充比 Transformer 快 30.3 倍（32k 时 2.87 倍），吞吐高 9.6 倍。",
    ),
    (
        "Seconds of a prefill of 8k to 128k tokens, 1.3B parameters, bf16, fastest of three: the gain must be above "
        "2 and "
        "grow with the length.",
        "1.3B 参数、bf16，预填充 8k 到 128k 词元的秒数，三次取最快：收益须大于 2 并随长度增长。",
    ),
    measure,
    needs="gpu",
)
