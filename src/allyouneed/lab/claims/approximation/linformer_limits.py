from __future__ import annotations

from typing import Any

from allyouneed.errors import UserError
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, config, slope

RANK, LENGTHS = 256, (2048, 8192, 32768)


def encoder(mixer: dict[str, Any]) -> dict[str, Any]:
    layer = {"mixer": mixer, "channel": {"kind": "ffn", "hidden": 256}}
    return {"kind": "encoder", "vocab": 100, "width": 64, "encoder": [layer], "head": "none"}


def refused(tree: dict[str, Any]) -> float:
    try:
        config(tree)
    except UserError:
        return 1.0
    return 0.0


def measure(run: ClaimRun) -> Outcome:
    def flops(tree: dict[str, Any], length: int) -> float:
        return float(length * config(tree).cost(length).flops)

    trees = {"Linformer": lambda n: {"kind": "linformer", "heads": 2, "length": n, "rank": RANK}}
    linear = {float(n): flops(encoder(trees["Linformer"](n)), n) for n in LENGTHS}
    full = {float(n): flops(encoder(attention(2, pattern="full")), n) for n in LENGTHS}
    causal = {"kind": "decoder", "vocab": 100, "width": 64}
    causal["decoder"] = [{"wiring": "pre-norm", "mixer": trees["Linformer"](2048)}]
    limit = config(encoder(trees["Linformer"](2048))).limit
    return Outcome(
        (
            Figure(("Linformer: exponent of n in FLOPs", "Linformer：FLOPs 随 n 的指数"), (slope(linear),), 0.95, 1.05),
            Figure(("attention: the same", "注意力：同上"), (slope(full),), 1.6, 2.0, control=True),
            Figure(("a causal Linformer is refused (1: yes)", "因果 Linformer 被拒绝（1 为是）"), (refused(causal),)),
            Figure(
                ("its longest text over the length it was built for", "可读的最长文本/构建时长度"),
                (float(limit or 0) / 2048,),
            ),
        ),
        {"Linformer": linear, "attention": full},
        ("tokens n", "FLOPs"),
        log=True,
    )


CLAIM = Claim(
    "Wang et al. 2020, Linformer, 4",
    (
        "Projecting keys and values to a fixed length k makes attention O(n).",
        "把键和值投影到固定长度 k，注意力代价降为 O(n)。",
    ),
    (
        "Exponent of n in the FLOPs of an encoder layer, k = 256. The last two figures say what the paper does not "
        "stress: "
        "a projected key mixes all tokens, so that it cannot be causal, and texts cannot be longer than in training.",
        "编码器层 FLOPs 随 n 的指数，k = 256。末两行是论文未强调之处：投影后的键混合了所有词元，因此不能用于因果模"
        "型，也不能读更长的文本。",
    ),
    measure,
)
