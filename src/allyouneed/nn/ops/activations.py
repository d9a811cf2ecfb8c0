"""Activation functions by name, and which of them the fused kernels implement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn


def _identity(x: Tensor) -> Tensor:
    return x


def _quick_gelu(x: Tensor) -> Tensor:
    """Hendrycks, Gimpel 2016, section 2: the sigmoid approximation of GELU, used by CLIP."""
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    """So et al. 2021, "Primer", section 4."""
    return nn.functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": nn.functional.relu,
    "relu-squared": _relu_squared,
    "leaky-relu": nn.functional.leaky_relu,  # slope 0.01 below 0
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "gelu-tanh": partial(nn.functional.gelu, approximate="tanh"),  # GPT-2's gelu_new
    "quick-gelu": _quick_gelu,
    "silu": nn.functional.silu,  # Swish with β = 1
    "mish": nn.functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_FUSED = {ACTIVATIONS[name]: name for name in ("relu", "silu", "gelu", "gelu-tanh")}
Activation = Literal[
    "identity",
    "relu",
    "relu-squared",
    "leaky-relu",
    "elu",
    "gelu",
    "gelu-tanh",
    "quick-gelu",
    "silu",
    "mish",
    "sigmoid",
    "tanh",
]


def fused_name(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Name of this activation in the fused kernels; None when they lack it."""
    return _FUSED.get(activation)
