"""Products with a band of weights for each head against their definition in double precision; a part of kernels.py."""

from __future__ import annotations

import torch

from allyouneed.nn.ops import banded as ops
from bench.check.report import LIMITS, Check

# batch, time, heads, features, size, positions to the left
SIZES = [(2, 70, 2, 5, 7, 6), (1, 100, 3, 20, 31, 15), (2, 3, 1, 16, 9, 8), (1, 40, 1, 4, 1, 0), (1, 90, 1, 4, 70, 0)]
LARGE = [(4, 1024, 24, 32, 31, 30), (2, 777, 4, 64, 31, 15)]


def bands(check: Check, cuda: bool) -> None:
    print("y, gradients of x and the weights")
    usual = ops.usable
    for sizes in SIZES + LARGE * cuda:
        batch, time, heads, features, size, left = sizes
        for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
            torch.manual_seed(time)
            shapes = (batch, time, heads, features), (batch, time, heads, size)
            given = [torch.randn(shape).to(dtype) for shape in shapes]
            g, results = torch.randn(shapes[0]).double().to(check.device), []
            for wide in (dtype, torch.float64):
                ops.usable = lambda x: x.dtype != torch.float64
                leaves = [check.leaf(x, wide) for x in given]
                y = ops.banded(*leaves, left)
                results.append([y, *torch.autograd.grad((y.double() * g).sum(), leaves)])
            ops.usable = usual
            check.report(f"banded {sizes} {str(dtype)[6:]}", *results, LIMITS[dtype])
