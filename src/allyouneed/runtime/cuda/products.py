"""Matrix products of a training step by the fastest algorithm of cuBLASLt, as custom operators that a compiler leaves
alone, and the dense maps that use them.

A residual is added by the product that it is added to, in fp32, and rounded with it. Gradients of weights that are kept
in fp32 are written in fp32: rounding them to bf16 and converting them back would take another pass. Each operator has
its plain definition here; kernels/cublaslt.py multiplies on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.kernels import cublaslt
from allyouneed.kernels.cublaslt import Epilogue
from allyouneed.runtime.cuda.bias_gradients import activation_backward, gelu_tanh
from allyouneed.runtime.swapped_linear import SwappedLinear, linear, product_dtype, swap_linears


def use_fast_products(model: nn.Module) -> list[str]:
    """Let the dense linear maps of all sub-layers use these products while training; returns their names. Left alone
    are maps that several processes share, those whose sizes are no multiples of 8, experts, embeddings and heads."""

    def suits(map: nn.Linear) -> bool:
        return type(map.weight) is nn.Parameter and not any(size % cublaslt.MULTIPLE for size in map.weight.shape)

    return swap_linears(model, FastLinear, suits)


class FastLinear(SwappedLinear):
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Linear.apply(_rows(x), self.weight, bias, None)
        return out.unflatten(0, x.shape[:-1])


def linear_add(x: Tensor, module: Any, bias: Tensor | None, addend: Tensor) -> Tensor:
    """addend + x Aᵀ + bias, by one product where that is possible."""
    fast = isinstance(module, FastLinear) and module.training and x.numel() and addend.dtype == product_dtype(x)
    if not fast:
        return addend + linear(x, module, bias)
    out: Tensor = _Linear.apply(_rows(x), module.weight, bias, addend.flatten(0, -2))
    return out.view_as(addend)


EPILOGUES = ("relu", "gelu-tanh")  # activations that a product computes


def linear_epilogue(x: Tensor, module: FastLinear, kind: str) -> Tensor:
    """activation(x Aᵀ + b), for one of `EPILOGUES`."""
    out: Tensor = _LinearActivation.apply(_rows(x), module.weight, module.bias, kind)
    return out.unflatten(0, x.shape[:-1])


def _rows(x: Tensor) -> Tensor:
    return x.to(product_dtype(x)).flatten(0, -2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)
        return matmul(x, rounded, y_transposed=True, bias=bias, addend=addend)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight), (weight_dtype, bias_dtype) = gradients, ctx.saved_tensors, ctx.dtypes
        x_needs, weight_needs, bias_needs, addend_needs = ctx.needs_input_grad
        return (
            matmul(gradient, weight) if x_needs else None,
            weight_gradient(gradient, x, weight_dtype) if weight_needs else None,
            gradient.sum(0, dtype=bias_dtype) if bias_needs else None,
            gradient if addend_needs else None,
        )


class _LinearActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
        rounded = weight.to(x.dtype)
        if kind == "relu":  # whose derivative its value tells
            found = before = linear_relu(x, rounded, bias.to(x.dtype))
        else:
            found, before = linear_gelu(x, rounded, bias.to(x.dtype))
        ctx.save_for_backward(x, rounded, before)
        ctx.kind, ctx.dtypes = kind, (weight.dtype, bias.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, before), (weight_dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        gradient, sums = activation_backward(gradients[0], before, ctx.kind)
        x_needs, weight_needs, *_ = ctx.needs_input_grad
        return (
            matmul(gradient, weight) if x_needs else None,
            weight_gradient(gradient, x, weight_dtype) if weight_needs else None,
            sums.sum(0).to(bias_dtype),
            None,
        )


# --- operators --------------------------------------------------------------------------------------------------------


def weight_gradient(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """gradientᵀ x (outputs, inputs), given those of all tokens, for a weight of this dtype."""
    single = dtype is torch.float32 and x.dtype is not torch.float32
    return matmul(gradient, x, x_transposed=True, single=single).to(dtype)


@torch.library.custom_op("allyouneed::matmul", mutates_args=())
def matmul(
    x: Tensor, y: Tensor, x_transposed: bool = False, y_transposed: bool = False, bias: Tensor | None = None,
    addend: Tensor | None = None, single: bool = False,
) -> Tensor:  # fmt: skip
    """x (rows, inner), or transposed, times y (inner, columns), or transposed, plus bias (columns,), plus addend (rows,
    columns); in fp32 if `single`."""
    x, y, addend = x.contiguous(), y.contiguous(), None if addend is None else addend.contiguous()
    if cublaslt.usable(x, y, bias, addend):
        kind = Epilogue.NONE if bias is None else Epilogue.BIAS
        flags: dict[str, Any] = {"x_transposed": x_transposed, "y_transposed": y_transposed, "single": single}
        return cublaslt.multiply(x, y, kind, bias=bias, addend=addend, **flags)
    one, other = x.t() if x_transposed else x, y.t() if y_transposed else y
    if single:
        one, other = one.float(), other.float()
    found = one @ other if bias is None else torch.addmm(bias, one, other)
    return found if addend is None else found + addend


@matmul.register_fake
def _(
    x: Tensor, y: Tensor, x_transposed: bool = False, y_transposed: bool = False, bias: Tensor | None = None,
    addend: Tensor | None = None, single: bool = False,
) -> Tensor:  # fmt: skip
    rows, columns = x.shape[x_transposed], y.shape[not y_transposed]
    return torch.empty(rows, columns, device=x.device, dtype=torch.float32 if single else x.dtype)


@torch.library.custom_op("allyouneed::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weightᵀ + bias)"""
    x, weight = x.contiguous(), weight.contiguous()
    if cublaslt.usable(x, weight, bias):
        return cublaslt.multiply(x, weight, Epilogue.RELU_BIAS, y_transposed=True, bias=bias)
    return torch.relu(functional.linear(x, weight, bias))


linear_relu.register_fake(lambda x, weight, bias: x.new_empty(len(x), len(weight)))


@torch.library.custom_op("allyouneed::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(h) by tanh, and h = x weightᵀ + bias."""
    x, weight = x.contiguous(), weight.contiguous()
    before = x.new_empty(len(x), len(weight))
    if cublaslt.usable(x, weight, bias, before):
        found = cublaslt.multiply(x, weight, Epilogue.GELU_BIAS, y_transposed=True, bias=bias, aux=before)
        return found, before
    before = functional.linear(x, weight, bias)
    return gelu_tanh(before), before


linear_gelu.register_fake(lambda x, weight, bias: (x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))))
