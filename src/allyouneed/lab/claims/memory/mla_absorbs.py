from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows

MLA = {"kind": "mla", "heads": 4, "kv_rank": 24, "nope_width": 16, "rope_width": 8, "value_width": 16}


@torch.no_grad()
def measure(run: ClaimRun) -> Outcome:
    length, gaps = run.pick(48, 8), []
    for seed in run.seeds:
        model = built(decoder(MLA | {"pattern": "causal"}), seed).eval().double()
        tokens = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
        whole, states = model(Batch(Rows(tokens))), model.start(2)
        steps = [model.advance(Rows(tokens[:, t : t + 1]), states) for t in range(length)]
        gaps.append(float((torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()))
    name = ("largest difference, relative", "最大相对差异")
    return Outcome((Figure(name, (max(gaps),), high=1e-9),))


CLAIM = Claim(
    "DeepSeek-AI 2024, DeepSeek-V2, 2.1.2",
    (
        "W^UK can be absorbed into W^Q and W^UV into W^O, so that decoding computes no keys and values from the "
        "latents.",
        "W^UK 可并入 W^Q，W^UV 可并入 W^O，解码时无需由潜变量算出键和值。",
    ),
    (
        "Token by token from cached latents (absorbed) against the whole sequence (keys and values computed), in "
        "float64.",
        "用缓存的潜变量逐词元解码（已并入），与整段计算（显式算出键值）比较，float64。",
    ),
    measure,
)
