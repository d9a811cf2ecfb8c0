from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "DeepSeek-AI 2024, DeepSeek-V2, abstract",
    (
        "The maximum generation throughput is 5.76 times that of DeepSeek 67B.",
        "最大生成吞吐是 DeepSeek 67B 的 5.76 倍。",
    ),
    why_not=(
        "Needs models of 67B and 236B parameters on eight GPUs; what the cache contributes is in mla-cache.",
        "需要 67B 与 236B 参数的模型和八块 GPU；缓存的贡献见 mla-cache。",
    ),
    checked=True,
)
