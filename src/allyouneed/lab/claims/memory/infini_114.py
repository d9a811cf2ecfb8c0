from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config

LAYERS, HEADS, HEAD = 12, 8, 128
KNN, SEGMENT = 65536, 2048  # Memorizing Transformers: a memory of 65k keys and values, and a cache in each layer


def measure(run: ClaimRun) -> Outcome:
    state = config("infini").cost(1 << 20)
    segment = LAYERS * 2 * HEADS * HEAD * SEGMENT  # keys and values of the current segment, which every model has
    infini = state.wide_constant  # the memories; the segment's keys and values are kept in half precision
    memorizing = 2 * HEADS * HEAD * (KNN + LAYERS * SEGMENT)
    return Outcome(
        (
            Figure(("Infini, memory in millions", "Infini 记忆，百万个数"), (infini / 1e6,), 1.55, 1.65),
            Figure(
                ("Memorizing Transformers, millions", "Memorizing Transformers，百万个数"),
                (memorizing / 1e6,),
                180,
                187,
            ),
            Figure(("ratio", "比值"), (memorizing / infini,), 110, 120),
            Figure(
                ("ratio, if Infini's segment cache counted too", "若同时计入 Infini 的段缓存"),
                (memorizing / (infini + segment),),
            ),
        )
    )


CLAIM = Claim(
    "Munkhdalai et al. 2024, Leave No Context Behind, table 2",
    (
        "Infini-attention's memory (1.6M numbers) is 114 times smaller than that of Memorizing Transformers (183M).",
        "Infini-attention 的记忆（160 万个数）比 Memorizing Transformers（1.83 亿）小 114 倍。",
    ),
    (
        "Numbers in the state of the preset against keys and values of 65,536 remembered tokens and of a cached "
        "segment "
        "in every layer.",
        "预置模型状态中的数值个数，对比 65,536 个被记住词元的键值加上每层一段的缓存。",
    ),
    measure,
    revised=(
        "at first with the copies that our state keeps so that tokens can be taken back: ratio 59, outside the range",
        "最初计入了我们的状态为回退词元而保留的副本：比值 59，落在范围外",
    ),
)
