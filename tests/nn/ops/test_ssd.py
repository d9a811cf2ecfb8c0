"""The three forms of state-space duality: chunked and quadratic against the recurrence, with gradients."""

import pytest
import torch

from allyouneed.nn.ops.ssd import CHUNK, chunked, quadratic, recurrent


def inputs(time, heads=6, groups=2, states=5, width=4):
    dice = torch.Generator().manual_seed(time)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.double, generator=dice)

    given = draw(2, heads, time, width), -draw(2, heads, time).exp(), draw(2, groups, time, states)
    given += draw(2, groups, time, states), draw(2, heads, states, width)
    return [tensor.requires_grad_() for tensor in given]


@pytest.mark.parametrize("time", [1, 2, CHUNK - 1, 3 * CHUNK + 8])
def test_the_chunked_form_equals_the_recurrence(time):
    given = inputs(time)
    found, expected = chunked(*given), recurrent(*given)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    own, theirs = (torch.autograd.grad(y.sin().sum() + h.cos().sum(), given) for y, h in (found, expected))
    torch.testing.assert_close(own, theirs, atol=1e-11, rtol=1e-11)


def test_the_quadratic_form_equals_the_recurrence():
    *given, state = inputs(50)
    found, (expected, _) = quadratic(*given), recurrent(*given, torch.zeros_like(state))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    own, theirs = (torch.autograd.grad(y.sin().sum(), given) for y in (found, expected))
    torch.testing.assert_close(own, theirs, atol=1e-11, rtol=1e-11)


def test_a_fast_decay_keeps_its_digits():
    """Sums of logarithms reach thousands within a chunk; differences of them would be wrong in the fourth digit."""
    x, log, b, c, state = (tensor.detach() for tensor in inputs(CHUNK))
    log = log * 40
    found = chunked(x.float(), log.float(), b.float(), c.float(), state.float())[0]
    torch.testing.assert_close(found.double(), recurrent(x, log, b, c, state)[0], atol=2e-5, rtol=0)
