from __future__ import annotations

from typing import Any

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.nn.batch import Batch, Rows


def measure(run: ClaimRun) -> Outcome:
    layers = run.pick(12, 4)
    kinds: dict[str, dict[str, Any]] = {
        "attention alone": {"wiring": "plain", "channel": None},
        "with skips": {"wiring": {"kind": "pre-norm", "final": False}, "channel": None},
        "with skips and FFN": {"wiring": {"kind": "pre-norm", "final": False}},
    }
    curves: dict[str, dict[float, float]] = {}
    ends: dict[str, list[float]] = {}
    for name, keys in kinds.items():
        for seed in run.seeds:
            found = spread(keys, layers, seed)
            curves.setdefault(name, found)
            ends.setdefault(name, []).append(found[float(layers)])
    return Outcome(
        (
            Figure(
                ("attention alone, distance from rank one", "仅注意力：与秩一的距离"),
                tuple(ends["attention alone"]),
                high=0.01,
            ),
            Figure(("with skip connections", "加残差连接"), tuple(ends["with skips"]), low=0.3),
        ),
        curves,
        ("layers", "‖x − mean of tokens‖ / ‖x‖"),
    )


@torch.no_grad()
def spread(keys: dict[str, Any], layers: int, seed: int) -> dict[float, float]:
    tree = decoder(attention(pattern="full"), layers, 64, **keys)
    tree["encoder"] = tree.pop("decoder")
    model = built(tree | {"kind": "encoder", "head": "none"}, seed).eval()
    outputs: list[torch.Tensor] = []
    for block in model.encoder.blocks:
        block.register_forward_hook(lambda _, __, y: outputs.append(y))
    model(Batch(Rows(torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(seed)))))
    return {float(n): float((x - x.mean(1, keepdim=True)).norm() / x.norm()) for n, x in enumerate(outputs, 1)}


CLAIM = Claim(
    "Dong et al. 2021, Attention Is Not All You Need, 2.1",
    (
        "Without skip connections and MLPs, the output of stacked self-attention converges doubly exponentially to a "
        "rank-one matrix; skip connections prevent it.",
        "没有残差连接与 MLP 时，堆叠的自注意力以双指数速度收敛到秩一矩阵；残差连接可以阻止。",
    ),
    (
        "Distance of the tokens from their mean, behind each of twelve layers at initialisation, three seeds.",
        "初始化时十二层中每层之后，词元与其均值的距离，三个种子。",
    ),
    measure,
)
