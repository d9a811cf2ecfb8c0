from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, config

LENGTHS = (8192, 32768, 131072, 524288)


def measure(run: ClaimRun) -> Outcome:
    yoco = config("yoco-3b")
    layer = {"repeat": 26, "wiring": "pre-norm", "mixer": attention(24, kv_heads=8, positions="rotary", bias=False)}
    layer["channel"] = {"kind": "glu", "hidden": 8192, "activation": "silu"}
    llama = config({"kind": "decoder", "vocab": 100288, "width": 3072, "norm": "rms", "decoder": [layer]})
    cache = {float(n): llama.cost(n).state_bytes(n, 2) / yoco.cost(n).state_bytes(n, 2) for n in LENGTHS}

    def memory(one: object, n: int) -> float:
        cost = one.cost(n)  # type: ignore[attr-defined]
        return float(cost.parameters * 2 + cost.state_bytes(n, 2))

    whole = {float(n): memory(llama, n) / memory(yoco, n) for n in LENGTHS}
    return Outcome(
        (
            Figure(
                ("cache, GQA Transformer over YOCO, 512k", "缓存：GQA Transformer/YOCO，512k"),
                (cache[LENGTHS[-1]],),
                25,
                27,
            ),
            Figure(("weights and cache together, 512k", "权重与缓存合计，512k"), (whole[LENGTHS[-1]],), 6.0, 10.0),
        ),
        {"cache": cache, "weights and cache": whole},
        ("tokens of context", "Transformer over YOCO"),
    )


CLAIM = Claim(
    "Sun et al. 2024, You Only Cache Once, 2.3 and 4.4",
    (
        "YOCO caches keys and values once instead of in L layers; a 3B model at 512k tokens needs 6.4 to 9.4 times "
        "less "
        "memory than a Transformer with grouped queries.",
        "YOCO 的键值只缓存一次而非 L 层各一次；3B 模型在 512k 词元时所需内存比分组查询 Transformer 少 6.4 到 9.4 倍。",
    ),
    (
        "Bytes of weights and decoding state at the paper's sizes (bf16), from the cost functions; L is 26. "
        "Activations "
        "are not counted.",
        "按论文规模（bf16）由成本函数计算权重与解码状态的字节数，L = 26；不计激活值。",
    ),
    measure,
)
