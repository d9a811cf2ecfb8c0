"""Linear state spaces: the kernel, chunks over a state and single steps give the same numbers."""

import pytest
import torch

from allyouneed.nn.common import Common
from allyouneed.nn.mixers.state_space.s4 import S4
from allyouneed.nn.ops.state_space import CHUNK, LowRankSystem, System, convolve, fast_length

TIME = CHUNK + 37
both = pytest.mark.parametrize("matrix", ["dplr", "diagonal"])


def system(matrix):
    torch.manual_seed(0)
    return S4(state=6, matrix=matrix).build(Common(width=3)).double().system(torch.double)


@both
@torch.no_grad()
def test_the_three_forms_agree(matrix):
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


@pytest.mark.parametrize("length", [1, 2, 17, 211])
def test_the_kernel_by_power_series_is_the_product_of_rows_and_columns(length):
    """With its gradients, of a system whose low-rank part matters: HiPPO with 64 states."""
    torch.manual_seed(1)
    module = S4(state=64, sees="around").build(Common(width=2)).double()
    found = []
    for kernel in (LowRankSystem.kernel, System.kernel):
        values = kernel(module.system(torch.double), length)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(values.sin().sum(), [*module.parameters()], allow_unused=True)
        found.append([values, *(gradient for gradient in gradients if gradient is not None)])
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-8)


def test_lengths_of_transforms_have_small_factors():
    assert [fast_length(n) for n in (1, 2, 7, 11, 62, 514, 1025)] == [1, 2, 8, 12, 64, 540, 1080]
