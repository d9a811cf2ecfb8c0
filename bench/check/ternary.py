"""Packed ternary weights by kernels against the definition in double precision; a part of kernels.py."""

from __future__ import annotations

from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.kernels.triton.ternary import ternary_linear
from allyouneed.nn.linear.bitlinear import MAX_CODE, MIN_SCALE, Bit
from allyouneed.nn.linear.ternary import PackedBitLinear
from bench.check.report import LIMITS, Check

# tokens, inputs, outputs, bias, activation, gated, parts
# tokens, inputs, outputs, bias
MAPS = [
    (1, 40, 20, False),
    (1, 37, 12, True),
    (1, 4160, 12, True),
    (3, 270, 36, True),
    (5, 600, 20, False),
    (20, 130, 70, True),
    (33, 600, 20, False),
    (70, 45, 70, True),
]
LARGE_MAPS = [
    (1, 768, 2304, False),
    (1, 8192, 768, True),
    (1, 8200, 768, True),
    (1, 768, 4096, False),
    (16, 2048, 768, False),
    (64, 768, 4096, True),
    (3000, 768, 2304, True),
]


def maps(check: Check, sizes: tuple[int, int, int, bool], dtype: torch.dtype) -> None:
    tokens, inputs, outputs, bias = sizes
    torch.manual_seed(tokens)
    split = (outputs // 2, outputs - outputs // 2)
    linear: Any = parse(Bit, {"kind": "bit"}).build(inputs, split, bias)
    packed = PackedBitLinear(linear).to(check.device, dtype)
    x = torch.randn(tokens, inputs).to(check.device, dtype)
    exact = packed.cpu().double()(x.cpu().double()).to(check.device)
    packed = packed.to(check.device, dtype)
    found = ternary_linear(x, packed.packed, packed.step, packed.bias, MIN_SCALE, MAX_CODE)
    if dtype == torch.float32 and not bias:
        plain = packed.cpu()(x.cpu()).to(check.device)
        check.report(f"ternary {sizes} bit for bit", [found], [plain], 0.0)
    # a value that is halfway between two codes may be rounded to the other one
    check.report(
        f"ternary {sizes} {str(dtype)[6:]}", [found], [exact], 1e-3 if dtype == torch.float32 else LIMITS[dtype]
    )


def ternary(check: Check, cuda: bool) -> None:
    print("ternary maps")
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in MAPS + (LARGE_MAPS if cuda else []):
            maps(check, sizes, dtype)
