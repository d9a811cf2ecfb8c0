from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Yang et al. 2019, XLNet, table 1",
    (
        "Trained on the same data as BERT-large: SQuAD 2.0 F1 85.5 to 87.8, RACE 75.1 to 77.4.",
        "与 BERT-large 同数据训练：SQuAD 2.0 F1 由 85.5 升至 87.8，RACE 由 75.1 升至 77.4。",
    ),
    why_not=(
        "Needs pre-training at the size of BERT-large. That the two streams do not leak is tested in tests/nn.",
        "需要 BERT-large 规模的预训练。双流不泄漏由 tests/nn 检验。",
    ),
)
