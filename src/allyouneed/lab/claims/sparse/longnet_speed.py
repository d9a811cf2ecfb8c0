from __future__ import annotations

import time

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows


@torch.inference_mode()
def seconds(length: int, run: ClaimRun) -> float:
    segments = run.pick([2048, 8192, 32768], [16, 32])
    mixer = {"kind": "longnet", "heads": 8, "segments": segments, "dilations": run.pick([1, 4, 16], [1, 2])}
    model = (
        built(decoder(mixer, 4, run.pick(512, 32)))
        .eval()
        .to(run.device, torch.bfloat16 if run.device == "cuda" else None)
    )
    tokens, best = torch.zeros(1, length, dtype=torch.long, device=run.device), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        model(Batch(Rows(tokens))).sum().item()
        best = min(best, time.perf_counter() - began)
    return best / length


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((32768, 131072, 524288, 1 << 20), (64, 128))
    found = {float(n): 1e6 * seconds(n, run) for n in lengths}
    rise = found[float(lengths[-1])] / found[float(lengths[0])]
    figure = Figure(("time of a token, longest over shortest", "每词元用时，最长/最短"), (rise,), 0.8, 1.2)
    return Outcome((figure,), {"LongNet": found}, ("tokens", "microseconds a token"))


CLAIM = Claim(
    "Ding et al. 2023, LongNet, figure 5",
    (
        "The time of a token is nearly constant from 8k up to 1B tokens.",
        "从 8k 到 10 亿词元，每词元用时几乎不变。",
    ),
    (
        "Four layers of width 512, bf16, 32k to 1M tokens on one GPU: within 20%.",
        "四层、宽 512、bf16，单 GPU 上 32k 到 1M 词元：相差 20% 以内。",
    ),
    measure,
    needs="gpu",
)
