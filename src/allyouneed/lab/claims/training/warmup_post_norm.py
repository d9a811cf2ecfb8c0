from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import loss_after
from allyouneed.lab.claims.trees import decoder

LAYERS, RATE = 6, 3e-3


def measure(run: ClaimRun) -> Outcome:
    def loss(wiring: str, warmup: float, seed: int) -> float:
        tree = decoder(layers=LAYERS, wiring=wiring, vocab=128)
        return loss_after(tree, seed, run, rate=RATE, warmup=warmup, steps=run.pick(150, 3))

    found = {
        (w, warm): [loss(w, warm, seed) for seed in run.seeds] for w in ("post-norm", "pre-norm") for warm in (0.0, 0.3)
    }

    def cost(wiring: str) -> tuple[float, ...]:
        return tuple(a - b for a, b in zip(found[wiring, 0.0], found[wiring, 0.3], strict=True))

    return Outcome(
        (
            Figure(
                ("Post-LN: loss without warm-up minus with", "Post-LN：无预热与有预热的损失差"),
                cost("post-norm"),
                low=0.1,
            ),
            Figure(("Pre-LN: the same", "Pre-LN：同上"), cost("pre-norm"), high=0.1),
        )
    )


CLAIM = Claim(
    "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, 3.2 and 4",
    (
        "Post-LN needs a warm-up of the learning rate (without it, IWSLT ends near 8 BLEU instead of 34); Pre-LN "
        "does not.",
        "Post-LN 需要学习率预热（没有时 IWSLT 仅约 8 BLEU，而非 34）；Pre-LN 不需要。",
    ),
    (
        "Six layers of width 64 on characters, 150 steps at a rate of 3·10⁻³, with a warm-up of 30% and without, three "
        "seeds: more or less than 0.1 nats.",
        "六层、宽 64 的字符模型，学习率 3·10⁻³ 训练 150 步，有 30% 预热与无预热，三个种子：差距大于或小于 0.1 nat。",
    ),
    measure,
)
