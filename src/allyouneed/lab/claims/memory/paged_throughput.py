from __future__ import annotations

from allyouneed.lab.claims.claim import Claim

CLAIM = Claim(
    "Kwon et al. 2023, PagedAttention, abstract; vLLM's announcement of 2023",
    (
        "2 to 4 times the throughput of FasterTransformer and Orca at the same latency; up to 24 times that of "
        "Hugging Face Transformers.",
        "同等延迟下吞吐为 FasterTransformer 与 Orca 的 2 到 4 倍；至多为 Hugging Face Transformers 的 24 倍。",
    ),
    why_not=(
        "FasterTransformer and Orca do not run here. Our engine, which pages too, is measured against Hugging Face's "
        "generate on one GPU by bench/decode/gpu.py (docs/results/decode-gpu.md).",
        "FasterTransformer 与 Orca 在此无法运行。本引擎同样分页，与 Hugging Face generate 在单 GPU 上的比较见 "
        "bench/decode/gpu.py（docs/results/decode-gpu.md）。",
    ),
)
