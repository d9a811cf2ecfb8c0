"""Dropout that draws four features at a time is still dropout."""

import math

import pytest
import torch

from allyouneed.nn.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_features_are_kept_with_the_right_chance_and_scale(p):
    torch.manual_seed(0)
    out = Dropout(p)(torch.ones(1000, 401))  # an odd count: the last draw is used in part
    kept = out != 0
    deviation = math.sqrt(p * (1 - p) / out.numel())
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * deviation
    assert out[kept].unique().numel() == 1
    assert out[kept][0].item() == pytest.approx(1 / (1 - p), rel=1e-4)  # p is a multiple of 2^-16


def test_the_four_features_of_one_draw_are_independent():
    torch.manual_seed(0)
    lanes = (Dropout(0.5)(torch.ones(4 * 100_000)) != 0).float().view(-1, 4)
    assert (torch.corrcoef(lanes.T) - torch.eye(4)).abs().max() < 5 / math.sqrt(len(lanes))
    assert (lanes.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(lanes))


def test_gradients_use_the_forward_mask():
    torch.manual_seed(0)
    x = torch.randn(7, 5, requires_grad=True)
    out = Dropout(0.4)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x * gradient)
    assert set((gradient != 0).flatten().tolist()) == {True, False}


def test_equal_seeds_give_equal_masks():
    dropout, x = Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation_or_at_zero():
    x = torch.randn(3, 3)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


def test_p_close_to_one_has_a_finite_scale():
    assert Dropout(1 - 1e-9)(torch.ones(64)).isfinite().all()
