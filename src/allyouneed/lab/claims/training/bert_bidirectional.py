from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Devlin et al. 2019, BERT, table 5",
    (
        "Without masked, bidirectional pre-training (left to right), SQuAD F1 falls from 88.5 to 77.8 and MRPC "
        "accuracy from 86.7 to 77.5.",
        "改为从左到右的预训练后，SQuAD F1 由 88.5 降至 77.8，MRPC 准确率由 86.7 降至 77.5。",
    ),
    why_not=(
        "Needs pre-training at the size of BERT-base on books and Wikipedia.",
        "需要在图书与维基百科上做 BERT-base 规模的预训练。",
    ),
)
