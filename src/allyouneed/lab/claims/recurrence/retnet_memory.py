from __future__ import annotations

from typing import Any

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, config

WIDTH, LAYERS, LENGTH, ROWS = 4096, 32, 8192, 8  # 6.7 billion parameters, 8k tokens


def measure(run: ClaimRun) -> Outcome:
    def memory(mixer: dict[str, Any], hidden: int, rows: int) -> float:
        layer = {"repeat": LAYERS, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": hidden}}
        cost = config({"kind": "decoder", "vocab": 32000, "width": WIDTH, "decoder": [layer]}).cost(LENGTH)
        return float(cost.parameters * 2 + rows * cost.state_bytes(LENGTH, 2, captured=True))

    transformer = attention(32)
    grouped = attention(32, kv_heads=8)
    retention = {"kind": "retention", "heads": 16}
    curve = {float(r): memory(transformer, 4 * WIDTH, r) / memory(retention, 2 * WIDTH, r) for r in (1, 2, 4, 8, 16)}
    fair = memory(grouped, 4 * WIDTH, ROWS) / memory(retention, 2 * WIDTH, ROWS)
    return Outcome(
        (
            Figure(
                ("Transformer over RetNet, 8 rows of 8k tokens", "Transformer/RetNet，8 行、8k 词元"),
                (curve[ROWS],),
                2.7,
                4.1,
            ),
            Figure(
                ("the same with grouped queries (8 of 32 heads)", "同上，Transformer 用分组查询（32 取 8）"), (fair,)
            ),
            Figure(("one row", "1 行"), (curve[1],)),
        ),
        {"Transformer over RetNet": curve},
        ("rows of 8k tokens", "weights and state, ratio"),
    )


CLAIM = Claim(
    "Sun et al. 2023, Retentive Network, figure 1 and 3.4",
    (
        "At 6.7B parameters and 8k tokens, RetNet decodes with 3.4 times less GPU memory than a Transformer with a "
        "KV cache "
        "(70% saved).",
        "67 亿参数、8k 词元时，RetNet 解码所需显存比带 KV 缓存的 Transformer 少 3.4 倍（节省 70%）。",
    ),
    (
        "Bytes of weights and state in bf16 from the cost functions, batch 8 (figure 6's largest; the ratio depends on "
        "it, see the curve). Grouped queries, which the paper does not compare with, take most of the gain away.",
        "由成本函数计算 bf16 的权重与状态字节数，批大小为 8（图 6 的最大值；比值随之变化，见曲线）。论文未比较的分组"
        "查询会抵消大部分收益。",
    ),
    measure,
    revised=(
        "at first with copies of the state that our cache keeps so that tokens can be taken back: 2.60, outside the "
        "range",
        "最初计入了我们的缓存为回退词元而保留的状态副本：2.60，落在范围外",
    ),
)
