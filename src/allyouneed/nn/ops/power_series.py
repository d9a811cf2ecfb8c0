"""Power series of a finite number of terms (…, terms): products and reciprocals by FFT, with gradients; and powers.

Gradients of products are products as well, with the spectra that the forward pass has computed. torch's own gradient of
a real transform is a complex one of the whole length, which takes as long as the rest of it.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn


@cache
def fast_length(least: int) -> int:
    """The next length with no prime factor above 5, for fast transforms."""
    return next(n for n in count(least) if 60 ** n.bit_length() % n == 0)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The product of two series of as many terms."""
    terms = a.shape[-1]
    return circular_product(a, b, fast_length(2 * terms), terms)


def circular_product(a: Tensor, b: Tensor, size: int, terms: int) -> Tensor:
    """y_t = Σ_s a_s b_{(t − s) mod size} for t below `terms`; a and b have at most `size` terms each, and may differ in
    the dimensions before, as in other products of torch."""
    return _CircularProduct.apply(a, b, size, terms)


class _CircularProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, size: int, terms: int) -> Tensor:
        of_a, of_b = torch.fft.rfft(a, size), torch.fft.rfft(b, size)
        ctx.save_for_backward(a, b, of_a, of_b)
        ctx.size = size
        return torch.fft.irfft(of_a * of_b, size)[..., :terms]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        a, b, of_a, of_b = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of this one are wanted: they go through a and b
            of_a, of_b = torch.fft.rfft(a, ctx.size), torch.fft.rfft(b, ctx.size)
        slope, found = torch.fft.rfft(dy, ctx.size), []
        for wanted, own, other in zip(ctx.needs_input_grad[:2], (a, b), (of_b, of_a), strict=True):
            spectrum = (slope * other.conj()).sum_to_size(*own.shape[:-1], slope.shape[-1]) if wanted else None
            found.append(None if spectrum is None else torch.fft.irfft(spectrum, ctx.size)[..., : own.shape[-1]])
        return found[0], found[1], None, None


def one_over(f: Tensor) -> Tensor:
    """1 / (1 − z f), of as many terms as f."""
    return _OneOver.apply(f)


class _OneOver(torch.autograd.Function):
    """1 / (1 − z f) by Newton's iteration, g ← g − g ((1 − z f) g − 1), which doubles the number of terms that are
    right. Products are no longer than these: what exceeds them wraps around to terms that are known. The gradient is z
    / (1 − z f)²."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        terms, found = f.shape[-1], torch.ones_like(f[..., :1])
        while (known := found.shape[-1]) < terms:
            more = min(2 * known, terms)
            size = fast_length(more)
            spectrum = torch.fft.rfft(found, size)
            whole = nn.functional.pad(-f[..., : more - 1], (1, size - more))
            whole[..., 0].fill_(1)
            rest = torch.fft.irfft(torch.fft.rfft(whole, size) * spectrum, size)
            rest[..., :known].zero_()
            rest[..., more:].zero_()
            wrong = torch.fft.irfft(torch.fft.rfft(rest, size) * spectrum, size)[..., known:more]
            found = torch.cat((found, wrong.neg_()), -1)
        ctx.save_for_backward(f, found)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        f, found = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = one_over(f)
        square = nn.functional.pad(multiply(found, found), (1, -1))
        return multiply(square, dy.flip(-1)).flip(-1)


def powers(base: Tensor, count: int) -> Tensor:
    """baseⁱ for i below `count`: (…, count, n) of (…, n)."""
    return _Powers.apply(base, count)


class _Powers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, count: int) -> Tensor:
        found = base.new_empty(*base.shape[:-1], count, base.shape[-1])
        found[..., 0, :].fill_(1)  # an assignment would copy the number from the host
        power, known = base[..., None, :], 1
        while known < count:
            more = min(known, count - known)
            found[..., known : known + more, :] = found[..., :more, :] * power
            power, known = power * power, known + more
        ctx.save_for_backward(base, found)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Σ i baseⁱ⁻¹ ∂yᵢ"""
        base, found = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = powers(base, dy.shape[-2])
        steps = torch.arange(1, dy.shape[-2], dtype=base.real.dtype, device=base.device)[:, None]
        return (found[..., :-1, :].conj() * steps * dy[..., 1:, :]).sum(-2), None
