"""The scan in segments against its definition, token by token: outputs, states and gradients."""

import pytest
import torch

from allyouneed.kernels.cpu.build import wait_for_build
from allyouneed.nn.ops import selective_scan as scan
from allyouneed.nn.ops.selective_scan import selective_scan, selective_ssm

SEGMENT = 16


def definition(x, dt, a, b, c, h):
    """Gu, Dao 2023, algorithm 2."""
    found = []
    for t in range(x.shape[1]):
        h = (dt[:, t, None] * a).exp() * h + (dt[:, t] * x[:, t])[:, None] * b[:, t, :, None]
        found.append((h * c[:, t, :, None]).sum(1))
    return torch.stack(found, 1), h


@pytest.mark.parametrize("time", [1, 2, 7, SEGMENT + 1, 2 * SEGMENT + 45])
def test_outputs_states_and_gradients_match_the_definition(time, monkeypatch):
    monkeypatch.setattr(scan, "CACHED", SEGMENT * 2 * 5 * 3)
    dice = torch.Generator().manual_seed(time)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.double, generator=dice)

    batch, features, states = 2, 5, 3
    given = [draw(batch, time, features), draw(batch, time, features).exp(), -draw(states, features).exp()]
    given += [draw(batch, time, states), draw(batch, time, states), draw(batch, states, features)]
    given = [tensor.requires_grad_() for tensor in given]
    found, expected = selective_scan(*given), definition(*given)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    own, theirs = (torch.autograd.grad(y.sin().sum() + h.cos().sum(), given) for y, h in (found, expected))
    torch.testing.assert_close(own, theirs, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(selective_scan(*given), expected, atol=1e-12, rtol=0)


def test_a_time_step_of_zero_leaves_the_state_unchanged():
    dice = torch.Generator().manual_seed(0)
    x, b, c, h = (torch.randn(shape, generator=dice) for shape in ((1, 4, 2), (1, 4, 3), (1, 4, 3), (1, 3, 2)))
    _, after = selective_scan(x, torch.zeros(1, 4, 2), -torch.ones(3, 2), b, c, h)
    assert after.equal(h)


@pytest.mark.parametrize(("time", "features", "states"), [(1, 5, 3), (16, 64, 16), (37, 70, 5)])
def test_the_native_kernel_against_the_definition(time, features, states):
    """The whole state space in single precision, with padding: outputs, last states and gradients."""
    dice = torch.Generator().manual_seed(time)

    def draw(*shape):
        return torch.randn(*shape, generator=dice)

    batch, lengths = 3, torch.tensor([time, max(0, time - 5), 0])
    real = torch.arange(time) < lengths[:, None]
    given = [draw(batch, time, features), draw(batch, time, features), draw(features), -draw(states, features).exp()]
    given += [draw(batch, time, states), draw(batch, time, states), draw(features), draw(batch, states, features)]
    ours = [tensor.requires_grad_() for tensor in given]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    (y, h), (expected_y, expected_h) = selective_ssm(*ours, real), selective_ssm(*exact, real)
    assert wait_for_build() is None or "_NativeScan" in type(y.grad_fn).__name__  # not the plain operations
    y, expected_y = y * real[..., None], expected_y * real[..., None]
    torch.testing.assert_close((y.double(), h.double()), (expected_y, expected_h), atol=2e-5, rtol=1e-5)
    own = torch.autograd.grad(y.sin().sum() + h.cos().sum(), ours)
    theirs = torch.autograd.grad(expected_y.sin().sum() + expected_h.cos().sum(), exact)
    torch.testing.assert_close([one.double() for one in own], list(theirs), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        again = selective_ssm(*(tensor.detach() for tensor in ours), real)
    assert again[1].equal(h)


def test_a_time_step_that_is_not_a_number_is_passed_on():
    x, steps, b = torch.zeros(1, 3, 2), torch.full((1, 3, 2), torch.nan), torch.ones(1, 3, 4)
    y, _ = selective_ssm(x, steps, torch.zeros(2), -torch.ones(4, 2), b, b, torch.ones(2), torch.ones(1, 4, 2))
    assert y.isnan().all()
