from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import slope


def measure(run: ClaimRun) -> Outcome:
    widths = run.pick((8, 32, 128, 512), (8, 32))
    deviations = {seed: {} for seed in run.seeds}  # type: dict[int, dict[float, float]]
    gradients: dict[str, dict[float, float]] = {"dot": dict.fromkeys(widths, 0.0), "scaled": dict.fromkeys(widths, 0.0)}
    for seed in run.seeds:
        dice = torch.Generator().manual_seed(seed)
        for width in widths:
            q, k = (torch.randn(256, 64, width, generator=dice) for _ in range(2))
            scores = (q * k).sum(-1)
            deviations[seed][width] = float(scores.std())
            for name, factor in (("dot", 1.0), ("scaled", width**-0.5)):
                p = (scores * factor).softmax(-1)
                gradients[name][width] += float((p * (1 - p)).sum(-1).mean()) / len(run.seeds)  # trace of the Jacobian
    slopes = tuple(slope(found) for found in deviations.values())
    flat, fall = (gradients[name][widths[-1]] / gradients[name][widths[0]] for name in ("scaled", "dot"))
    return Outcome(
        (
            Figure(("deviation of q·k: exponent of d_k", "q·k 标准差随 d_k 增长的指数"), slopes, 0.47, 0.53),
            Figure(
                ("gradient through softmax, unscaled, widest over narrowest", "不缩放时 softmax 梯度：最宽/最窄"),
                (fall,),
                high=0.5,
            ),
            Figure(("the same, scaled", "同上，缩放后"), (flat,), 0.95, 1.05),
        ),
        gradients,
        ("d_k", "trace of the Jacobian of softmax"),
        log=True,
    )


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, 3.2.1",
    (
        "Products of queries and keys have variance d_k, which pushes softmax where its gradients are extremely small; "
        "dividing by √d_k counteracts this.",
        "查询与键的点积方差为 d_k，使 softmax 落入梯度极小的区域；除以 √d_k 可以抵消。",
    ),
    (
        "Gaussian queries and 64 keys, d_k from 8 to 512: the deviation of the products, and the trace of the Jacobian "
        "of softmax with and without scaling.",
        "高斯查询与 64 个键，d_k 取 8 到 512：测点积的标准差，以及缩放前后 softmax 雅可比矩阵的迹。",
    ),
    measure,
)
