from __future__ import annotations

import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "written out": SDPBackend.MATH}


def seconds(kernel: SDPBackend, length: int, run: ClaimRun) -> float:
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, run.pick(16, 2), length, 64, device=run.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        with sdpa_kernel(kernel):
            scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        if run.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((512, 1024, 2048, 4096, 8192), (64, 128))
    found = {name: {float(n): seconds(kernel, n, run) for n in lengths} for name, kernel in KERNELS.items()}
    gain = {n: found["written out"][n] / found["flash"][n] for n in map(float, lengths)}
    middle = float(lengths[len(lengths) // 2])
    return Outcome(
        (
            Figure(
                (f"written out over flash at {middle:,.0f} tokens", f"{middle:,.0f} 个词元：写出矩阵/flash"),
                (gain[middle],),
                low=2.0,
            ),
        ),
        found,
        ("tokens", "seconds, forward and backward"),
        log=True,
    )


CLAIM = Claim(
    "Dao et al. 2022, FlashAttention, abstract",
    (
        "3 times faster training of GPT-2 at 1k tokens and 2.4 times on 1k to 4k tokens (Long Range Arena) than "
        "standard "
        "attention.",
        "训练 GPT-2（1k 词元）比标准注意力快 3 倍，1k 到 4k 词元（Long Range Arena）快 2.4 倍。",
    ),
    (
        "Forward and backward of one causal layer, 16 heads of 64, bf16: at least twice as fast at 2k tokens. Whole "
        "models "
        "gain less.",
        "单个因果层的前向加反向，16 个宽 64 的头，bf16：2k 词元时至少快一倍。整个模型的收益较小。",
    ),
    measure,
    needs="gpu",
)
