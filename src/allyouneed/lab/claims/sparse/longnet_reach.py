from __future__ import annotations

import torch

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.sparse.two_hops import hops_of
from allyouneed.lab.claims.trees import slope
from allyouneed.nn.common import Common
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.sublayer import Mixer

BASE = 16


def mixer(length: int) -> Mixer:
    """Segments and dilations that both double up to the length (the paper: α = 2)."""
    steps = range((length // BASE).bit_length())
    tree = {"kind": "longnet", "heads": 2, "segments": [BASE << n for n in steps], "dilations": [1 << n for n in steps]}
    return parse(Mixer, tree)  # type: ignore[type-abstract]


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((32, 64, 128, 256), (32, 64))
    reach: dict[float, float] = {}
    for n in lengths:
        mask = mixer(n).visible(TokenFields(torch.arange(n), torch.ones(n, dtype=torch.long)))
        wanted = torch.ones(n, n, dtype=torch.bool).tril() if mixer(n).causal else None
        reach[float(n)] = float(hops_of(mask, wanted))
    common = Common(width=64)
    projections = 8 * 64**2
    flops = {float(n): n * (mixer(n).cost(common, n).flops - projections) for n in (4096, 16384, 65536)}
    growth = reach[float(lengths[-1])] - reach[float(lengths[0])]
    doublings = (lengths[-1] // lengths[0]).bit_length() - 1
    return Outcome(
        (
            Figure(("exponent of n in the FLOPs of attention", "注意力 FLOPs 随 n 的指数"), (slope(flops),), 0.9, 1.1),
            Figure(
                ("layers more between two tokens, a doubling", "长度每翻倍，任意两词元间增加的层数"),
                (growth / doublings,),
                0.0,
                2.0,
            ),
        ),
        {"layers between any two tokens": reach},
        ("tokens", "layers"),
    )


CLAIM = Claim(
    "Ding et al. 2023, LongNet, 2.2 and 3.2",
    (
        "Dilated attention with geometric segments and dilations costs O(n) and connects any two tokens in O(log n) "
        "steps.",
        "分段与空洞率按等比增长的空洞注意力代价为 O(n)，任意两词元在 O(log n) 步内相连。",
    ),
    (
        "FLOPs of the cost function up to 65,536 tokens; reachability of all pairs of up to 256 tokens, segments "
        "from 16.",
        "成本函数给出直到 65,536 个词元的 FLOPs；对至多 256 个词元计算所有对的可达性，分段从 16 起。",
    ),
    measure,
    revised=("shortened to save time; the verdict was the same", "为节省时间而缩短；结论相同"),
)
