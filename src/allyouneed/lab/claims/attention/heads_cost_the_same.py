from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, config, decoder


def measure(run: ClaimRun) -> Outcome:
    costs = {heads: config(decoder(attention(heads), layers=6, width=512)).cost(512) for heads in (1, 2, 4, 8, 16, 32)}
    flops = tuple(cost.flops / costs[1].flops for cost in costs.values())
    weights = tuple(cost.parameters / costs[1].parameters for cost in costs.values())
    return Outcome(
        (
            Figure(("FLOPs, most over one head", "FLOPs：最多/单头"), (max(flops),), 0.98, 1.02),
            Figure(("parameters, most over one head", "参数量：最多/单头"), (max(weights),), 0.98, 1.02),
        ),
        {"FLOPs over one head": dict(zip(costs, flops, strict=True))},
        ("heads", "ratio"),
    )


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, 3.2.2",
    (
        "With heads of d_model / h features, multi-head attention costs about as much as one head of full width.",
        "每个头的宽度为 d_model / h 时，多头注意力的总计算量与全宽单头注意力相近。",
    ),
    (
        "FLOPs and parameters of six layers of width 512 at 512 tokens, 1 to 32 heads, from the cost functions.",
        "六层、宽 512、512 个词元，1 到 32 个头：由成本函数得到 FLOPs 与参数量。",
    ),
    measure,
)
