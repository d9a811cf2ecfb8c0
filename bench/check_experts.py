"""Experts at once against one product per expert in double precision; a part of check_kernels.py."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from allyouneed.kernels.triton.expert_linear import expert_linear
from allyouneed.nn.ops.experts import each_alone, grouped_products
from check_state_spaces import LIMITS, Check

# experts, rows, inputs, outputs, bias
SIZES = [(5, 3, 40, 24, True), (3, 40, 16, 40, False), (60, 2, 130, 20, True)]
LARGE_SIZES = [(8, 2, 768, 4096, False), (8, 128, 2048, 768, True), (64, 200, 1024, 1000, False)]
TRAINED = [(8, 5000, 768, 4096, False), (8, 5000, 2048, 768, True), (16, 300, 64, 80, True)]


def prepared(
    check: Check, sizes: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> tuple[list[nn.Linear], torch.Tensor, torch.Tensor]:
    experts, rows, inputs, outputs, bias = sizes
    torch.manual_seed(rows)
    maps = [nn.Linear(inputs, outputs, bias, dtype=dtype, device=check.device) for _ in range(experts)]
    chosen = torch.randint(0, experts, (rows,))
    ends = chosen.bincount(minlength=experts).cumsum(0, dtype=torch.int32).to(check.device)
    return maps, torch.randn(rows, inputs).to(check.device, dtype), ends


def experts(check: Check, cuda: bool) -> None:
    print("linear maps of few rows, each of its own expert")
    for sizes in SIZES + (LARGE_SIZES if cuda else []):
        # the interpreter multiplies no bfloat16
        for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
            maps, x, ends = prepared(check, sizes, dtype)
            exact = each_alone(x.double(), [deepcopy(one).double() for one in maps], ends)
            check.report(f"experts {sizes} {str(dtype)[6:]}", [expert_linear(x, maps, ends)], [exact], LIMITS[dtype])
    print("grouped products: outputs, gradients of x and all weights")
    for sizes in TRAINED if cuda else []:
        maps, x, ends = prepared(check, sizes, torch.bfloat16)
        doubles = [deepcopy(one).double() for one in maps]
        runs = []
        for run, given, own in ((grouped_products, x, maps), (each_alone, x.double(), doubles)):
            leaves = [given.requires_grad_(), *(p for one in own for p in one.parameters())]
            y = run(given, own, ends)
            torch.manual_seed(0)
            loss = (y.double() * torch.randn(y.shape).to(check.device)).sum()
            slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
            runs.append([y, slopes[0], torch.cat([slope.flatten() for slope in slopes[1:]])])
        check.report(f"grouped products {sizes}", *runs, LIMITS[torch.bfloat16])
