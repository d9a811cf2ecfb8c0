from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision, abstract",
    (
        "Zero-shot ImageNet accuracy of a ResNet-50 from 400 million pairs of images and texts.",
        "以 4 亿图文对训练，零样本即达到 ResNet-50 的 ImageNet 准确率。",
    ),
    why_not=(
        "Needs 400 million pairs and ImageNet.",
        "需要 4 亿图文对与 ImageNet。",
    ),
)
