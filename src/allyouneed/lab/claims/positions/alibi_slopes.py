from __future__ import annotations

import torch

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.common import Common
from allyouneed.nn.positions.relative import Heads, Relative

HEADS = 8


def measure(run: ClaimRun) -> Outcome:
    module = parse(Relative, {"kind": "alibi"}).build(Heads(HEADS, HEADS, 16, True), Common(width=128))  # type: ignore[type-abstract]
    q = torch.zeros(1, HEADS, 1, 16)
    keys = torch.arange(256)[None]
    bias = module.bias(q, torch.tensor([[255]]), keys, 1.0).expand(1, HEADS, 1, 256)[0, :, 0]
    steps = (bias[:, 1:] - bias[:, :-1]).double()  # the slope of each head
    slopes = steps.mean(1)
    stated = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)], dtype=torch.double)
    moved = module.bias(q, torch.tensor([[1255]]), keys + 1000, 1.0).expand(1, HEADS, 1, 256)[0, :, 0]
    relative = (bias - bias[:, -1:]) - (moved - moved[:, -1:])
    # a head of slope m sees keys until their weight is e^−10 of the nearest one's: 10 / m tokens
    reach = {float(head + 1): float(10 / slopes[head]) for head in range(HEADS)}
    return Outcome(
        (
            Figure(
                ("slopes, error against 2^(−8 i / heads)", "斜率与 2^(−8i/头数) 的误差"),
                (float((slopes - stated).abs().max()),),
                high=1e-6,
            ),
            Figure(
                ("curvature within a head", "单个头内的弯曲"),
                (float((steps - slopes[:, None]).abs().max()),),
                high=1e-4,
            ),
            Figure(
                ("change when both move by 1,000", "同移 1,000 位的变化"), (float(relative.abs().max()),), high=1e-3
            ),
            Figure(
                ("tokens that the farthest head sees (e^−10)", "最远的头可见词元数（e^−10）"), (reach[float(HEADS)],)
            ),
        ),
        {"reach": reach},
        ("head", "tokens until a weight of e^−10"),
        log=True,
    )


CLAIM = Claim(
    "Press et al. 2022, Train Short, Test Long (ALiBi), 3",
    (
        "A bias linear in the distance, with slopes of a geometric sequence from 2^(−8/n), that depends on no absolute "
        "position.",
        "偏置与距离成线性，斜率取自 2^(−8/n) 起的等比数列，与绝对位置无关。",
    ),
    (
        "The biases of eight heads at 256 keys, and at positions 1,000 further.",
        "八个头对 256 个键的偏置，以及整体移动 1,000 位后的偏置。",
    ),
    measure,
)
