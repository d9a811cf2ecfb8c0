from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import slope

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "written out": SDPBackend.MATH}


def attend(kernel: SDPBackend, length: int) -> tuple[torch.Tensor, float]:
    """The output, and the bytes kept for the backward pass beyond inputs and output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 32, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), sdpa_kernel(kernel):
        out = scaled_dot_product_attention(q, k, v)
    own = {x.untyped_storage().data_ptr() for x in (q, k, v, out)}
    return out, float(sum(size for address, size in kept.items() if address not in own))


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((256, 512, 1024, 2048), (64, 128))
    curves: dict[str, dict[float, float]] = {name: {} for name in KERNELS}
    gaps = []
    for length in lengths:
        outputs = []
        for name, kernel in KERNELS.items():
            out, curves[name][float(length)] = attend(kernel, length)
            outputs.append(out)
        gaps.append(float((outputs[0] - outputs[1]).detach().abs().max()))
    last = float(lengths[-1])
    return Outcome(
        (
            Figure(("flash: exponent of n", "flash：随 n 的指数"), (slope(curves["flash"]),), 0.9, 1.1),
            Figure(("written out: exponent of n", "写出矩阵：随 n 的指数"), (slope(curves["written out"]),), 1.8, 2.05),
            Figure(("difference of the outputs", "输出之差"), (max(gaps),), high=1e-5),
            Figure(
                (f"memory saved at {lengths[-1]:,} tokens, times", f"{lengths[-1]:,} 个词元时节省倍数"),
                (curves["written out"][last] / curves["flash"][last],),
            ),
        ),
        curves,
        ("tokens n", "bytes kept for the backward pass"),
        log=True,
    )


CLAIM = Claim(
    "Dao et al. 2022, FlashAttention, theorem 1 and figure 3",
    (
        "Exact attention with O(n) additional memory, where the written-out matrix takes O(n²) (up to 20 times less).",
        "精确注意力只需 O(n) 额外内存，显式写出矩阵则需 O(n²)（节省至多 20 倍）。",
    ),
    (
        "Bytes that torch's two CPU kernels keep for the backward pass, counted by its hooks, and their outputs.",
        "torch 的两种 CPU 内核为反向保留的字节数（由钩子统计）及其输出。",
    ),
    measure,
)
