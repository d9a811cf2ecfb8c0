"""Long filters over sentences that begin anywhere in a row, against loops. (The kernel runs in bench/check/kernels.py,
by the interpreter of Triton where there is one.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allyouneed.nn.ops import packed_convolution as ops

ROWS = {
    "one token": [[0]],
    "whole": [[0] * 13],
    "many": [[0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4], [0, 1, 2, 3, 3, 3, 3, 3, 8, 8, 8, 8, 12]],
    "from middle to middle": [[0] * 4 + [4] * 4 + [8] * 8],
}


def loop(u: Tensor, kernel: Tensor, starts: Tensor) -> Tensor:
    y = torch.zeros_like(u)
    for row, begins in enumerate(starts.tolist()):
        for t, begin in enumerate(begins):
            for s in range(begin, t + 1):
                y[row, t] = y[row, t] + kernel[:, t - s] * u[row, s]
    return y


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("name", ROWS)
def test_no_sentence_reads_another(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK", block)
    torch.manual_seed(0)
    starts = torch.tensor(ROWS[name], dtype=torch.int32)
    u = torch.randn(*starts.shape, 3, dtype=torch.double, requires_grad=True)
    kernel = torch.randn(3, starts.shape[1], dtype=torch.double, requires_grad=True)
    found, expected = ops.packed_convolution(u, kernel, starts), loop(u, kernel, starts)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), (u, kernel))
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), (u, kernel)), wanted)
