from __future__ import annotations

from itertools import pairwise

import torch

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.sublayer import Mixer

LENGTH, WIDTH, BUCKETS = 128, 32, 8


@torch.no_grad()
def error(rounds: int, seed: int) -> float:
    """Of LSH attention against the same layer without hashing."""
    layers = []
    for buckets in (BUCKETS, 1):
        torch.manual_seed(seed)
        tree = {"kind": "lsh", "heads": 2, "buckets": buckets, "rounds": rounds, "seed": seed}
        layers.append(parse(Mixer, tree).build(Common(width=WIDTH)).eval())  # type: ignore[type-abstract]
    layers[1].load_state_dict(layers[0].state_dict())
    x = 3 * torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    context = Context(TokenLayout.of(Rows(torch.zeros(4, LENGTH, dtype=torch.long))))
    hashed, exact = (layer(x, context) for layer in layers)
    return float((hashed - exact).norm() / exact.norm())


def measure(run: ClaimRun) -> Outcome:
    rounds = (1, 2, 4, 8)
    runs = [{float(n): error(n, seed) for n in rounds} for seed in run.seeds]
    falls = tuple(float(all(one[float(a)] > one[float(b)] for a, b in pairwise(rounds))) for one in runs)
    curve = {float(n): sum(one[float(n)] for one in runs) / len(runs) for n in rounds}
    return Outcome(
        (
            Figure(("error falls with every doubling (1: yes)", "每次加倍误差都下降（1 为是）"), falls, 1, 1),
            Figure(("error, 8 rounds over 1", "误差：8 轮/1 轮"), tuple(one[8.0] / one[1.0] for one in runs), high=0.7),
        ),
        {"LSH attention": curve},
        ("hash rounds", "relative error against full attention"),
    )


CLAIM = Claim(
    "Kitaev et al. 2020, Reformer, 2 and figure 4",
    (
        "More rounds of hashing approach full attention.",
        "哈希轮数越多，越接近全注意力。",
    ),
    (
        "Error of the output of one layer against the same weights without hashing, 8 buckets, 128 tokens, three "
        "seeds. The "
        "paper's figure is of accuracy after training.",
        "同一组权重下，单层输出与不用哈希时的误差，8 个桶、128 个词元、三个种子。论文的图是训练后的准确率。",
    ),
    measure,
)
