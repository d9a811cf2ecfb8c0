from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config, decoder, slope

EXPERTS = (2, 8, 32, 128)


def measure(run: ClaimRun) -> Outcome:
    expert = {"kind": "ffn", "hidden": 3072}
    costs = {
        float(n): config(
            decoder(layers=12, width=768, channel={"kind": "moe", "experts": n, "top": 1, "expert": expert})
        ).cost(512)
        for n in EXPERTS
    }
    dense = config(decoder(layers=12, width=768, channel=expert)).cost(512)
    flops = {n: one.flops / dense.flops for n, one in costs.items()}
    weights = {n: float(one.parameters) for n, one in costs.items()}
    return Outcome(
        (
            Figure(("FLOPs over dense, 128 experts", "FLOPs/稠密，128 个专家"), (flops[128],), 0.99, 1.05),
            Figure(("parameters, exponent of experts", "参数量随专家数的指数"), (slope(weights),), 0.8, 1.0),
        ),
        {"parameters": weights},
        ("experts", "parameters"),
        log=True,
    )


CLAIM = Claim(
    "Fedus et al. 2021, Switch Transformers, 2",
    (
        "Routing each token to one expert increases parameters with the number of experts at constant FLOPs.",
        "每个词元只路由到一个专家时，参数量随专家数增长而 FLOPs 不变。",
    ),
    (
        "FLOPs and parameters of twelve layers of width 768 from the cost functions.",
        "由成本函数得到十二层、宽 768 的 FLOPs 与参数量。",
    ),
    measure,
)
