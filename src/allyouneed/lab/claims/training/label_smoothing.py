from __future__ import annotations

from functools import partial

from torch.nn.functional import cross_entropy

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import sample, trained
from allyouneed.lab.claims.trees import decoder
from allyouneed.lab.probe.train import score


def measure(run: ClaimRun) -> Outcome:
    found: dict[float, list[tuple[float, float]]] = {}
    for smoothing in (0.0, 0.1):
        loss = partial(cross_entropy, label_smoothing=smoothing)
        for seed in run.seeds:
            model = trained(decoder(vocab=128), seed, run, loss=loss)
            found.setdefault(smoothing, []).append(score(model, sample(64, held=True), run.pick(128, 4)))
    pairs = list(zip(found[0.0], found[0.1], strict=True))
    return Outcome(
        (
            Figure(
                ("rise of the loss by smoothing 0.1, nats", "平滑 0.1 使损失上升，nat"),
                tuple(b[0] - a[0] for a, b in pairs),
                low=0.0,
            ),
            Figure(
                ("change of accuracy, points", "准确率变化，百分点"),
                tuple(100 * (b[1] - a[1]) for a, b in pairs),
                low=-1.0,
            ),
        )
    )


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, 5.4",
    (
        "Label smoothing of 0.1 hurts perplexity, as the model learns to be more unsure, but improves accuracy and "
        "BLEU.",
        "0.1 的标签平滑使困惑度变差（模型更不确定），但提高准确率与 BLEU。",
    ),
    (
        "Loss and accuracy on held-out characters with and without smoothing, the same batches, three seeds: the loss "
        "rises, accuracy falls by less than a point. BLEU needs translation.",
        "有无平滑时在留出字符上的损失与准确率，批次相同，三个种子：损失应上升，准确率下降不超过一个百分点。BLEU 需要"
        "翻译任务。",
    ),
    measure,
)
