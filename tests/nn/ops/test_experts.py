"""Grouped products over rows sorted by expert, against one product per expert."""

import pytest
import torch

from allyouneed.nn.ops.experts import Groups, arrival, collect, count, each_alone, grouped_products, spread


def maps(experts, inputs, outputs, bias, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Linear(inputs, outputs, bias, dtype=dtype) for _ in range(experts)]


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_products_are_those_of_each_expert(bias):
    linears = maps(5, 16, 24, bias)
    ends = torch.tensor([0, 7, 7, 8, 20], dtype=torch.int32)  # two experts have no rows
    x = torch.randn(20, 16, requires_grad=True)
    leaves = [x, *(p for linear in linears for p in linear.parameters())]
    found, expected = grouped_products(x, linears, ends), each_alone(x, linears, ends)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    own = torch.autograd.grad(found.sin().sum(), leaves)
    theirs = torch.autograd.grad(expected.sin().sum(), leaves, allow_unused=True)
    for left, right in zip(own, theirs, strict=True):
        torch.testing.assert_close(left, torch.zeros_like(left) if right is None else right, atol=1e-5, rtol=1e-5)


def test_under_autocast_weights_are_cast_and_gradients_are_not():
    linears = maps(3, 8, 8, False)
    x, ends = torch.randn(6, 8, dtype=torch.bfloat16), torch.tensor([2, 2, 6], dtype=torch.int32)
    y = grouped_products(x, linears, ends)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and linears[0].weight.grad.dtype == torch.float32
    assert linears[0].weight.grad.any() and not linears[1].weight.grad.any()


def test_rows_are_sorted_by_expert_and_put_back():
    chosen = torch.tensor([[2, 0, 2, 1], [0, 3, 1, 0]])  # two experts for each of four tokens
    tokens = torch.arange(4.0, dtype=torch.double)[:, None].requires_grad_()
    groups = Groups.of(chosen, 5)
    rows = spread(tokens, groups)
    assert rows[:, 0].tolist() == [1, 0, 3, 3, 2, 0, 2, 1] and groups.ends.tolist() == [3, 5, 7, 8, 8]
    assert torch.equal(collect(rows, groups), tokens.expand(2, 4, 1))
    assert torch.autograd.gradcheck(lambda x: collect(spread(x, groups).sin(), groups), [tokens])


def test_counts_and_arrivals():
    numbers, real = torch.tensor([1, 1, 0, 3, 1]), torch.tensor([True, False, True, True, True])
    assert count(numbers, 5).tolist() == [1, 3, 0, 1, 0] and count(numbers, 5, real).tolist() == [1, 2, 0, 1, 0]
    assert arrival(numbers, 5).tolist() == [0, 1, 0, 0, 2]
