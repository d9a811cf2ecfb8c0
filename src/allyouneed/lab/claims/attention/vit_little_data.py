from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Dosovitskiy et al. 2021, An Image Is Worth 16x16 Words, 4.3",
    (
        "On little data ViT is worse than a ResNet; on JFT-300M it is better.",
        "数据少时 ViT 不及 ResNet；在 JFT-300M 上则更好。",
    ),
    why_not=(
        "Needs JFT-300M, which is not public.",
        "需要未公开的 JFT-300M。",
    ),
)
