from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows


@torch.no_grad()
def measure(run: ClaimRun) -> Outcome:
    """Training mode: batch norm uses the statistics of the batch there."""

    def leaks(norm: str, seed: int) -> tuple[float, float]:
        model = built(decoder(norm=norm), seed).train()
        tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(seed))
        other, later = tokens.clone(), tokens.clone()
        other[1:] = (other[1:] + 1) % 64
        later[:, -1] = (later[:, -1] + 1) % 64
        plain, beside, ahead = (model(Batch(Rows(one))) for one in (tokens, other, later))
        scale = plain.abs().max()
        return float((plain - beside)[0].abs().max() / scale), float((plain - ahead)[:, :-1].abs().max() / scale)

    found = {norm: [leaks(norm, seed) for seed in run.seeds] for norm in ("batch", "layer")}
    return Outcome(
        (
            Figure(
                ("BatchNorm: a text changes with its neighbours", "BatchNorm：文本随同批其他文本改变"),
                tuple(a for a, _ in found["batch"]),
                low=1e-3,
            ),
            Figure(
                ("BatchNorm: earlier tokens see later ones", "BatchNorm：前面的词元看到后面的"),
                tuple(b for _, b in found["batch"]),
                low=1e-3,
            ),
            Figure(
                ("LayerNorm: both", "LayerNorm：两者"),
                (max(max(pair) for pair in found["layer"]),),
                high=1e-5,
                control=True,
            ),
        )
    )


CLAIM = Claim(
    "Ba, Kiros, Hinton 2016, Layer Normalization, 1; Shen et al. 2020, PowerNorm, 1",
    (
        "Batch normalisation makes an example depend on the others of its mini-batch (and, over time steps, on later "
        "ones); layer normalisation does not.",
        "批归一化使样本依赖同一小批的其他样本（沿时间统计时还依赖后面的词元）；层归一化则不会。",
    ),
    (
        "Outputs in training when other texts of the batch, or later tokens, are changed.",
        "训练模式下，改动同批其他文本或后面的词元，观察输出是否改变。",
    ),
    measure,
)
