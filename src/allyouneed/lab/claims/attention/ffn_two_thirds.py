from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config

PRESETS = {"gpt2": "decoder", "gpt2-xl": "decoder", "bert-base": "encoder", "vit-base-16": "encoder"}


def measure(run: ClaimRun) -> Outcome:
    def share(name: str, stack: str) -> float:
        tree = config(name)
        layer = getattr(tree, stack)[0]
        return float(layer.channel.cost(tree).parameters * layer.repeat / layer.cost(tree, 1).parameters)

    figures = [
        Figure(
            (f"{name}: FFN's share of a block", f"{name}：前馈网络占一个块的比例"), (share(name, stack),), 0.65, 0.68
        )
        for name, stack in PRESETS.items()
    ]
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Geva et al. 2021, Transformer Feed-Forward Layers Are Key-Value Memories, 1",
    (
        "Feed-forward layers hold two thirds of a transformer model's parameters.",
        "前馈层占 Transformer 模型参数的三分之二。",
    ),
    (
        "The share of the FFN in the parameters of a block, for presets whose hidden size is four times the width. "
        "With "
        "embeddings, and with other hidden sizes, it is another.",
        "在隐藏宽度为模型宽度四倍的预置模型中，前馈网络占一个块参数的比例；计入词嵌入或采用其他隐藏宽度时则不同。",
    ),
    measure,
)
