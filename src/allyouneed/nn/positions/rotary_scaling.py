"""Rotary frequencies for contexts longer than in training.

All are fixed when the model is built. Transformers' "dynamic" type, whose base grows with the longest sentence of the
batch, is not supported: results would depend on the batch, and cached keys would not match later queries. For sentences
of up to L tokens it equals `ntk` with factor·L/original − factor + 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.config import Part

Factor = Annotated[float, Field(ge=1)]  # context length / training length
Length = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


class Scaling(Part, slot="rotary scaling"):
    @abstractmethod
    def frequencies(self, base: float, width: int) -> Tensor:
        """Radians per position of each of width/2 planes, in float64."""

    @property
    def magnitude(self) -> float:
        """Multiplies rotated queries and keys."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """Multiplies the scores."""
        return 1.0

    def problems(self, width: int) -> list[tuple[str, str]]:
        return []


def base_frequencies(base: float, width: int) -> Tensor:
    """θ_i = base^(−2i/width) (Su et al. 2021, eq. 15)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return torch.as_tensor(base, dtype=torch.float64, device="cpu") ** -exponents


class NoScaling(Scaling):
    """The frequencies of the paper."""

    kind: Literal["none"] = "none"

    def frequencies(self, base: float, width: int) -> Tensor:
        return base_frequencies(base, width)


class LinearScaling(Scaling):
    """Position interpolation (Chen et al. 2023, eq. 4): positions divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: Factor
    """Positions are divided by it."""

    def frequencies(self, base: float, width: int) -> Tensor:
        return base_frequencies(base, width) / self.factor


class FactorScaling(Scaling):
    """A factor for each plane, as some files store them instead of the rule they follow."""

    kind: Literal["factors"] = "factors"
    factors: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Positions are divided by it, in each of the planes of two rotated features."""

    def frequencies(self, base: float, width: int) -> Tensor:
        return base_frequencies(base, width) / torch.tensor(self.factors, dtype=torch.float64, device="cpu")

    def problems(self, width: int) -> list[tuple[str, str]]:
        wrong = len(self.factors) != width // 2
        return [("factors", f"{len(self.factors)} factors for {width // 2} planes")] if wrong else []


class NTKScaling(Scaling):
    """ "NTK-aware" (Peng et al. 2023, 3.1): a larger base, so that the slowest plane rotates `factor` times slower and
    the fastest is unchanged."""

    kind: Literal["ntk"] = "ntk"
    factor: Factor
    """The slowest plane rotates this many times slower."""

    def frequencies(self, base: float, width: int) -> Tensor:
        return base_frequencies(base * self.factor ** (width / (width - 2)), width)

    def problems(self, width: int) -> list[tuple[str, str]]:
        return [] if width > 2 else [("kind", "ntk needs at least two planes (4 rotated features)")]


class YarnScaling(Scaling):
    """YaRN (Peng et al. 2023): planes with more than `fast` rotations within the `original` length are unchanged, those
    with fewer than `slow` are interpolated, with a ramp between (3.2). Scores are sharpened (3.4) by
    `attention_factor` on queries and keys, by default 0.1·ln(factor) + 1.

    `sharpen: rotated` multiplies the rotated features, all or part of q and k; `scores` multiplies the whole score by
    the square (DeepSeek-V2, which rotates only a part). `whole_planes`: the ramp starts and ends at integer planes, as
    in the authors' code.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    """How many times longer the context gets."""
    original: Length
    """Context length in training, in tokens."""
    fast: Positive = 32.0
    """Planes with more rotations than this within `original` are unchanged."""
    slow: Positive = 1.0
    """Planes with fewer rotations than this are interpolated."""
    attention_factor: Positive | None = None
    """Multiplies queries and keys; default: 0.1·ln(factor) + 1."""
    sharpen: Literal["rotated", "scores"] = "rotated"
    """Apply it to the rotated features, or its square to the whole score (DeepSeek-V2)."""
    whole_planes: bool = True
    """The ramp starts and ends at integer planes, as in the authors' code."""

    def frequencies(self, base: float, width: int) -> Tensor:
        def plane(rotations: float) -> float:
            """Plane with `rotations` rotations within the original length."""
            return width * math.log(self.original / (2 * math.pi * rotations)) / (2 * math.log(base))

        low, high = plane(self.fast), plane(self.slow)
        if self.whole_planes:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(width // 2, dtype=torch.float64, device="cpu")
        ramp = ((steps - low) / (high - low or 0.001)).clamp(0, 1)  # 1: interpolated
        plain = base_frequencies(base, width)
        return plain / self.factor * ramp + plain * (1 - ramp)

    @property
    def _factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    @property
    def magnitude(self) -> float:
        return self._factor if self.sharpen == "rotated" else 1.0

    @property
    def score_scale(self) -> float:
        return self._factor**2 if self.sharpen == "scores" else 1.0

    def problems(self, width: int) -> list[tuple[str, str]]:
        return [] if self.fast > self.slow else [("fast", f"{self.fast} must be greater than slow ({self.slow})")]


class Llama3Scaling(Scaling):
    """Llama 3.1 (`apply_scaling` of the authors' code): wavelengths shorter than original/`high` are unchanged, those
    longer than original/`low` are interpolated, with a ramp between."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    """How many times longer the context gets."""
    original: Length
    """Context length in training, in tokens."""
    low: Positive = 1.0
    """Wavelengths longer than original/`low` are interpolated."""
    high: Positive = 4.0
    """Wavelengths shorter than original/`high` are unchanged."""

    def frequencies(self, base: float, width: int) -> Tensor:
        plain = base_frequencies(base, width)
        rotations = self.original * plain / (2 * math.pi)  # within the original length
        kept = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    def problems(self, width: int) -> list[tuple[str, str]]:
        return [] if self.high > self.low else [("high", f"{self.high} must be greater than low ({self.low})")]


class Inclusive(Scaling):
    """No scaling; the slowest plane rotates at exactly 1/base: base^(−i/(n−1)) for plane i of n, as in the code of
    RetNet and YOCO (Sun et al. 2023 and 2024)."""

    kind: Literal["inclusive"] = "inclusive"

    def frequencies(self, base: float, width: int) -> Tensor:
        exponents = torch.linspace(0, 1, width // 2, dtype=torch.float64, device="cpu")
        return torch.as_tensor(base, dtype=torch.float64, device="cpu") ** -exponents
