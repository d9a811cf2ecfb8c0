from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Borgeaud et al. 2022, Improving Language Models by Retrieving from Trillions of Tokens, abstract",
    (
        "With a database of 2 trillion tokens a 7.5B model performs like GPT-3 with 25 times fewer parameters.",
        "借助 2 万亿词元的数据库，7.5B 模型以 1/25 的参数达到 GPT-3 的水平。",
    ),
    why_not=(
        "Needs a database of trillions of tokens. What neighbours add to a small model, with and without leakage, is "
        "measured by bench/family/retro.py (docs/results/retro.md).",
        "需要万亿词元的数据库。近邻对小模型的作用（有无泄漏）由 bench/family/retro.py 测量（docs/results/retro.md）。",
    ),
)
