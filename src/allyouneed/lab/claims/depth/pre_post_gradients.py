from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder, slope
from allyouneed.nn.batch import Batch, Rows

WIDTH = 64


def gradient(wiring: str, layers: int, seed: int) -> float:
    """Of the second map of the last FFN for the loss of one token (theorem 1), at initialisation; mean over texts."""
    model = built(decoder(layers=layers, width=WIDTH, wiring=wiring), seed)
    weight = model.decoder.blocks[-1].sublayers["channel"].down.weight
    norms = []
    for tokens in torch.randint(0, 64, (16, 1, 32), generator=torch.Generator().manual_seed(seed)):
        model.zero_grad()
        model.head.loss(model(Batch(Rows(tokens)))[:, -1:], tokens[:, :1], 0.0)[0].backward()
        norms.append(float(weight.grad.norm()))
    return sum(norms) / len(norms)


def measure(run: ClaimRun) -> Outcome:
    depths = run.pick((6, 12, 24, 48), (2, 4))
    wirings = ("post-norm", "pre-norm")
    found = {w: [{float(n): gradient(w, n, seed) for n in depths} for seed in range(run.pick(8, 2))] for w in wirings}
    curves = {w: {n: sum(one[n] for one in runs) / len(runs) for n in map(float, depths)} for w, runs in found.items()}
    return Outcome(
        (
            Figure(
                ("Post-LN, exponent of depth", "Post-LN 随深度的指数"),
                tuple(map(slope, found["post-norm"])),
                -0.15,
                0.15,
            ),
            Figure(
                ("Pre-LN, exponent of depth", "Pre-LN 随深度的指数"), tuple(map(slope, found["pre-norm"])), -0.6, -0.4
            ),
        ),
        curves,
        ("layers", "gradient of the last FFN at initialisation"),
        log=True,
    )


CLAIM = Claim(
    "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, theorem 1",
    (
        "At initialisation the gradient of the last FFN is O(d √ln d) in Post-LN, whatever the depth L, and O(d √(ln "
        "d / L)) "
        "in Pre-LN.",
        "初始化时，末层前馈网络的梯度在 Post-LN 中为 O(d √ln d)，与深度 L 无关；在 Pre-LN 中为 O(d √(ln d / L))。",
    ),
    (
        "Norm of that gradient for the loss of single tokens, in decoders of width 64 with 6 to 48 layers and Xavier "
        "weights, eight seeds; the exponent "
        "of L must be near 0 and near −0.5.",
        "宽 64、6 到 48 层、Xavier 初始化的解码器，八个种子，对单个词元的损失测该梯度的范数；L 的指数应接近 0 与 −"
        "0.5。",
    ),
    measure,
    revised=(
        "at first of the mean loss of all tokens with three seeds: exponents 0.09 … 0.34 (Post-LN) and −0.49 … −0.26 "
        "(Pre-LN), inconclusive; the theorem is about the loss of a token",
        "最初用所有词元的平均损失与三个种子：指数为 0.09 … 0.34（Post-LN）与 −0.49 … −0.26（Pre-LN），无定论；而定理"
        "针对单个词元的损失",
    ),
)
