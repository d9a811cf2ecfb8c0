from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Wu et al. 2020, Lite Transformer with Long-Short Range Attention, abstract",
    (
        "1.2 and 1.7 BLEU above the Transformer on WMT14 English–French at 500M and 100M multiply-adds.",
        "在 WMT14 英法上，500M 与 100M 次乘加时比 Transformer 高 1.2 与 1.7 BLEU。",
    ),
    why_not=(
        "Needs WMT14. Two variants of equal cost can be compared on your own pairs by allyouneed compare --match "
        "flops.",
        "需要 WMT14。可用 allyouneed compare --match flops 在自己的语料上比较两种等代价变体。",
    ),
)
