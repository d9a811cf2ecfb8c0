from __future__ import annotations

from typing import Any

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.nn.batch import Batch, Rows

LENGTH = 24


@torch.no_grad()
def change(mixer: dict[str, Any], seed: int) -> float:
    """How much the weights of the last token move, over the keys that stay, when the other tokens are others."""
    model = built(decoder(mixer, 1), seed).eval()
    tokens = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    others = tokens.clone()
    others[:, :-1] = (others[:, :-1] + 1) % 64
    first, second = (model.attention(Batch(Rows(one)))[0][0, :, -1] for one in (tokens, others))
    return float((first - second).abs().sum(-1).mean())


def measure(run: ClaimRun) -> Outcome:
    mixers: dict[str, dict[str, Any]] = {
        kind: {"kind": "synthesizer", "heads": 2, "length": LENGTH, "synthesis": kind, "pattern": "causal"}
        for kind in ("dense", "random")
    }
    figures = [
        Figure(
            (f"{name}: change of the weights", f"{name}：权重的变化"),
            tuple(change(mixer, seed) for seed in run.seeds),
            high=1e-6,
        )
        for name, mixer in mixers.items()
    ]
    control = tuple(change(attention(2), seed) for seed in run.seeds)
    return Outcome((*figures, Figure(("attention: the same", "注意力：同上"), control, low=1e-3, control=True)))


CLAIM = Claim(
    "Tay et al. 2020, Synthesizer, 3.2 (what follows from it: Arora et al. 2023, Zoology)",
    (
        "Synthesized weights do not depend on token-token interactions; so no token can be found by its content.",
        "合成的权重不依赖词元之间的交互，因此无法按内容查找词元。",
    ),
    (
        "The weights of the last token when all other tokens are replaced: dense and random synthesis, and attention.",
        "替换其余所有词元后，末位词元的注意力权重是否改变：稠密与随机合成，以及注意力。",
    ),
    measure,
)
