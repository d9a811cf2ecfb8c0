"""Image preprocessing: resize, center crop, scale and normalise, as the model was trained.

pixels = Pixels(size=256, crop=(224, 224)).read("photo.jpg")      # (channels, height, width)
"""

from __future__ import annotations

import functools
import warnings
from base64 import b64encode
from io import BytesIO
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import Config
from allyouneed.errors import UserError
from allyouneed.errors.extras import missing

Side = Annotated[int, Field(gt=0, le=1 << 14)]
Channel = tuple[float, ...]
WHITE = (255, 255, 255, 255)
# Pillow reads by content whatever the name is, and its reader of EPS runs another program
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")


class Pixels(Config):
    """Resize, crop, then (pixel · scale − mean) / std per channel."""

    medium: ClassVar[str] = "image"
    dtype: ClassVar[str] = "<u1"
    size: Side | tuple[Side, Side] | None = None
    """Length of the shorter side, or [height, width], which may change the aspect ratio; default: unchanged."""
    filter: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"
    """How pixels are interpolated."""
    crop: tuple[Side, Side] | None = None
    """[height, width] of the centre to keep, padded with black if the image is smaller; default: all of it."""
    scale: float | None = 1 / 255
    """Factor of a pixel's value."""
    mean: Channel | None = None
    """Subtracted, for each channel."""
    std: Channel | None = None
    """Divisor after that, for each channel."""
    channels: Literal[1, 3] = 3
    """1: grey; 3: red, green, blue."""

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        found = self.crop or self.size
        if not isinstance(found, tuple):
            raise UserError("task.image: set size: [height, width], or crop")
        return found

    def read(self, image: Any) -> Tensor:
        """A path, a PIL image, or uint8 pixels (height, width, channels) -> (channels, height, width)."""
        return self.scaled(self.resized(image))

    def resized(self, image: Any) -> NDArray[np.uint8]:
        """(height, width, channels) before scaling."""
        picture = self._open_image(image)
        if self.size is not None:
            filters = _pillow().Resampling
            picture = picture.resize(self._resized(*picture.size), resample=filters[self.filter.upper()])
        values = np.asarray(picture).reshape(picture.height, picture.width, self.channels)
        if self.crop is not None:
            values = _center_crop(values, *self.crop)
        return np.ascontiguousarray(values)

    def stored(self, image: Any) -> NDArray[np.uint8]:
        """The image as it is stored: (height, width, channels)."""
        return self.resized(image)

    def restored(self, stored: NDArray[np.uint8]) -> Any:
        """What is stored, as it is given."""
        return stored

    def scaled(self, values: NDArray[Any]) -> Tensor:
        """(…, height, width, channels) -> (…, channels, height, width)"""
        scale = 1.0 if self.scale is None else self.scale
        numbers: Any = (values.astype(np.float64) * scale).astype(np.float32)
        if self.mean is not None and self.std is not None:
            numbers = (numbers - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(numbers, -1, -3)))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height)"""
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        assert self.size is not None
        longer = int(self.size * max(width, height) / min(width, height))
        if longer > 1 << 16:
            raise UserError(
                f"an image of {width}×{height} pixels is too thin: its long side would be {longer} pixels; crop it"
            )
        return (self.size, longer) if width <= height else (longer, self.size)

    def _open_image(self, image: Any) -> Any:
        """A PIL image with this many channels, rotated by its EXIF tag, transparency composited on white."""
        pillow = _pillow()
        if isinstance(image, str | Path):
            picture = _open_file(Path(image))
        elif isinstance(image, bytes):
            picture = _open_file(BytesIO(image))
        elif isinstance(image, pillow.Image):
            picture = image
        else:
            picture = pillow.fromarray(_check_array(image))
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            clear = picture.convert("RGBA")
            picture = pillow.alpha_composite(pillow.new("RGBA", clear.size, WHITE), clear)
        return picture.convert("RGB" if self.channels == 3 else "L")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise missing("image", "an image") from None
    return Image


@functools.cache
def _formats() -> list[str]:
    """The formats of images that this Pillow has."""
    pillow = _pillow()
    pillow.init()
    warnings.filterwarnings("ignore", category=pillow.DecompressionBombWarning)  # such images are refused
    return [name for name in FORMATS if name in pillow.OPEN]


def _open_file(file: Path | BytesIO) -> Any:
    from PIL import ImageOps, UnidentifiedImageError

    pillow, name = _pillow(), str(file) if isinstance(file, Path) else "the image"
    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise UserError(f"{file}: a {'folder' if file.is_dir() else 'device'}, not an image file")
    try:
        with pillow.open(file, formats=_formats()) as opened:
            if opened.width * opened.height > (pillow.MAX_IMAGE_PIXELS or inf):
                raise UserError(
                    f"{name}: {opened.width:,} × {opened.height:,} pixels; at most {pillow.MAX_IMAGE_PIXELS:,} are "
                    "read: make it smaller"
                )
            opened.load()
            return ImageOps.exif_transpose(opened)
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{name}: not an image that Pillow can read") from None
    except pillow.DecompressionBombError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:  # Pillow's readers raise errors of any kind for damaged files
        raise UserError(f"{name}: cannot be read as an image: {getattr(error, 'strerror', None) or error}") from None


def thumbnail(file: Path, side: int = 96) -> str:
    """A small copy of an image file, as the address of an <img>."""
    small, written = _open_file(file).convert("RGB"), BytesIO()
    small.thumbnail((side, side))
    small.save(written, "JPEG", quality=80)
    return "data:image/jpeg;base64," + b64encode(written.getvalue()).decode()


def _check_array(image: Any) -> Any:
    values = image.cpu().numpy() if isinstance(image, Tensor) else image
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim not in (2, 3) or 0 in values.shape:
        raise UserError("an image is a path, bytes of a file, a PIL image, or uint8 pixels (height, width, channels)")
    if values.ndim == 3 and values.shape[2] not in (1, 3, 4):
        raise UserError(f"pixels of shape {values.shape}: channels (1, 3 or 4) must be last: (height, width, channels)")
    return values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values


def _center_crop(values: Any, height: int, width: int) -> Any:
    """(height, width, channels)"""
    for axis, wanted in enumerate((height, width)):
        have = values.shape[axis]
        if have < wanted:
            before = ceil((wanted - have) / 2)
            around = [(0, 0)] * 3
            around[axis] = (before, wanted - have - before)
            values = np.pad(values, around)
        else:
            values = values.take(range((have - wanted) // 2, (have - wanted) // 2 + wanted), axis)
    return values
