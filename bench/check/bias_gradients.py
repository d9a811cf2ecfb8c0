"""Backward passes with sums for biases against the plain definitions in double precision; a part of kernels.py."""

from __future__ import annotations

import torch

from allyouneed.runtime.cuda import bias_gradients
from allyouneed.runtime.cuda.bias_gradients import ACTIVATIONS as FUSED
from bench.check.report import LIMITS, Check, Sizes

# batch, time, width, head width; keys and values have fewer heads
BIASES = [(2, 7, 24, 4), (3, 90, 60, 20), (1, 300, 512, 64)]
LARGE_BIASES = [(5, 1000, 768, 64), (3, 501, 520, 40)]


def check_activation_backward(check: Check, sizes: Sizes, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(sizes[1])
    x, gradient = (3 * torch.randn(2, *sizes[:3])).to(check.device, dtype)
    found, sums = bias_gradients.activation_backward(gradient, x, kind)
    exact = gradient.double() * FUSED[kind].derivative(x.double())
    name = f"slope {tuple(sizes[:3])} {str(dtype)[6:]} {kind}"
    check.report(name, [found, sums.sum(0)], [exact, exact.sum((0, 1))], LIMITS[dtype])


def check_merge_heads(check: Check, sizes: Sizes, dtype: torch.dtype, ordered: bool) -> None:
    """`ordered`: token after token, as queries lie where nothing has moved them."""
    batch, time, width, head = sizes
    torch.manual_seed(time)
    shapes = [(batch, heads, time, head) for heads in (width // head, 1, 2)]
    parts = [torch.randn(shape).to(check.device, dtype) for shape in shapes]
    if ordered:
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    found, sums = bias_gradients.merge_heads(parts)
    exact = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
    assert torch.equal(found, exact), "parts are not laid side by side"
    check.report(f"side by side {sizes} {str(dtype)[6:]}", [sums.sum(0)], [exact.double().sum((0, 1))], 1e-5)


def check_layer_norm_backward(check: Check, sizes: Sizes, dtype: torch.dtype) -> None:
    torch.manual_seed(sizes[1])
    given = [torch.randn(sizes[:3]).to(check.device, dtype) for _ in range(3)]
    weight = torch.randn(sizes[2], device=check.device)
    gradient, passing, x = (one.double() for one in given)
    x.requires_grad_()
    scale, shift = weight.double().requires_grad_(), torch.zeros_like(weight, dtype=torch.double).requires_grad_()
    normal, mean, rate = torch.native_layer_norm(x, sizes[2:3], scale, shift, 1e-5)
    exact = torch.autograd.grad((normal * gradient).sum() + (x * passing).sum(), [x, scale, shift])
    found, sums = bias_gradients.layer_norm_backward(*given, weight, mean.detach().float(), rate.detach().float())
    name = f"norm, backwards {tuple(sizes[:3])} {str(dtype)[6:]}"
    check.report(name, [found, *sums.sum(1)], [*exact, passing.sum((0, 1))], LIMITS[dtype])


def check_add_norm_and_backward(check: Check, sizes: Sizes, dtype: torch.dtype, dropout: bool) -> None:
    torch.manual_seed(sizes[1])
    given = [torch.randn(sizes[:3]).to(check.device, dtype) for _ in range(3)]
    kept = torch.rand(sizes[:3], device=check.device) > 0.3 if dropout else None
    weight = torch.randn(sizes[2], device=check.device)
    gradient, second, x = (one.double() for one in given)
    x.requires_grad_()
    scale, shift = weight.double().requires_grad_(), torch.zeros_like(weight, dtype=torch.double).requires_grad_()
    normal, mean, rate = torch.native_layer_norm(x, sizes[2:3], scale, shift, 1e-5)
    above = gradient + second if dropout else gradient
    exact = list(torch.autograd.grad((normal * above).sum(), [x, scale, shift]))
    behind = exact[0] if kept is None else exact[0] * kept * 1.5
    seed = torch.tensor([sizes[1]], device=check.device) if dropout else None
    out, total, stays, *stats = bias_gradients.add_norm(
        given[0], given[1], weight, seed, 0.3 if dropout else 0.0, weight, weight, 1e-5
    )
    if dropout:
        assert 0.65 < stays.double().mean() < 0.75 or stays.numel() < 5000, "another share is kept"
    branch = (second + weight.double()) * (stays.double() / 0.7 if dropout else 1.0)
    normed = torch.native_layer_norm((gradient + branch).to(dtype).double(), sizes[2:3], scale, scale, 1e-5)
    check.report(f"norm of a sum {tuple(sizes[:3])} {str(dtype)[6:]}{' dropout' if dropout else ''}",
                [out, total, *stats], [normed[0], gradient + branch, *normed[1:]], LIMITS[dtype])  # fmt: skip
    found, of_y, sums = bias_gradients.add_norm_backward(
        given[0], given[1] if dropout else None, given[2], kept, 1.5, weight, mean.detach().float(),
        rate.detach().float(),
    )  # fmt: skip
    name = f"norm of a sum, backwards {tuple(sizes[:3])} {str(dtype)[6:]}{' dropout' if dropout else ''}"
    grads, wanted = ([found, of_y], [exact[0], behind]) if dropout else ([found], [exact[0]])
    check.report(name, [*grads, *sums.sum(1)], [*wanted, *exact[1:], behind.sum((0, 1))], LIMITS[dtype])


def slopes(check: Check, cuda: bool) -> None:
    print("gradients, and their sums over tokens")
    if not cuda:  # through the operators, which refuse results that share memory
        bias_gradients.usable = lambda x: True
    for sizes in BIASES + (LARGE_BIASES if cuda else []):
        for dtype in (torch.float32, torch.bfloat16):
            for kind in FUSED:
                check_activation_backward(check, sizes, dtype, kind)
            check_layer_norm_backward(check, sizes, dtype)
            for dropout in (True, False):
                check_add_norm_and_backward(check, sizes, dtype, dropout)
            for ordered in (True, False):
                check_merge_heads(check, sizes, dtype, ordered)
