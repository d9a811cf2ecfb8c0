"""Augmentation of training images: small functions of the pixels and a random generator.

augment: [crop, flip, {kind: randaugment, magnitude: 7}, {kind: mixup, alpha: 0.2}, cutmix, erasing]

Those that change one image come first, in the order given; of those that mix two images, one is drawn for each image.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from allyouneed.config import Part

Pixels8 = NDArray[np.uint8]  # (height, width, channels)
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Random = np.random.Generator
GREY = 128  # what comes into an image from outside


class Augment(Part, slot="augmentation"):
    """A random change of training images; validation never sees it."""

    mixes: ClassVar[bool] = False  # two images and their labels

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        """The changed image, of the same size."""
        raise NotImplementedError

    def mix(self, image: Pixels8, other: Pixels8, share: float, rng: Random) -> tuple[NDArray[Any], float]:
        """Both images in one, and the share of the first."""
        raise NotImplementedError


class Crop(Augment):
    """Pad every side, then cut the image's size out at random (He et al. 2016, "Deep Residual Learning", 4.2)."""

    kind: Literal["crop"] = "crop"
    padding: NonNegativeInt | None = None
    """Pixels added to every side; default: an eighth of the shorter one."""

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        height, width = image.shape[:2]
        pad = max(1, min(height, width) // 8) if self.padding is None else self.padding
        top, left = rng.integers(2 * pad + 1, size=2).tolist()
        wide = np.zeros((height + 2 * pad, width + 2 * pad, image.shape[2]), np.uint8)
        wide[pad : pad + height, pad : pad + width] = image
        return wide[top : top + height, left : left + width]


class ResizedCrop(Augment):
    """A part of random area and shape, resized to the whole (Szegedy et al. 2015, "Going Deeper with Convolutions",
    6)."""

    kind: Literal["resized-crop"] = "resized-crop"
    area: tuple[Share, Share] = (0.35, 1.0)
    """Smallest and largest part of the image's area; 0.08 to 1 in the paper."""
    ratio: Annotated[float, Field(ge=1)] = 4 / 3
    """Largest factor by which the shape is changed."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not 0 < self.area[0] <= self.area[1]:
            raise ValueError(f"area: [smallest, largest] above 0, not {list(self.area)}")
        return self

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        height, width = image.shape[:2]
        scale = np.sqrt(rng.uniform(*self.area))
        shape = np.exp(rng.uniform(-1, 1) * np.log(self.ratio) / 2)
        down, across = (max(1, min(side, round(side * scale * f))) for side, f in ((height, shape), (width, 1 / shape)))
        top, left = int(rng.integers(height - down + 1)), int(rng.integers(width - across + 1))
        box = (left, top, left + across, top + down)
        return _through_pillow(image, lambda picture: picture.resize((width, height), resample=2, box=box))


class Flip(Augment):
    """Mirror left and right (Krizhevsky et al. 2012, 4.1). Not for digits and letters."""

    kind: Literal["flip"] = "flip"
    probability: Share = 0.5
    """Share of the images."""

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        return image[:, ::-1] if rng.random() < self.probability else image


class Erasing(Augment):
    """Random pixels in a rectangle (Zhong et al. 2020, "Random Erasing Data Augmentation", algorithm 1)."""

    kind: Literal["erasing"] = "erasing"
    probability: Share = 0.25
    """Share of the images."""
    area: tuple[Share, Share] = (0.02, 0.33)
    """Smallest and largest part of the image's area."""

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        if rng.random() >= self.probability:
            return image
        top, left, down, across = _box(image, float(rng.uniform(*self.area)), rng)
        erased = image.copy()
        erased[top : top + down, left : left + across] = rng.integers(256, size=(down, across, image.shape[2]))
        return erased


class RandAugment(Augment):
    """A few operations drawn from a list, all of one strength (Cubuk et al. 2020, "RandAugment", figure 2)."""

    kind: Literal["randaugment"] = "randaugment"
    operations: PositiveInt = 2
    """Operations for each image; N of the paper."""
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9
    """Their strength, from 0 to 30; M of the paper."""

    def change(self, image: Pixels8, rng: Random) -> Pixels8:
        for number in rng.integers(len(OPERATIONS), size=self.operations).tolist():
            strength = self.magnitude / 30 * (1 if rng.random() < 0.5 else -1)
            image = _through_pillow(image, partial(OPERATIONS[number], s=strength))
        return image


class Mixture(Augment):
    """A mixture of two images and their labels; the share of the first is drawn from Beta(α, α)."""

    mixes: ClassVar[bool] = True
    alpha: Positive = 1.0
    """α of the Beta distribution: with a small one, one of the two images dominates."""
    probability: Share = 1.0
    """Share of the images that are mixed."""


class Mixup(Mixture):
    """λ·x₁ + (1 − λ)·x₂ (Zhang et al. 2018, "mixup", eq. 1 of section 2)."""

    kind: Literal["mixup"] = "mixup"
    alpha: Positive = 0.2
    """α of the Beta distribution: with a small one, one of the two images dominates."""

    def mix(self, image: Pixels8, other: Pixels8, share: float, rng: Random) -> tuple[NDArray[Any], float]:
        return image.astype(np.float32) * np.float32(share) + other * np.float32(1 - share), share


class CutMix(Mixture):
    """A rectangle of the second image in the first (Yun et al. 2019, "CutMix", eq. 1–2)."""

    kind: Literal["cutmix"] = "cutmix"

    def mix(self, image: Pixels8, other: Pixels8, share: float, rng: Random) -> tuple[NDArray[Any], float]:
        height, width = image.shape[:2]
        down, across = (round(side * np.sqrt(1 - share)) for side in (height, width))
        middle = int(rng.integers(height)), int(rng.integers(width))
        top, left = max(0, middle[0] - down // 2), max(0, middle[1] - across // 2)
        rows, columns = slice(top, middle[0] + (down + 1) // 2), slice(left, middle[1] + (across + 1) // 2)
        mixed_ = image.copy()
        mixed_[rows, columns] = other[rows, columns]
        return mixed_, 1 - other[rows, columns, 0].size / (height * width)


def mixed(mix: Augment, image: Pixels8, other: Callable[[], Pixels8], rng: Random) -> tuple[NDArray[Any], float]:
    """Perhaps mixed with the other image, which is only made then; the share of the first."""
    assert isinstance(mix, Mixture)
    if rng.random() >= mix.probability:
        return image, 1.0
    return mix.mix(image, other(), float(rng.beta(mix.alpha, mix.alpha)), rng)


def _box(image: Pixels8, area: float, rng: Random) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random rectangle with this part of the image's area, up to about 3:1."""
    height, width = image.shape[:2]
    shape = np.exp(rng.uniform(-0.5, 0.5) * np.log(3))
    down, across = (max(1, min(s, round(s * np.sqrt(area) * f))) for s, f in ((height, shape), (width, 1 / shape)))
    return int(rng.integers(height - down + 1)), int(rng.integers(width - across + 1)), down, across


# --- operations of RandAugment: (picture, strength from −1 to 1) -> picture -----------------------------------------


def _through_pillow(image: Pixels8, change: Callable[[Any], Any]) -> Pixels8:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))
    return np.asarray(change(picture)).reshape(image.shape)


def _affine(picture: Any, matrix: tuple[float, ...]) -> Any:
    return picture.transform(picture.size, 0, matrix, resample=2, fillcolor=_fill(picture))


def _fill(picture: Any) -> Any:
    return GREY if len(picture.getbands()) == 1 else (GREY,) * len(picture.getbands())


def _operation(name: str) -> Callable[..., Any]:
    """An enhancement of Pillow, or a function of its ImageOps."""

    def run(picture: Any, s: float) -> Any:
        from PIL import ImageEnhance, ImageOps

        if (enhance := getattr(ImageEnhance, name.capitalize(), None)) is not None:
            return enhance(picture).enhance(1 + 0.9 * s)
        arguments = {"posterize": (8 - round(4 * abs(s)),), "solarize": (256 - round(256 * abs(s)),)}
        return getattr(ImageOps, name)(picture, *arguments.get(name, ()))

    return run


OPERATIONS: tuple[Callable[..., Any], ...] = (
    lambda picture, s: picture,
    lambda picture, s: picture.rotate(30 * s, resample=2, fillcolor=_fill(picture)),
    lambda picture, s: _affine(picture, (1, 0.3 * s, 0, 0, 1, 0)),  # shear
    lambda picture, s: _affine(picture, (1, 0, 0, 0.3 * s, 1, 0)),
    lambda picture, s: _affine(picture, (1, 0, 0.45 * s * picture.width, 0, 1, 0)),  # translate
    lambda picture, s: _affine(picture, (1, 0, 0, 0, 1, 0.45 * s * picture.height)),
    *map(_operation, ("autocontrast", "equalize", "posterize", "solarize")),
    *map(_operation, ("color", "contrast", "brightness", "sharpness")),
)
