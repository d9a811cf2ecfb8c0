"""A filter for each token and head, against loops; the operator of the kernel has its gradients. (The kernel runs in
bench/check/kernels.py, by the interpreter of Triton where there is one.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allyouneed.nn.ops import banded as ops


def loop(x: Tensor, weights: Tensor, left: int) -> Tensor:
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        for number in range(weights.shape[3]):
            if 0 <= t + number - left < x.shape[1]:
                y[:, t] = y[:, t] + weights[:, t, :, number, None] * x[:, t + number - left]
    return y


@pytest.mark.parametrize(("time", "size", "left"), [(7, 3, 2), (5, 4, 1), (3, 9, 8), (1, 1, 0), (4, 6, 0)])
def test_sums_over_windows_and_their_gradients(time: int, size: int, left: int) -> None:
    torch.manual_seed(time)
    x = torch.randn(2, time, 3, 4, dtype=torch.double, requires_grad=True)
    weights = torch.randn(2, time, 3, size, dtype=torch.double, requires_grad=True)
    expected = loop(x, weights, left)
    wanted = torch.autograd.grad(expected.sin().sum(), (x, weights))
    for found in (ops.banded(x, weights, left), ops.multiply(x, weights, left, False)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), (x, weights)), wanted)
