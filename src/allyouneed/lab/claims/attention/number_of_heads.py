from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import loss_after
from allyouneed.lab.claims.trees import attention, decoder

HEADS = (1, 8, 64)


def measure(run: ClaimRun) -> Outcome:
    width, found = run.pick(256, 64), []
    for seed in run.seeds:
        trees = {h: decoder(attention(h, positions="alibi"), 4, width, 128) for h in HEADS}
        found.append(
            {
                float(h): loss_after(tree, seed, run, steps=run.pick(2000, 3), rows=run.pick(64, 2), length=256)
                for h, tree in trees.items()
            }
        )
    curve = {float(h): sum(one[float(h)] for one in found) / len(found) for h in HEADS}
    return Outcome(
        (
            Figure(
                ("loss, one head minus eight", "损失：1 头减 8 头"),
                tuple(one[1.0] - one[8.0] for one in found),
                low=0.0,
            ),
            Figure(
                ("loss, 64 heads minus eight", "损失：64 头减 8 头"),
                tuple(one[64.0] - one[8.0] for one in found),
                low=0.0,
            ),
        ),
        {"loss": curve},
        ("heads", "nats per character"),
    )


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 3 (A)",
    (
        "At constant cost one head is 0.9 BLEU worse than eight, and too many heads are worse again.",
        "计算量不变时，单头比八头低 0.9 BLEU，头过多也会变差。",
    ),
    (
        "Characters, four layers of width 256, 1, 8 and 64 heads, 2,000 steps, three seeds: an inverted U.",
        "字符模型，四层、宽 256，1、8、64 个头，2,000 步，三个种子：应呈倒 U 形。",
    ),
    measure,
    needs="gpu",
)
