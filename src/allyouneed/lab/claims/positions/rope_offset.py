from __future__ import annotations

from itertools import pairwise

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.positions.rotary import Rotary

WIDTH = 64


def turned(x: torch.Tensor, start: int) -> torch.Tensor:
    """x (time, width) at the positions from `start`."""
    module = Rotary(order="interleaved").build(Heads(1, 1, WIDTH, True), Common(width=WIDTH))
    layout = TokenLayout(torch.arange(start, start + len(x))[None])
    q, _, _ = module.apply_positions(x[None, None], x[None, None], x[None, None], Context(layout))
    return q[0, 0]


def measure(run: ClaimRun) -> Outcome:
    count, gaps, growth = run.pick(512, 32), [], []
    bound: dict[float, float] = {}
    for seed in run.seeds:
        dice = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(1, WIDTH, generator=dice).expand(count, -1) for _ in range(2))
        near, far = (turned(q, start) @ turned(k, start).T for start in (0, 1000))
        gaps.append(float((near - far).abs().max() / near.abs().max()))
    # 3.4.3: |Σ (q_i k_i) e^(i (m − n) θ)| is bounded by the mean of |S_j|, partial sums of the turning factors
    angles = 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    for distance in range(0, 257):
        sums = torch.polar(torch.ones(WIDTH // 2), distance * angles).cumsum(0)
        bound[float(distance)] = float(sums.abs().mean())
    smooth = [sum(bound[float(d)] for d in range(start, start + 32)) / 32 for start in (0, 32, 64, 128, 224)]
    growth = [after / before for before, after in pairwise(smooth)]
    rises = sum(bound[float(d + 1)] > bound[float(d)] for d in range(256)) / 256
    return Outcome(
        (
            Figure(
                ("change of q·k when both move by 1,000", "两者同移 1,000 位时 q·k 的变化"), (max(gaps),), high=1e-3
            ),
            Figure(
                ("bound, growth between windows of 32, largest", "上界在 32 宽窗口间的最大增长"),
                (max(growth),),
                high=1.0,
            ),
            Figure(("share of steps at which the bound rises", "上界上升的步数比例"), (rises,)),
        ),
        {"bound": bound},
        ("distance", "mean of |S_j|"),
    )


CLAIM = Claim(
    "Su et al. 2021, RoFormer, 3.4.1 and 3.4.3",
    (
        "The product of a rotated query and key depends on their offset only, and its bound decays with distance.",
        "旋转后的查询与键的点积只取决于相对位移，其上界随距离衰减。",
    ),
    (
        "Equal queries and keys at positions from 0 and from 1,000; the bound of 3.4.3, width 64, averaged over "
        "windows "
        "of 32 distances (it oscillates; the last figure says how often it rises).",
        "相同查询与键分别从位置 0 与 1,000 起；3.4.3 的上界（宽 64）按 32 个距离取平均（它会振荡，末行给出上升的比"
        "例）。",
    ),
    measure,
)
