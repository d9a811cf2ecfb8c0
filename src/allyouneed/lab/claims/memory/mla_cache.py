from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, config, decoder

LENGTH = 32768


def measure(run: ClaimRun) -> Outcome:
    # DeepSeek 67B: 95 layers, 8 of 64 key and value heads of 128; DeepSeek-V2: 60 layers, a latent of 512 and 64 rotary
    dense = attention(64, kv_heads=8, head_width=128)
    latent = {"kind": "mla", "heads": 128, "kv_rank": 512, "query_rank": 1536, "nope_width": 128, "rope_width": 64}
    latent |= {"value_width": 128, "pattern": "causal"}
    per_token = [
        config(decoder(mixer, layers, width, 100)).cost(LENGTH).state_per_token
        for mixer, layers, width in ((dense, 95, 8192), (latent, 60, 5120))
    ]
    ratio = per_token[1] / per_token[0]
    same = config(decoder(attention(128, head_width=128), 60, 5120, 100)).cost(LENGTH).state_per_token
    return Outcome(
        (
            Figure(
                ("less cache than 67B, % (same bits)", "比 67B 少的缓存，%（位数相同）"),
                (100 * (1 - ratio),),
                93.2,
                93.4,
            ),
            Figure(("the same with 6 bits against 16, %", "同上，6 位对 16 位，%"), (100 * (1 - ratio * 6 / 16),)),
            Figure(("less than MHA of its own size, %", "比同规模多头注意力少，%"), (100 * (1 - per_token[1] / same),)),
        )
    )


CLAIM = Claim(
    "DeepSeek-AI 2024, DeepSeek-V2, abstract and 3.2.3",
    (
        "Compared with DeepSeek 67B, DeepSeek-V2 (MLA) reduces the KV cache by 93.3%.",
        "与 DeepSeek 67B 相比，DeepSeek-V2（MLA）的 KV 缓存减少 93.3%。",
    ),
    (
        "Cached numbers per token of both sizes, from the cost functions. The paper's deployment also quantizes the "
        "cache "
        "of V2 to 6 bits on average (3.2.3), which the second figure adds.",
        "由成本函数得到两种规模每词元缓存的数值个数。论文部署时还把 V2 的缓存平均量化到 6 位（3.2.3），第二个数字计入"
        "了这一点。",
    ),
    measure,
    checked=True,
)
