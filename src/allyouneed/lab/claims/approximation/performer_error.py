from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, Figure, Outcome, Run
from allyouneed.lab.claims.trees import slope
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.performer import Performer, PerformerModule, orthogonal_features

LENGTH, WIDTH = 64, 16


def module(features: int, width: int, orthogonal: bool) -> PerformerModule:
    built = Performer(heads=1, features=features, sees="around").build(parse(Common, {"width": width}))
    assert isinstance(built, PerformerModule)
    omega = orthogonal_features(features, width) if orthogonal else torch.randn(features, width)
    built.bits.copy_(omega.view(torch.int32))
    return built


def found_by(performer: PerformerModule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = performer.queries(q) @ performer.sum_features(k, v, None)
    return both[..., :-1] / both[..., -1:]


@torch.no_grad()
def error(features: int, orthogonal: bool, seed: int, draws: int, deviation: float = 0.5) -> float:
    """Mean squared error of the attention's output, relative, over draws of features."""
    torch.manual_seed(seed)
    total = 0.0
    for _ in range(draws):
        q, k = (torch.randn(1, 1, LENGTH, WIDTH) * deviation for _ in range(2))
        v = torch.randn(1, 1, LENGTH, WIDTH)
        exact = scaled_dot_product_attention(q, k, v)
        difference = found_by(module(features, WIDTH, orthogonal), q, k, v) - exact
        total += float(difference.square().mean() / exact.square().mean())
    return total / draws


def measure(run: Run) -> Outcome:
    counts, draws = run.pick((16, 64, 256, 1024), (16, 32)), run.pick(30, 2)
    runs = {
        name: [{float(m): error(m, name == "orthogonal", seed, draws) for m in counts} for seed in run.seeds]
        for name in ("orthogonal", "independent")
    }
    ratios = [one[16.0] / other[16.0] for one, other in zip(runs["orthogonal"], runs["independent"], strict=True)]
    curves = {
        name: {float(m): sum(one[float(m)] for one in found) / len(found) for m in counts}
        for name, found in runs.items()
    }
    return Outcome(
        (
            Figure(
                ("exponent of m in the squared error", "平方误差随 m 的指数"),
                tuple(map(slope, runs["orthogonal"])),
                -1.15,
                -0.85,
            ),
            Figure(("orthogonal over independent, m = 16", "正交/独立，m = 16"), tuple(ratios), high=0.999),
        ),
        curves,
        ("random features m", "relative squared error"),
        log=True,
    )


CLAIM = Claim(
    "Choromanski et al. 2021, Rethinking Attention with Performers, theorem 2 and 4.2",
    (
        "The approximation of softmax attention is unbiased, its squared error falls as 1/m, and orthogonal features "
        "have a "
        "lower one than independent ones.",
        "对 softmax 注意力的近似无偏，平方误差按 1/m 下降，正交特征的误差低于独立特征。",
    ),
    (
        "Squared error of the output of one head, 64 tokens, width 16, queries and keys of deviation 0.5; 30 draws, "
        "three "
        "seeds.",
        "单头输出的平方误差，64 个词元、宽 16，查询与键标准差 0.5；各 30 次抽样、三个种子。",
    ),
    measure,
    checked=True,
)
