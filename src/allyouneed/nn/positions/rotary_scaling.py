"""Rotary frequencies for sentences longer than those trained on.

All of them are fixed when the model is built. Transformers' "dynamic" type, which lets the base grow with the longest
sentence of the batch, is not here: a token would get other numbers in other company, and keys turned before the base
grew would not fit queries turned after. For sentences of up to L tokens it is `ntk` with factor·L/original − factor +
1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.config import Part

Factor = Annotated[float, Field(ge=1)]  # how many times longer than trained
Length = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class Scaling(Part, slot="rotary scaling"):
    @abstractmethod
    def frequencies(self, base: float, width: int) -> Tensor:
        """Radians per place of each of width/2 planes, in double precision."""

    @property
    def magnitude(self) -> float:
        """What turned queries and keys are multiplied by."""
        return 1.0

    @property
    def sharpness(self) -> float:
        """What whole scores are multiplied by."""
        return 1.0

    def problems(self, width: int) -> list[tuple[str, str]]:
        return []


def trained(base: float, width: int) -> Tensor:
    """θ_i = base^(−2i/width) (Su et al. 2021, eq. 15)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return torch.as_tensor(base, dtype=torch.float64, device="cpu") ** -exponents


class NoScaling(Scaling):
    kind: Literal["none"] = "none"

    def frequencies(self, base: float, width: int) -> Tensor:
        return trained(base, width)


class LinearScaling(Scaling):
    """Position interpolation (Chen et al. 2023, eq. 4): places `factor` times closer together."""

    kind: Literal["linear"] = "linear"
    factor: Factor

    def frequencies(self, base: float, width: int) -> Tensor:
        return trained(base, width) / self.factor


class NTKScaling(Scaling):
    """ "NTK-aware" (Peng et al. 2023, 3.1): a base for which the slowest plane turns `factor` times slower and the
    fastest as before."""

    kind: Literal["ntk"] = "ntk"
    factor: Factor

    def frequencies(self, base: float, width: int) -> Tensor:
        return trained(base * self.factor ** (width / (width - 2)), width)

    def problems(self, width: int) -> list[tuple[str, str]]:
        return (
            [] if width > 2 else [("kind", "ntk spreads planes between the slowest and the fastest; here is only one")]
        )


class YarnScaling(Scaling):
    """YaRN (Peng et al. 2023): planes that turn more than `fast` times within the `original` length stay as they are,
    those that turn less than `slow` times are interpolated, a ramp between (3.2); besides, scores are sharpened
    (3.4): by `attention_factor`, 0.1·ln(factor) + 1 when not given, on queries and keys.

    `sharpen: rotated` multiplies what is turned, which is all of q and k or only part of them; `scores` multiplies the
    whole score, by the square (DeepSeek-V2, which turns only a part). `whole_planes`: the ramp begins and ends at whole
    planes, as in the authors' code.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original: Length
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention_factor: Positive | None = None
    sharpen: Literal["rotated", "scores"] = "rotated"
    whole_planes: bool = True

    def frequencies(self, base: float, width: int) -> Tensor:
        def plane(turns: float) -> float:
            """The number of the plane that turns so often within the original length."""
            return width * math.log(self.original / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = plane(self.fast), plane(self.slow)
        if self.whole_planes:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(width // 2, dtype=torch.float64, device="cpu")
        ramp = ((steps - low) / (high - low or 0.001)).clamp(0, 1)  # 1: interpolated
        plain = trained(base, width)
        return plain / self.factor * ramp + plain * (1 - ramp)

    @property
    def _factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    @property
    def magnitude(self) -> float:
        return self._factor if self.sharpen == "rotated" else 1.0

    @property
    def sharpness(self) -> float:
        return self._factor**2 if self.sharpen == "scores" else 1.0

    def problems(self, width: int) -> list[tuple[str, str]]:
        return [] if self.fast > self.slow else [("fast", f"{self.fast} must be above slow, which is {self.slow}")]


class Llama3Scaling(Scaling):
    """Llama 3.1 (its authors' `apply_scaling`): planes whose wave is shorter than original/`high` stay, those whose
    wave is longer than original/`low` are interpolated, and between them one goes over into the other."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    original: Length
    low: Positive = 1.0
    high: Positive = 4.0

    def frequencies(self, base: float, width: int) -> Tensor:
        plain = trained(base, width)
        turns = self.original * plain / (2 * math.pi)  # within the original length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    def problems(self, width: int) -> list[tuple[str, str]]:
        return [] if self.high > self.low else [("high", f"{self.high} must be above low, which is {self.low}")]


class Inclusive(Scaling):
    """No scaling; the slowest plane turns at exactly 1/base: base^(−i/(n−1)) for plane i of n, as the code of RetNet
    and YOCO has it (Sun et al. 2023 and 2024)."""

    kind: Literal["inclusive"] = "inclusive"

    def frequencies(self, base: float, width: int) -> Tensor:
        exponents = torch.linspace(0, 1, width // 2, dtype=torch.float64, device="cpu")
        return torch.as_tensor(base, dtype=torch.float64, device="cpu") ** -exponents
