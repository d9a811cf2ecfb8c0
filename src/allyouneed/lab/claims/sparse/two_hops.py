from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.patterns.core import Pattern


def hops(pattern: str, length: int) -> int:
    """Layers until every query has seen every key it may see at all in some number of them; −1: never."""
    mask = Pattern.from_text(pattern).mask(length, length)
    return hops_of(
        mask, torch.ones(length, length, dtype=torch.bool).tril() if Pattern.from_text(pattern).causal else None
    )


def hops_of(mask: torch.Tensor, wanted: torch.Tensor | None = None) -> int:
    wanted = torch.ones_like(mask) if wanted is None else wanted
    seen, count = mask, 1
    while not (seen | ~wanted).all():
        more = (seen.float() @ mask.float()) > 0
        if bool((more == seen).all()):
            return -1
        seen, count = more, count + 1
    return count


def measure(run: ClaimRun) -> Outcome:
    sides = run.pick((8, 16, 24), (4, 8))
    strided = {float(s * s): float(hops(f"causal & (window({s}) | strided({s}))", s * s)) for s in sides}
    fixed = {float(s * s): float(hops(f"causal & (block({s}) | fixed({s}, 1))", s * s)) for s in sides}
    side = 128
    keys = Pattern.from_text(f"causal & (window({side}) | strided({side}))").mean_keys(side * side)
    return Outcome(
        (
            Figure(
                ("strided: layers between any two tokens", "跨步：任意两词元间的层数"), tuple(strided.values()), 2, 2
            ),
            Figure(("fixed: layers between any two tokens", "固定：任意两词元间的层数"), tuple(fixed.values()), 2, 2),
            Figure(
                ("strided: keys of a token over √n, n = 16,384", "跨步：每词元的键数/√n，n = 16,384"),
                (keys / side,),
                1.0,
                2.0,
            ),
        ),
        {"strided": strided, "fixed": fixed},
        ("tokens", "layers"),
    )


CLAIM = Claim(
    "Child et al. 2019, Generating Long Sequences with Sparse Transformers, 4.2",
    (
        "Two factorised heads of O(√n) keys each connect any two tokens within p + 1 = 3 steps at most, here two.",
        "两个各含 O(√n) 个键的分解注意力头，可在至多 p + 1 = 3 步（此处两步）内连接任意两个词元。",
    ),
    (
        "Reachability of the pattern algebra's masks, all pairs of up to 576 tokens, both patterns as one; keys of a "
        "token "
        "at 16,384.",
        "由模式代数的掩码计算可达性，至多 576 个词元的所有词元对，两种子模式并用；并统计 16,384 时每词元的键数。",
    ),
    measure,
)
