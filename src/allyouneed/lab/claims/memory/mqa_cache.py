from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.nn.batch import Rows


def state_bytes(heads: int, kv_heads: int, length: int) -> int:
    import torch

    model = built(decoder(attention(heads, kv_heads=kv_heads), 2, 64)).eval()
    with torch.inference_mode():
        states = model.start(1)
        model.advance(Rows(torch.zeros(1, length, dtype=torch.long)), states)
    return int(states.bytes)


def measure(run: ClaimRun) -> Outcome:
    heads, length = 8, run.pick(512, 64)
    sizes = {kv: state_bytes(heads, kv, length) for kv in (8, 4, 2, 1)}
    ratios = {float(kv): sizes[8] / size for kv, size in sizes.items()}
    return Outcome(
        (
            Figure(("multi-head over multi-query, 8 heads", "多头/多查询，8 个头"), (ratios[1],), 7.9, 8.1),
            Figure(("multi-head over grouped-query, 2 groups", "多头/分组查询，2 组"), (ratios[2],), 3.95, 4.05),
        ),
        {"cache of multi-head attention over it": ratios},
        ("key and value heads", "ratio"),
    )


CLAIM = Claim(
    "Shazeer 2019, Fast Transformer Decoding, 3; Ainslie et al. 2023, GQA, 2.2",
    (
        "One head of keys and values makes the cache h times smaller than multi-head attention's; g groups, h / g "
        "times.",
        "只保留一个键值头，缓存缩小为多头注意力的 1/h；分 g 组时缩小为 g/h。",
    ),
    ("Bytes of the allocated decoding state after a prompt.", "处理提示词后实际分配的解码状态字节数。"),
    measure,
)
