"""Packed ternary weights by kernels against the definition in double precision; a part of kernels.py."""

from __future__ import annotations

from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.linear.bitlinear import Bit
from allyouneed.nn.linear.ternary import PackedBitLinear
from allyouneed.nn.ops.activations import ACTIVATIONS
from bench.check.report import LIMITS, Check

# tokens, inputs, outputs, bias, activation, gated, parts
MAPS = [
    (1, 40, 20, False, "", False, False),
    (1, 37, 12, True, "silu", True, False),
    (1, 96, 20, False, "", False, True),
    (1, 61, 12, True, "silu", True, False),
    (1, 4160, 12, True, "relu", False, False),
    (3, 270, 36, True, "relu", False, False),
    (5, 600, 20, False, "", False, True),
    (7, 66, 20, True, "silu", True, True),
    (20, 130, 70, True, "gelu-tanh", True, False),
    (33, 600, 20, False, "", False, True),
    (70, 45, 70, True, "", False, True),
]
LARGE_MAPS = [
    (1, 768, 2304, False, "", False, True),
    (1, 2048, 768, False, "", False, True),
    (1, 8192, 768, True, "", False, True),
    (1, 8200, 768, True, "", False, True),
    (1, 768, 4096, False, "silu", True, False),
    (16, 2048, 768, False, "", False, True),
    (64, 768, 768, True, "", False, True),
    (64, 768, 4096, False, "silu", True, False),
    (64, 2048, 768, False, "", False, True),
    (3000, 768, 2304, True, "", False, False),
]


def maps(check: Check, sizes: tuple[int, int, int, bool, str, bool, bool], dtype: torch.dtype) -> None:
    tokens, inputs, outputs, bias, activation, gated, parts = sizes
    torch.manual_seed(tokens)
    split = (outputs // 2, outputs - outputs // 2)
    linear: Any = parse(Bit, {"kind": "bit"}).build(inputs, split, bias)
    packed = PackedBitLinear(linear).to(check.device, dtype)
    x = torch.randn(tokens, inputs).to(check.device, dtype)
    exact = PackedBitLinear.forward(packed.cpu().double(), x.cpu().double()).to(check.device)
    if activation:
        act = ACTIVATIONS[activation]
        exact = act(exact[:, : outputs // 2]) * exact[:, outputs // 2 :] if gated else act(exact)
    packed = packed.to(check.device, dtype)
    found = packed.by_kernel(x, activation, gated, parts)
    if dtype == torch.float32 and not (bias or activation) and found.dim() == 2:
        plain = packed.cpu().forward(x.cpu()).to(check.device)
        check.report(f"ternary {sizes} bit for bit", [found], [plain], 0.0)
    found = found.sum(0) if found.dim() == 3 else found
    # a value that is halfway between two codes may be rounded to the other one
    check.report(
        f"ternary {sizes} {str(dtype)[6:]}", [found], [exact], 1e-3 if dtype == torch.float32 else LIMITS[dtype]
    )


def ternary(check: Check, cuda: bool) -> None:
    print("ternary maps")
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in MAPS + (LARGE_MAPS if cuda else []):
            maps(check, sizes, dtype)
