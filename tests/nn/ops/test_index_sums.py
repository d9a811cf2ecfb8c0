"""Look-ups by a number and sums of what has the same number, each the other's gradient, against loops. (The kernel
runs in bench/check/kernels.py, by the interpreter of Triton where there is one.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allyouneed.nn.ops import index_sums as ops

# batch, rows of the index, heads, lines, keys, numbers
SIZES = [(2, 1, 3, 5, 7, 4), (2, 2, 2, 4, 13, 7), (3, 3, 1, 1, 1, 1), (1, 1, 2, 3, 0, 5)]


def loop(weights: Tensor, index: Tensor, count: int) -> Tensor:
    out = weights.new_zeros(*weights.shape[:3], count)
    for batch, heads in enumerate(weights):
        for head, lines in enumerate(heads):
            for line, values in enumerate(lines):
                for key, value in enumerate(values):
                    out[batch, head, line, index[batch % len(index), 0, line, key]] += value
    return out


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_sums_lookups_and_their_gradients(
    sizes: tuple[int, ...], by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`by_kernel`: with our own backward passes, and the definition in place of the kernel."""
    batch, rows, heads, lines, keys, count = sizes
    if by_kernel:
        monkeypatch.setattr(ops, "_sums", loop)
        monkeypatch.setattr(ops, "_has_kernel", lambda x, count: True)
    torch.manual_seed(0)
    index = torch.randint(0, count, (rows, 1, lines, keys))
    weights = torch.randn(batch, heads, lines, keys, dtype=torch.double, requires_grad=True)
    values = torch.randn(batch, heads, lines, count, dtype=torch.double, requires_grad=True)
    found = ops.index_sums(weights, index, count)
    torch.testing.assert_close(found, loop(weights, index, count))
    looked = ops.lookup(values, index)
    torch.testing.assert_close(looked, values.gather(-1, index.expand(batch, heads, -1, -1)))
    given, other = torch.randn_like(found), torch.randn_like(looked)
    (own,) = torch.autograd.grad((found * given).sum(), weights)
    torch.testing.assert_close(own, given.gather(-1, index.expand(batch, heads, -1, -1)))
    (own,) = torch.autograd.grad((looked * other).sum(), values)
    torch.testing.assert_close(own, loop(other, index, count))


def test_many_numbers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel adds them up in registers."""
    monkeypatch.setattr(ops, "usable", lambda x: True)
    x = torch.zeros(1)
    assert ops._has_kernel(x, ops.MOST) and not ops._has_kernel(x, ops.MOST + 1)
