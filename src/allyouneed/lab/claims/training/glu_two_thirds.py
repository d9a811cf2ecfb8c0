from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import loss_after
from allyouneed.lab.claims.trees import config, decoder

FFN = {"kind": "ffn", "hidden": 192, "activation": "relu", "bias": False}
GLU = {"kind": "glu", "hidden": 128, "activation": "silu", "bias": False}


def measure(run: ClaimRun) -> Outcome:
    trees = {name: decoder(channel=channel, vocab=128) for name, channel in (("FFN, ReLU", FFN), ("SwiGLU", GLU))}
    weights = [config(tree).cost(1).parameters for tree in trees.values()]
    found = {name: [loss_after(tree, seed, run) for seed in run.seeds] for name, tree in trees.items()}
    differences = tuple(b - a for a, b in zip(*found.values(), strict=True))
    return Outcome(
        (
            Figure(
                ("parameters, SwiGLU over FFN at 2/3 of its width", "参数量：2/3 宽的 SwiGLU/FFN"),
                (weights[1] / weights[0],),
                0.99,
                1.01,
                control=True,
            ),
            Figure(("loss of SwiGLU minus ReLU, nats", "SwiGLU 与 ReLU 的损失差，nat"), differences, high=0.0),
        )
    )


CLAIM = Claim(
    "Shazeer 2020, GLU Variants Improve Transformer, 3",
    (
        "With a hidden size of 2/3, gated FFNs have as many parameters and a lower loss than ReLU (T5-base on C4, log "
        "perplexity 1.677 against 1.636).",
        "隐藏宽度取 2/3 时，门控前馈网络参数量相同而损失低于 ReLU（T5-base、C4：对数困惑度 1.677 对 1.636）。",
    ),
    (
        "Two layers of width 64 on characters of Python's standard library, the same batches, three seeds; the "
        "interval of "
        "the paired difference must lie below zero.",
        "两层、宽 64，训练于 Python 标准库源码的字符，批次相同，三个种子；配对差的区间须低于零。",
    ),
    measure,
)
