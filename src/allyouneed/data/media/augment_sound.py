"""Augmentation of training sounds: small functions of the samples or of the frames, and a random generator.

augment: [speed, shift, {kind: noise, snr: [10, 40]}, spec-augment]

Those that change samples come first, in the order given, then those that mask frames.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, model_validator
from torch import Tensor

from allyouneed.config import Part
from allyouneed.data.media.sound import RATE

Random = np.random.Generator
Share = Annotated[float, Field(ge=0, le=1)]
Decibels = tuple[float, float]


class SoundAugment(Part, slot="sound augmentation"):
    """A random change of training sounds; validation never sees it."""

    def change(self, samples: Tensor, rng: Random) -> Tensor:
        """(time,) The changed samples at 16 kHz, perhaps of another length."""
        return samples

    def mask(self, frames: Tensor, rng: Random) -> Tensor:
        """(mels, time) The changed log-mel frames."""
        return frames


class Speed(SoundAugment):
    """Faster or slower, pitch included (Ko et al. 2015, "Audio Augmentation for Speech Recognition", 2.3), by linear
    interpolation."""

    kind: Literal["speed"] = "speed"
    factor: tuple[float, float] = (0.9, 1.1)
    """Least and most, of the original speed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not 0.25 <= self.factor[0] <= self.factor[1] <= 4:
            raise ValueError(f"factor: [least, most] from 0.25 to 4, not {list(self.factor)}")
        return self

    def change(self, samples: Tensor, rng: Random) -> Tensor:
        count = max(1, round(len(samples) / float(rng.uniform(*self.factor))))
        return torch.nn.functional.interpolate(samples[None, None], count, mode="linear")[0, 0]


class Shift(SoundAugment):
    """Silence before and after, of random lengths."""

    kind: Literal["shift"] = "shift"
    seconds: Annotated[float, Field(gt=0, le=60)] = 0.1
    """The longest silence on each side."""

    def change(self, samples: Tensor, rng: Random) -> Tensor:
        before, after = rng.integers(round(self.seconds * RATE) + 1, size=2).tolist()
        return torch.nn.functional.pad(samples, (before, after))


class Gain(SoundAugment):
    """Louder or quieter."""

    kind: Literal["gain"] = "gain"
    decibels: Decibels = (-10.0, 3.0)
    """Least and most."""

    def change(self, samples: Tensor, rng: Random) -> Tensor:
        return samples * float(10 ** (rng.uniform(*self.decibels) / 20))


class Noise(SoundAugment):
    """White noise, at a ratio of signal to noise in decibels."""

    kind: Literal["noise"] = "noise"
    snr: Decibels = (10.0, 40.0)
    """Least and most signal-to-noise ratio."""
    probability: Share = 0.5
    """Share of the sounds."""

    def change(self, samples: Tensor, rng: Random) -> Tensor:
        if rng.random() >= self.probability:
            return samples
        level = samples.square().mean().sqrt() * float(10 ** (-rng.uniform(*self.snr) / 20))
        return samples + level * torch.from_numpy(rng.standard_normal(len(samples), np.float32))


class SpecAugment(SoundAugment):
    """Bands of frequencies and stretches of time become the mean of the frames (Park et al. 2019, "SpecAugment", 2,
    without time warping)."""

    kind: Literal["spec-augment"] = "spec-augment"
    frequencies: NonNegativeInt = 27
    """The widest band, in mel channels; F of the paper."""
    bands: NonNegativeInt = 2
    """Number of bands; m_F of the paper."""
    time: Share = 0.2
    """The longest stretch, as a share of the sound; p of the paper."""
    stretches: NonNegativeInt = 2
    """Number of stretches; m_T of the paper."""

    def mask(self, frames: Tensor, rng: Random) -> Tensor:
        mels, time = frames.shape
        found, mean = frames.clone(), frames.mean()
        for _ in range(self.bands):
            width = int(rng.integers(min(self.frequencies, mels) + 1))
            low = int(rng.integers(mels - width + 1))
            found[low : low + width] = mean
        for _ in range(self.stretches):
            width = int(rng.integers(int(self.time * time) + 1))
            begin = int(rng.integers(time - width + 1))
            found[:, begin : begin + width] = mean
        return found
