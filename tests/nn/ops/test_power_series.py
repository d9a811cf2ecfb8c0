"""Power series against their definitions, term by term: values, gradients, and gradients of gradients."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from allyouneed.nn.ops.power_series import circular_product, fast_length, multiply, one_over, powers

TERMS = [1, 2, 3, 8, 13, 30]


def draw(*shape, dtype=torch.double):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def plain_product(a, b, size, terms):
    return torch.stack([sum(a[..., s] * b[..., (t - s) % size] for s in range(a.shape[-1])
                            if (t - s) % size < b.shape[-1]) for t in range(terms)], -1)  # fmt: skip


def plain_one_over(f):
    """g = 1 + z f g"""
    found = [torch.ones_like(f[..., 0])]
    for t in range(1, f.shape[-1]):
        found.append(sum(f[..., s] * found[t - 1 - s] for s in range(t)))
    return torch.stack(found, -1)


@pytest.mark.parametrize("terms", TERMS)
def test_products_match_the_definition(terms):
    a, b = draw(3, terms), draw(2, 3, terms)
    torch.testing.assert_close(multiply(a, b), plain_product(a, b, 2 * terms, terms), atol=1e-12, rtol=0)
    size = fast_length(2 * terms)
    c = draw(3, size)
    torch.testing.assert_close(
        circular_product(b, c, size, terms), plain_product(b, c, size, terms), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("terms", TERMS)
def test_reciprocals_match_the_definition(terms):
    f = (draw(2, terms).detach() / 3).requires_grad_()
    torch.testing.assert_close(one_over(f), plain_one_over(f), atol=1e-12, rtol=1e-10)
    own, plain = (torch.autograd.grad(way(f).sin().sum() + f.sum(), f)[0] for way in (one_over, plain_one_over))
    torch.testing.assert_close(own, plain, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("count", TERMS)
def test_powers_match_the_definition(count):
    base = draw(2, 3, dtype=torch.complex128)
    expected = torch.stack([base**i for i in range(count)], -2)
    torch.testing.assert_close(powers(base, count), expected, atol=1e-10, rtol=1e-10)


def test_gradients_match_finite_differences():
    a, b, c, base = draw(3, 5), draw(2, 3, 5), draw(3, 12), draw(2, 2, dtype=torch.complex128)
    for check in (gradcheck, gradgradcheck):
        assert check(multiply, (a, b))
        assert check(lambda b, c: circular_product(b, c, 12, 5), (b, c))
        assert check(one_over, (a,))
        assert check(lambda base: powers(base, 4), (base,))


def test_only_wanted_gradients_are_computed():
    a, b = draw(2, 5), draw(2, 5).detach()
    (found,) = torch.autograd.grad(multiply(a, b).sum(), a)
    assert found.shape == a.shape
