"""The scan in segments against its definition, token by token: outputs, states and gradients."""

import pytest
import torch

from allyouneed.nn.ops import selective_scan as scan
from allyouneed.nn.ops.selective_scan import selective_scan

SEGMENT = 16


def definition(x, dt, a, b, c, h):
    """Gu, Dao 2023, algorithm 2."""
    found = []
    for t in range(x.shape[1]):
        h = (dt[:, t, None] * a).exp() * h + (dt[:, t] * x[:, t])[:, None] * b[:, t, :, None]
        found.append((h * c[:, t, :, None]).sum(1))
    return torch.stack(found, 1), h


@pytest.mark.parametrize("time", [1, 2, 7, SEGMENT + 1, 2 * SEGMENT + 45])
def test_outputs_states_and_gradients(time, monkeypatch):
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


def test_a_token_without_a_step_leaves_the_state():
    dice = torch.Generator().manual_seed(0)
    x, b, c, h = (torch.randn(shape, generator=dice) for shape in ((1, 4, 2), (1, 4, 3), (1, 4, 3), (1, 3, 2)))
    _, after = selective_scan(x, torch.zeros(1, 4, 2), -torch.ones(3, 2), b, c, h)
    assert after.equal(h)
