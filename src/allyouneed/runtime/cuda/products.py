"""Matrix products of a training step by the fastest algorithm of cuBLASLt, as custom operators that a compiler leaves
alone, and the dense maps that use them.

Gradients of weights that are kept in fp32 are written in fp32: rounding them to bf16 and converting them back would
take another pass. Each operator has its plain definition here; kernels/cublaslt.py multiplies on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from allyouneed.kernels import cublaslt
from allyouneed.kernels.cublaslt import Epilogue
from allyouneed.runtime.cuda.bias_gradients import ACTIVATIONS, activation_backward, gelu_tanh
from allyouneed.runtime.swapped_linear import SwappedLinear, product_dtype, swap_linears


def use_fast_products(model: nn.Module) -> list[str]:
    """Let the dense linear maps of all sub-layers use these products while training; returns their names. Left alone
    are maps that are held by several processes, experts, embeddings and heads."""
    return swap_linears(model, FastLinear, lambda map: type(map.weight) is nn.Parameter)


class FastLinear(SwappedLinear):
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        dtype = product_dtype(x)
        rows = x.to(dtype).flatten(0, -2)
        out: Tensor = _Linear.apply(rows, self.weight, bias)
        return out.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = weight.to(x.dtype)
        ctx.save_for_backward(x, rounded)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return matmul(x, rounded, y_transposed=True, bias=None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight), (weight_dtype, bias_dtype) = gradients, ctx.saved_tensors, ctx.dtypes
        x_needs, weight_needs, bias_needs = ctx.needs_input_grad
        return (
            matmul(gradient, weight) if x_needs else None,
            weight_gradient(gradient, x, weight_dtype) if weight_needs else None,
            gradient.sum(0, dtype=bias_dtype) if bias_needs else None,
        )


FUSED = ("relu", "gelu-tanh")  # activations that products compute


def ffn(x: Tensor, up: Any, down: Any, bias: Tensor | None, kind: str) -> Tensor:
    """activation(x Uᵀ + b) Dᵀ + bias, for an activation of `FUSED`."""
    rows = x.to(product_dtype(x)).flatten(0, -2)
    out: Tensor = _FFN.apply(rows, up.weight, up.bias, down.weight, bias, kind)
    return out.unflatten(0, x.shape[:-1])


class _FFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor | None, kind: str
    ) -> Tensor:
        given, dtype = (up, up_bias, down, down_bias), x.dtype
        ctx.kind, ctx.dtypes = kind, [None if one is None else one.dtype for one in given]
        up, up_bias, down = up.to(dtype), up_bias.to(dtype), down.to(dtype)
        if kind == "relu":  # whose derivative its value tells
            hidden = before = linear_relu(x, up, up_bias)
        else:
            hidden, before = linear_gelu(x, up, up_bias)
        ctx.save_for_backward(x, up, down, hidden, before)
        return matmul(hidden, down, y_transposed=True, bias=None if down_bias is None else down_bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, up, down, hidden, before) = gradients, ctx.saved_tensors
        up_dtype, up_bias_dtype, down_dtype, down_bias_dtype = ctx.dtypes
        if ctx.kind == "relu":
            inner, parts = activation_backward(matmul(gradient, down), before, "relu")
            sums = parts.sum(0)
        else:
            inner = matmul_gelu_backward(gradient, down, before)
            sums = inner.sum(0, dtype=torch.promote_types(inner.dtype, torch.float32))
        x_needs, up_needs, _, down_needs, down_bias_needs, _ = ctx.needs_input_grad
        return (
            matmul(inner, up) if x_needs else None,
            weight_gradient(inner, x, up_dtype) if up_needs else None,
            sums.to(up_bias_dtype),
            weight_gradient(gradient, hidden, down_dtype) if down_needs else None,
            gradient.sum(0, dtype=down_bias_dtype) if down_bias_needs else None,
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
    single: bool = False,
) -> Tensor:  # fmt: skip
    """x (rows, inner), or transposed, times y (inner, columns), or transposed, plus bias (columns,); in fp32 if
    `single`."""
    x, y = x.contiguous(), y.contiguous()
    if cublaslt.usable(x, y, bias):
        kind = Epilogue.NONE if bias is None else Epilogue.BIAS
        flags: dict[str, Any] = {"x_transposed": x_transposed, "y_transposed": y_transposed, "single": single}
        return cublaslt.multiply(x, y, kind, bias=bias, **flags)
    one, other = x.t() if x_transposed else x, y.t() if y_transposed else y
    if single:
        one, other = one.float(), other.float()
    return one @ other if bias is None else torch.addmm(bias, one, other)


@matmul.register_fake
def _(
    x: Tensor, y: Tensor, x_transposed: bool = False, y_transposed: bool = False, bias: Tensor | None = None,
    single: bool = False,
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


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


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


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    found = x.new_empty(len(x), len(weight))
    return found, torch.empty_like(found)


@torch.library.custom_op("allyouneed::matmul_gelu_backward", mutates_args=())
def matmul_gelu_backward(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """The gradient with respect to h (rows, hidden), `before`, of gelu(h) weightᵀ, whose own is `gradient`."""
    gradient, weight, before = gradient.contiguous(), weight.contiguous(), before.contiguous()
    if cublaslt.usable(gradient, weight, before):
        return cublaslt.multiply(gradient, weight, Epilogue.GELU_BACKWARD, aux=before)
    wide = torch.promote_types(before.dtype, torch.float32)
    slope = ACTIVATIONS["gelu-tanh"].derivative(before.to(wide))
    return ((gradient @ weight).to(wide) * slope).to(before.dtype)


@matmul_gelu_backward.register_fake
def _(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before, memory_format=torch.contiguous_format)
