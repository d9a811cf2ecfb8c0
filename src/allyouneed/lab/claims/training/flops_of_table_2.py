from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config

TFLOPS, GPUS = 9.5e12, 8  # footnote 5: sustained single precision of a P100
TOKENS = 25000  # of source and of target in a batch (5.1)
RUNS = {"transformer-base": (12 * 3600, 100_000, 3.3e18), "transformer-big": (3.5 * 86400, 300_000, 2.3e19)}


def measure(run: ClaimRun) -> Outcome:
    figures = []
    for name, (seconds, steps, published) in RUNS.items():
        capacity = seconds * GPUS * TFLOPS
        model = 3 * config(name).cost(32).flops * TOKENS * steps
        text = (f"{name}: time × GPUs × TFLOPS over published", f"{name}：时间×GPU×TFLOPS/论文值")
        figures.append(Figure(text, (capacity / published,), 0.95, 1.05))
        work = (f"{name}: FLOPs of the model over published", f"{name}：模型所需 FLOPs/论文值")
        figures.append(Figure(work, (model / published,)))
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 2",
    (
        "Training costs 3.3·10^18 (base) and 2.3·10^19 (big) FLOPs.",
        "训练代价为 3.3·10^18（base）与 2.3·10^19（big）FLOPs。",
    ),
    (
        "The published estimate: training time × GPUs × sustained TFLOPS (footnote 5). Beside it the FLOPs that the "
        "model "
        "itself takes, three forward passes of a pair of tokens for 25,000 pairs in each step: the ratio is how busy "
        "the GPUs were.",
        "按论文的估算：训练时间 × GPU 数 × 持续 TFLOPS（脚注 5）。另给出模型本身所需：每步 25,000 对词元、每对三次前"
        "向，"
        "其比值即 GPU 利用率。",
    ),
    measure,
)
