from __future__ import annotations

from itertools import pairwise

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows


@torch.no_grad()
def likeness(wiring: str, layers: int, seed: int) -> dict[float, float]:
    """Cosine of what consecutive blocks read, by block."""
    model = built(decoder(layers=layers, width=64, wiring=wiring), seed).eval()
    seen: list[torch.Tensor] = []
    hooks = [
        b.sublayers["mixer"].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for b in model.decoder.blocks
    ]
    model(Batch(Rows(torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(seed)))))
    for hook in hooks:
        hook.remove()
    pairs = pairwise(seen)
    return {float(n): float(torch.cosine_similarity(a, b, dim=-1).mean()) for n, (a, b) in enumerate(pairs, 1)}


def measure(run: ClaimRun) -> Outcome:
    layers = run.pick(48, 6)
    found = {w: [likeness(w, layers, seed) for seed in run.seeds] for w in ("pre-norm", "post-norm", "resi-dual")}
    last = {w: tuple(1 - one[float(layers - 1)] for one in runs) for w, runs in found.items()}
    first = tuple(1 - one[1.0] for one in found["pre-norm"])
    return Outcome(
        (
            Figure(
                ("Pre-LN: 1 − cosine, last over first blocks", "Pre-LN：1 − 余弦，末块/首块"),
                tuple(a / b for a, b in zip(last["pre-norm"], first, strict=True)),
                high=0.2,
            ),
            Figure(
                ("1 − cosine of the last blocks, ResiDual over Pre-LN", "末块 1 − 余弦：ResiDual/Pre-LN"),
                tuple(a / b for a, b in zip(last["resi-dual"], last["pre-norm"], strict=True)),
                low=5.0,
            ),
        ),
        {w: runs[0] for w, runs in found.items()},
        ("block", "cosine with the next block's input"),
    )


CLAIM = Claim(
    "Xie et al. 2023, ResiDual, 2.2; Liu et al. 2020, Understanding the Difficulty of Training Transformers",
    (
        "In deep Pre-LN models the inputs of neighbouring blocks become alike (representation collapse); in ResiDual "
        "they "
        "do not.",
        "在很深的 Pre-LN 模型中，相邻块的输入趋于相同（表示坍缩）；ResiDual 则不会。",
    ),
    (
        "Cosine of the inputs of consecutive attention layers at initialisation, 48 layers of width 64, three seeds.",
        "初始化时相邻注意力层输入的余弦相似度，48 层、宽 64、三个种子。",
    ),
    measure,
)
