from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config

# table 3: what differs from base, and millions of parameters; rows that print none are those of base
ROWS = {
    "base": ({}, 65),
    "(B) d_k = 16": ({"head_width": 16}, 58),
    "(B) d_k = 32": ({"head_width": 32}, 60),
    "(C) N = 2": ({"layers": 2}, 36),
    "(C) N = 4": ({"layers": 4}, 50),
    "(C) N = 8": ({"layers": 8}, 80),
    "(C) d_model = 256": ({"width": 256, "head_width": 32}, 28),
    "(C) d_model = 1024": ({"width": 1024, "head_width": 128}, 168),
    "(C) d_ff = 1024": ({"hidden": 1024}, 53),
    "(C) d_ff = 4096": ({"hidden": 4096}, 90),
    "big": ({"width": 1024, "hidden": 4096, "heads": 16, "head_width": 64}, 213),
}


def millions(layers: int = 6, width: int = 512, hidden: int = 2048, heads: int = 8, head_width: int = 64) -> float:
    mixer = {"kind": "attention", "heads": heads, "head_width": head_width, "bias": False}
    layer = {"repeat": layers, "mixer": mixer, "channel": {"kind": "ffn", "hidden": hidden}}
    tree = {"kind": "encoder-decoder", "vocab": 37000, "width": width, "encoder": [layer]}
    tree["decoder"] = [layer | {"mixer": mixer | {"pattern": "causal"}, "cross": mixer}]
    return float(config(tree).cost(1).parameters / 1e6)


def measure(run: ClaimRun) -> Outcome:
    figures = []
    for name, (changes, published) in ROWS.items():
        # d_k alone: keys narrower than values, which stay 64 wide; ours has one width for both
        found = millions(**changes)
        if name.startswith("(B)"):
            found += 18 * 2 * 512 * 8 * (64 - changes["head_width"]) / 1e6
        name_of = (f"{name}: millions over {published}", f"{name}：百万参数/{published}")
        figures.append(Figure(name_of, (found / published,), 0.95, 1.05))
    implied = 37000 + (ROWS["base"][1] - millions()) * 1e6 / 512  # the table's sizes fit a larger shared vocabulary
    figures.append(Figure(("vocabulary that the size of base implies", "由 base 参数量反推的词表大小"), (implied,)))
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 3",
    (
        "Parameters of the variations: 65M (base), 36M (N = 2) … 168M (d_model = 1024), 213M (big).",
        "各变体的参数量：6,500 万（base）、3,600 万（N = 2）……1.68 亿（d_model = 1024）、2.13 亿（big）。",
    ),
    (
        "Parameters from the cost functions with a shared vocabulary of 37,000, within 5%. BLEU and perplexity of the "
        "table need WMT and days of GPUs.",
        "由成本函数计算参数量（共享词表 37,000），相差 5% 以内。表中的 BLEU 与困惑度需要 WMT 数据和数天 GPU。",
    ),
    measure,
)
