"""Sums of weights with the same number, and look-ups whose gradient they are, against torch in double precision."""

from __future__ import annotations

import torch

from allyouneed.nn.ops import index_sums as ops
from bench.check.report import LIMITS, Check


def index_sums(check: Check, cuda: bool) -> None:
    sizes = [(2, 1, 3, 5, 300, 33), (2, 2, 2, 4, 130, 7), (1, 1, 1, 1, 1, 1)]
    for batch, rows, heads, lines, keys, count in sizes + [(4, 4, 12, 512, 512, 33)] * cuda:
        torch.manual_seed(0)
        index = torch.randint(0, count, (rows, 1, keys, lines), device=check.device).mT
        weights, values = torch.randn(batch, heads, lines, keys), torch.randn(batch, heads, lines, count)
        results = []
        for dtype in (torch.float32, torch.double):
            own = [check.leaf(x, dtype) for x in (weights, values)]
            if dtype is torch.double:
                found = [ops.index_sums(own[0], index, count), ops.lookup(own[1], index)]
            else:
                found = [ops.IndexSums.apply(own[0], index, count), ops.Lookup.apply(own[1], index)]
            results.append([*found, *torch.autograd.grad(sum((x * x.detach().cos()).sum() for x in found), own)])
        name = f"index sums ({batch}, {heads}, {lines}, {keys}), {count} numbers"
        check.report(name, *results, LIMITS[torch.float32])
