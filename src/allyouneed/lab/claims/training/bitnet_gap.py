from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import loss_after
from allyouneed.lab.claims.trees import decoder


def measure(run: ClaimRun) -> Outcome:
    widths = run.pick((128, 256, 512), (32, 64))
    gaps: list[dict[float, float]] = []
    for seed in run.seeds:
        found = {}
        for width in widths:
            tree = decoder(width=width, layers=4, vocab=128, norm="rms", channel={"kind": "glu", "hidden": 2 * width})
            losses = [
                loss_after(
                    tree | {"linear": kind}, seed, run, steps=run.pick(2000, 3), rows=run.pick(64, 2), length=256
                )
                for kind in ("bit", "dense")
            ]
            found[float(width)] = losses[0] - losses[1]
        gaps.append(found)
    first, last = float(widths[0]), float(widths[-1])
    curve = {n: sum(one[n] for one in gaps) / len(gaps) for n in map(float, widths)}
    return Outcome(
        (
            Figure(
                ("gap to dense, smallest, nats", "与稠密的差距，最小模型，nat"),
                tuple(one[first] for one in gaps),
                low=0.0,
            ),
            Figure(
                ("gap, largest minus smallest", "差距：最大减最小"),
                tuple(one[last] - one[first] for one in gaps),
                high=0.0,
            ),
        ),
        {"BitNet minus dense": curve},
        ("width", "nats per character"),
    )


CLAIM = Claim(
    "Ma et al. 2024, The Era of 1-bit LLMs, table 1",
    (
        "The gap of BitNet b1.58 to fp16 falls with size and is gone at 3B (perplexity: 700M +0.54, 1.3B +0.04, 3B "
        "−0.13).",
        "BitNet b1.58 与 fp16 的差距随规模缩小，在 3B 时消失（困惑度：700M +0.54、1.3B +0.04、3B −0.13）。",
    ),
    (
        "Characters, four layers of width 128 to 512, 2,000 steps, three seeds, the same batches.",
        "字符模型，四层、宽 128 到 512，2,000 步，三个种子，批次相同。",
    ),
    measure,
    needs="gpu",
)
