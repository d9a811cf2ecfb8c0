"""Long filters over the sentences of packed rows, against their definition in double precision; part of kernels.py."""

from __future__ import annotations

import torch

from allyouneed.nn.ops import packed_convolution as ops
from bench.check.report import LIMITS, Check, random_starts

# batch, time, features
SIZES = [(2, 70, 5), (1, 33, 70), (2, 1, 3)]
LARGE = [(4, 1024, 768), (2, 777, 100)]


def packed_convolutions(check: Check, cuda: bool) -> None:
    print("y, gradients of u and the filters")
    usual = ops.usable
    for sizes in SIZES + LARGE * cuda:
        batch, time, features = sizes
        torch.manual_seed(time)
        starts = random_starts(batch, time, check.device)
        given = torch.randn(batch, time, features), torch.randn(features, time)
        g = torch.randn(batch, time, features).double().to(check.device)
        results = []
        for dtype in (torch.float32, torch.float64):
            ops.usable = lambda x: x.dtype != torch.float64
            leaves = [check.leaf(x, dtype) for x in given]
            y = ops.packed_convolution(*leaves, starts)
            results.append([y, *torch.autograd.grad((y.double() * g).sum(), leaves)])
        ops.usable = usual
        check.report(f"packed convolution {sizes}", *results, LIMITS[torch.float32])
