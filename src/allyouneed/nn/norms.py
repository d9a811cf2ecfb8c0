"""Normalisation over the features of a token, or over tokens (batch norm)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part, model_validator
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost

Epsilon = Annotated[float, Field(ge=0)]


class Norm(Part, slot="norm"):
    """Builds a module called as `norm(x, context)`; batch norm needs to know the padding."""

    tokenwise: ClassVar[bool] = (
        True  # normalises each token separately, so it also works inside a head: x (…, head_width)
    )

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...

    @abstractmethod
    def cost(self, width: int) -> Cost: ...


class LayerNorm(Norm):
    """Ba, Kiros, Hinton 2016, "Layer Normalization", eq. 4."""

    kind: Literal["layer"] = "layer"
    eps: Epsilon = 1e-5
    """Added to the variance, to avoid division by zero."""
    weight: bool = True
    """Multiply by a learned weight per feature."""
    bias: bool = True
    """Add a learned bias per feature."""

    def build(self, width: int) -> nn.Module:
        return LayerNormModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=width * (self.weight + self.bias))


class _Affine(nn.Module):
    """Optional weight and bias of a norm; `reset_parameters` is called by every init."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, weight: bool, bias: bool, first: float = 1.0) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.full((width,), first)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.first)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNormModule(_Affine):
    def __init__(self, config: LayerNorm, width: int) -> None:
        super().__init__(width, config.weight, config.bias)
        self.eps = config.eps

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)


class RMSNorm(Norm):
    """Zhang, Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.

    `offset` 1 multiplies by 1 + weight (Gemma), so that weight decay pulls towards the identity.
    """

    kind: Literal["rms"] = "rms"
    eps: Epsilon = 1e-6
    """Added to the mean square, to avoid division by zero."""
    weight: bool = True
    """Multiply by a learned weight per feature."""
    offset: Literal[0, 1] = 0
    """1: multiply by 1 + weight (Gemma), so that weight decay pulls towards the identity."""

    @model_validator(mode="after")
    def _check_offset(self) -> Self:
        if self.offset and not self.weight:
            raise ValueError("offset: 1 requires weight: true")
        return self

    def build(self, width: int) -> nn.Module:
        return RMSNormModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=width * self.weight)


class RMSNormModule(_Affine):
    def __init__(self, config: RMSNorm, width: int) -> None:
        super().__init__(width, config.weight, bias=False, first=1.0 - config.offset)
        self.eps, self.offset = config.eps, config.offset

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weight = self.weight if self.weight is None or not self.offset else self.weight + self.offset
        return nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps).to(x.dtype)


class ScaleNorm(Norm):
    """Nguyen, Salazar 2019, "Transformers without Tears", eq. 5: g · x / ‖x‖, g one learned scalar, initially √width.

    ‖x‖ is at least `eps`, as in the authors' code.
    """

    kind: Literal["scale"] = "scale"
    eps: Epsilon = 1e-5
    """Lower bound of the length ‖x‖."""

    def build(self, width: int) -> nn.Module:
        return ScaleNormModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=1)


class ScaleNormModule(_Affine):
    def __init__(self, config: ScaleNorm, width: int) -> None:
        super().__init__(1, weight=True, bias=False, first=width**0.5)
        self.eps = config.eps

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares overflow in half precision
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=self.eps)
        return (wide / length * self.weight).to(x.dtype)


class BatchNorm(Norm):
    """Ioffe, Szegedy 2015, "Batch Normalization", algorithm 1 over all tokens except padding; evaluation uses the
    moving averages of training (algorithm 2).

    In training a token's result depends on the rest of the batch and, in a decoder, on later tokens, which is why the
    literature avoids it here (Shen et al. 2020, "PowerNorm").
    """

    tokenwise: ClassVar[bool] = False

    kind: Literal["batch"] = "batch"
    eps: Epsilon = 1e-5
    """Added to the variance, to avoid division by zero."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of the newest batch in the moving averages."""

    def build(self, width: int) -> nn.Module:
        return BatchNormModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=2 * width)


class BatchNormModule(_Affine):
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, config: BatchNorm, width: int) -> None:
        super().__init__(width, weight=True, bias=True)
        self.eps, self.momentum = config.eps, config.momentum
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = self.measure(wide, context) if self.training else (self.running_mean, self.running_var)
        normal = (wide - mean) * torch.rsqrt(variance + self.eps)
        assert self.weight is not None and self.bias is not None
        return (normal * self.weight + self.bias).to(x.dtype)

    def measure(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Mean and variance of each feature over the real tokens of this batch; updates the moving averages."""
        real = context.queries.real
        if x.dim() > 3 or (real is not None and real.shape != x.shape[:-1]):
            raise ValueError(f"batch norm needs (batch, time, width), got {tuple(x.shape)}; it cannot normalise heads")
        kept = torch.ones_like(x[..., :1]) if real is None else real[..., None].to(x.dtype)
        axes, count = tuple(range(x.dim() - 1)), kept.sum().clamp(min=1)
        mean = (x * kept).sum(axes) / count
        variance = ((x - mean).square() * kept).sum(axes) / count
        if context.is_recomputing:
            return mean, variance
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return mean, variance

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
