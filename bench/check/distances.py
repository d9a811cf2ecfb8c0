"""Attention with a number for each query and distance, and among tokens that share a code, against its definition in
double precision; a part of kernels.py."""

from __future__ import annotations

import torch

from allyouneed.kernels.triton.training import distance_attention as kernels
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention import by_distance as ops
from bench.check.report import LIMITS, Check, random_starts

# batch, heads, time, width, width of values, farthest distance (0: no numbers), rounds of codes
SIZES = [(2, 2, 70, 16, 24, 5, 0), (1, 2, 41, 20, 16, 40, 0), (2, 1, 50, 16, 16, 0, 2), (1, 1, 7, 16, 16, 3, 0)]

LARGE = [(4, 12, 1024, 64, 64, 16, 0), (2, 10, 777, 64, 64, 776, 0), (2, 16, 1024, 64, 64, 0, 2),
         (1, 2, 2500, 128, 128, 300, 1)]  # fmt: skip


def distances(check: Check, cuda: bool) -> None:
    print("out, sums by distance; gradients of q, k, v, numbers")
    usual = ops.usable
    if not cuda:
        kernels.TILE = 16  # rows of several tiles
    for sizes in SIZES + LARGE * cuda:
        for causal in (True, False):
            for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
                try:
                    ops.usable = lambda x: x.dtype != torch.float64
                    one_size(check, sizes, causal, dtype)
                finally:
                    ops.usable = usual


def one_size(check: Check, sizes: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    batch, heads, time, width, values, far, rounds = sizes
    torch.manual_seed(time)
    columns = (far + 1 if causal else 2 * far + 1) * (far > 0)
    starts = random_starts(batch, time, check.device)
    layout = TokenLayout.of(Rows(torch.zeros_like(starts), segments=starts + 1))
    rows = ops.Sentences(layout)
    shapes = (heads, time, width), (heads, time, width), (heads, time, values), (heads, time, columns)
    given = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
    codes = torch.randint(0, 4, (batch, heads, time, rounds), dtype=torch.int32).to(check.device) if rounds else None
    noise = torch.randn(batch, heads, time, values), torch.randn(batch, heads, time, columns)
    g, g_sums = (x.double().to(check.device) for x in noise)

    def run(wide: torch.dtype) -> list[torch.Tensor]:
        q, k, v, scores = (check.leaf(x, wide) for x in given)
        how = (rows, causal, width**-0.5, scores if far else None, far, codes)
        out, sums, _ = ops.attend_within(q, k, v, *how, sums=far > 0)
        loss = (out.double() * g).sum() + ((sums.double() * g_sums).sum() if far else 0)
        return [out, *([sums] if far else []), *torch.autograd.grad(loss, [q, k, v] + [scores] * (far > 0))]

    name = f"{sizes} {str(dtype)[6:]}{', causal' * causal}"
    check.report(name, run(dtype), run(torch.float64), LIMITS[dtype])
