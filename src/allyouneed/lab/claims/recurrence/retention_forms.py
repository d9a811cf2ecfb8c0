from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows

MIXERS = {
    "retention": {"kind": "retention", "heads": 4},
    "gated retention": {"kind": "gated-retention", "heads": 4},
    "RWKV": {"kind": "rwkv"},
    "Mamba": {"kind": "mamba"},
    "Mamba-2": {"kind": "mamba2", "heads": 4, "state": 16},
    "S4": {"kind": "s4", "state": 16},
}


@torch.no_grad()
def measure(run: ClaimRun) -> Outcome:
    length, figures = run.pick(96, 12), []
    for name, mixer in MIXERS.items():
        model = built(decoder(mixer)).eval().double()
        tokens = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
        whole = model(Batch(Rows(tokens)))
        gaps = []
        for size in (1, 5, length // 3):
            states = model.start(2)
            pieces = [model.advance(Rows(part), states) for part in tokens.split(size, 1)]
            gaps.append(float((torch.cat(pieces, 1) - whole).abs().max() / whole.abs().max()))
        text = (f"{name}: parallel, chunks, token by token", f"{name}：并行、分块、逐词元")
        figures.append(Figure(text, (max(gaps),), high=1e-8))
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Sun et al. 2023, Retentive Network, 2.1; Dao, Gu 2024, Transformers are SSMs, 3; Gu et al. 2022, S4, 2",
    (
        "The parallel, the chunkwise and the recurrent form of retention (and of other linear recurrences) are the "
        "same "
        "function.",
        "保留机制（以及其他线性循环）的并行、分块与循环形式是同一个函数。",
    ),
    (
        "Largest difference, relative, of whole texts against chunks of three sizes, in float64.",
        "整段计算与三种大小分块计算的最大相对差异，float64。",
    ),
    measure,
)
