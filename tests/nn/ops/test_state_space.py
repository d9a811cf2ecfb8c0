"""Linear state spaces: the kernel, chunks over a state and single steps give the same numbers."""

import pytest
import torch

from allyouneed.nn.common import Common
from allyouneed.nn.mixers.state_space.s4 import S4
from allyouneed.nn.ops.state_space import CHUNK, convolve

TIME = CHUNK + 37
both = pytest.mark.parametrize("matrix", ["dplr", "diagonal"])


def system(matrix):
    torch.manual_seed(0)
    return S4(state=6, matrix=matrix).build(Common(width=3)).double().system(torch.double)


@both
@torch.no_grad()
def test_three_forms(matrix):
    space = system(matrix)
    u, empty = torch.randn(2, 3, TIME, dtype=torch.double), torch.zeros(2, 3, 6, dtype=torch.double)
    steps, x = [], empty
    for t in range(TIME):
        y, x = space.run(u[..., t : t + 1], x, None)
        steps.append(y)
    expected = torch.cat(steps, 2)
    torch.testing.assert_close(convolve(u, space.kernel(TIME)[0]), expected, atol=1e-12, rtol=0)
    y, last = space.run(u, empty, None)
    torch.testing.assert_close((y, last), (expected, x), atol=1e-12, rtol=0)


@both
@torch.no_grad()
def test_rows_of_unequal_lengths_after_a_state(matrix):
    space = system(matrix)
    u, x = torch.randn(3, 3, TIME, dtype=torch.double), torch.randn(3, 3, 6, dtype=torch.double)
    counts = [TIME, 0, 11]
    real = torch.arange(TIME)[None] < torch.tensor(counts)[:, None]
    y, last = space.run(u, x, real)
    for row, count in enumerate(counts):
        expected = x[row : row + 1]
        for t in range(count):
            one, expected = space.run(u[row : row + 1, :, t : t + 1], expected, None)
            torch.testing.assert_close(y[row : row + 1, :, t : t + 1], one, atol=1e-12, rtol=0)
        torch.testing.assert_close(last[row : row + 1], expected, atol=1e-12, rtol=0)
