from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.positions.absolute import Sinusoidal


def measure(run: ClaimRun) -> Outcome:
    width, count, offset = 128, run.pick(2048, 128), 7
    table = Sinusoidal().build(width)(torch.arange(count)[None])[0].double()
    # one matrix for all positions: the best linear map from PE(pos) to PE(pos + offset)
    found = torch.linalg.lstsq(table[:-offset], table[offset:], driver="gelsd")
    error = float((table[:-offset] @ found.solution - table[offset:]).abs().max())
    products = table @ table.T
    spread = max(float(products.diagonal(k).max() - products.diagonal(k).min()) for k in (1, 10, 100))
    curve = {float(k): float(products[0, k] / products[0, 0]) for k in range(0, min(100, count))}
    falls = curve[1] > curve[10] > curve[min(50, count - 1)]
    return Outcome(
        (
            Figure(("largest error of the linear map", "线性映射的最大误差"), (error,), high=1e-3),
            Figure(("spread of products at one offset", "同一位移下点积的极差"), (spread,), high=1e-3),
            Figure(("products fall with distance (1: yes)", "点积随距离下降（1 为是）"), (float(falls),), 1, 1),
        ),
        {"PE(0)·PE(k)": curve},
        ("offset", "relative product"),
    )


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, 3.5",
    (
        "For any fixed offset k, PE(pos + k) is a linear function of PE(pos); products depend on the offset alone.",
        "对任意固定位移 k，PE(pos + k) 是 PE(pos) 的线性函数；点积只取决于位移。",
    ),
    (
        "One matrix fitted to 2,048 positions, and products of all pairs, width 128.",
        "对 2,048 个位置拟合同一个矩阵，并计算所有位置对的点积，宽度 128。",
    ),
    measure,
)
