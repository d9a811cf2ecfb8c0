from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome

WIDTH, FEATURES = 16, 256


def positive(x: Tensor, omega: Tensor) -> Tensor:
    return (x @ omega.T - x.square().sum(-1, keepdim=True) / 2).exp() / len(omega) ** 0.5


def trigonometric(x: Tensor, omega: Tensor) -> Tensor:
    turned = x @ omega.T
    return (
        (x.square().sum(-1, keepdim=True) / 2).exp() * torch.cat((turned.sin(), turned.cos()), -1) / len(omega) ** 0.5
    )


def error(features: object, length: float, dice: torch.Generator) -> tuple[float, float]:
    """Mean squared error of the kernel exp(x·y) over its mean square, where it is small (x and y opposite); and the
    share of normalisers (sums over keys) that are not positive."""
    omega = torch.randn(FEATURES, WIDTH, generator=dice, dtype=torch.double)
    x = torch.nn.functional.normalize(torch.randn(64, WIDTH, generator=dice, dtype=torch.double), dim=-1) * length
    y = -x + 0.1 * torch.randn(64, WIDTH, generator=dice, dtype=torch.double)
    found = (features(x, omega) * features(y, omega)).sum(-1)  # type: ignore[operator]
    exact = (x * y).sum(-1).exp()
    bad = ((features(x, omega) @ features(y[:4], omega).T).sum(-1) <= 0).double().mean()  # type: ignore[operator]
    return float((found - exact).square().mean() / exact.square().mean()), float(bad)


def measure(run: ClaimRun) -> Outcome:
    lengths, draws = (0.5, 1.0, 1.5, 2.0), run.pick(50, 3)
    kinds = {"positive": positive, "trigonometric": trigonometric}
    ratios, curves = [], {name: dict.fromkeys(lengths, 0.0) for name in kinds}
    bad = dict.fromkeys(kinds, 0.0)
    for seed in run.seeds:
        dice = torch.Generator().manual_seed(seed)
        means = {name: {n: [error(one, n, dice) for _ in range(draws)] for n in lengths} for name, one in kinds.items()}
        for name, found in means.items():
            for n, pairs in found.items():
                curves[name][n] += sum(a for a, _ in pairs) / draws / len(run.seeds)
            bad[name] += sum(b for _, b in found[2.0]) / draws / len(run.seeds)
        first, second = (sum(a for a, _ in means[name][2.0]) / draws for name in kinds)
        ratios.append(first / second)
    return Outcome(
        (
            Figure(
                ("positive over trigonometric, small values (‖x‖ = 2)", "正特征/三角特征，核值很小时（‖x‖ = 2）"),
                tuple(ratios),
                high=0.5,
            ),
            Figure(
                ("normalisers ≤ 0, trigonometric", "三角特征：归一化项 ≤ 0 的比例"), (bad["trigonometric"],), low=0.01
            ),
            Figure(("normalisers ≤ 0, positive", "正特征：归一化项 ≤ 0 的比例"), (bad["positive"],), 0.0, 0.0),
        ),
        curves,
        ("‖x‖", "relative squared error where exp(x·y) is small"),
        log=True,
    )


CLAIM = Claim(
    "Choromanski et al. 2021, Rethinking Attention with Performers, lemma 2",
    (
        "Where the kernel is small, positive features have an error near zero and trigonometric ones an arbitrarily "
        "large "
        "one, with negative normalisers.",
        "核值很小处，正特征的误差趋于零，三角特征的误差可任意大，且归一化项会变负。",
    ),
    (
        "Relative squared error of exp(x·y) for nearly opposite x and y, 256 features, 50 draws, three seeds; "
        "normalisers "
        "of four such keys.",
        "x 与 y 几乎相反时 exp(x·y) 的相对平方误差，256 个特征、50 次抽样、三个种子；并统计四个此类键的归一化项。",
    ),
    measure,
)
