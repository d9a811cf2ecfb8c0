from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 2",
    (
        "28.4 BLEU on WMT14 English–German and 41.8 on English–French (big), 27.3 and 38.1 (base).",
        "WMT14 英德 28.4 BLEU、英法 41.8（big）；base 为 27.3 与 38.1。",
    ),
    why_not=(
        "Needs WMT14 and 3.3·10^18 FLOPs or more. On Multi30k the model reaches fairseq's published BLEU "
        "(docs/results/multi30k.md).",
        "需要 WMT14 数据与 3.3·10^18 以上的 FLOPs。在 Multi30k 上本模型达到 fairseq 公布的 BLEU（"
        "docs/results/multi30k.md）。",
    ),
)
