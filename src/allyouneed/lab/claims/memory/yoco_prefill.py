from __future__ import annotations

from typing import Any

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import FFN, attention, built
from allyouneed.nn.batch import Batch, Rows

LAYERS = 4


def tree() -> dict[str, Any]:
    layer = {"repeat": LAYERS, "wiring": "pre-norm", "channel": FFN}
    first = layer | {"mixer": {"kind": "gated-retention", "heads": 4}}
    second = layer | {"cross": attention(positions="rotary")}
    return {"kind": "decoder-decoder", "vocab": 64, "width": 64, "first": [first], "second": [second]}


@torch.no_grad()
def measure(run: ClaimRun) -> Outcome:
    gaps, counted = [], []
    length = run.pick(64, 8)
    for seed in run.seeds:
        model = built(tree(), seed).eval().double()
        tokens = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
        whole, states = model(Batch(Rows(tokens))), model.start(2)
        seen: list[int] = []
        block = model.second.blocks[0].sublayers["channel"]
        hook = block.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
        last = model.advance(Rows(tokens), states, last=True)
        hook.remove()
        gaps.append(float((last[:, -1] - whole[:, -1]).abs().max() / whole.abs().max()))
        counted.append(float(seen[0]))
    return Outcome(
        (
            Figure(("difference of the last output, relative", "末位输出的相对差异"), (max(gaps),), high=1e-9),
            Figure(("tokens of the prompt that enter the second half", "进入后一半的提示词元数"), tuple(counted), 1, 1),
        )
    )


CLAIM = Claim(
    "Sun et al. 2024, You Only Cache Once, 2.3",
    (
        "Prefilling can exit before the cross-decoder without changing the output.",
        "预填充可在交叉解码器之前提前结束而不改变输出。",
    ),
    (
        "The last output of a prompt that was prefilled, against the whole text through all layers, in float64.",
        "预填充后提示末位的输出，与全文经过所有层的结果比较，float64。",
    ),
    measure,
)
