"""Images with a label or a text (media.py): folders, tables, Parquet, and arrays of pixels or of image files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from allyouneed.data.files.formats.arrays import read_idx, read_npy
from allyouneed.data.files.lines import inner_suffix
from allyouneed.data.files.media import (
    DescribedMedium,
    LabelledMedium,
    MediaFiles,
    Source,
    Stored,
    numbered,
    texts_of,
)
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class LabelledImage(LabelledMedium):
    """An image with its label."""


class CaptionedImage(DescribedMedium):
    """An image with its text."""


class ImageFiles(MediaFiles):
    """Images with labels or texts. A folder has a folder of images for each class, or a `metadata.csv` (or .jsonl) that
    names its images, or Parquet files; a table (.tsv, .csv, .jsonl) has paths, relative to it; .npz, .npy and IDX files
    have arrays of pixels; .parquet files have the bytes of image files."""

    examples: ClassVar[str] = "images"
    noun: ClassVar[str] = "image"
    article: ClassVar[str] = "an"
    suffixes: ClassVar[tuple[str, ...]] = IMAGE_SUFFIXES
    names_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "content": ("image", "images", "img", "file_name", "path", "x", "x_train", "data"),
        "value": ("label", "labels", "text", "caption", "y", "y_train", "fine_label", "target"),
    }
    joined: ClassVar[tuple[str, ...]] = ("jpeg", "png", "bytes")
    example: ClassVar[type[LabelledMedium]] = LabelledImage
    kind: Literal["images"] = "images"
    labels: Path | None = None
    """The array of labels of a .npy or IDX file; default: the file named alike, with `labels` in place of `images`."""

    def reader_of(self, file: Path) -> Source:
        if "ubyte" in file.name:
            return _idx
        return _npy if inner_suffix(file).lower() == ".npy" else super().reader_of(file)

    def files(self) -> list[Path]:
        files = super().files()
        return [*files, *(self.labels_of(file) for file in files if inner_suffix(file) in (".npy", ""))]

    def from_array(self, file: Path, contents: Any, arrays: Mapping[str, Any]) -> Sequence[Any]:
        if not isinstance(contents, np.ndarray):
            return [one.tobytes() for one in contents]
        if contents.dtype != np.uint8:
            raise UserError(f"{file}: pixels of type {contents.dtype}, expected uint8 (0 to 255)")
        return contents  # type: ignore[return-value]

    def labels_of(self, file: Path) -> Path:
        beside = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1"))
        found = self.labels or beside
        if found == file or not found.is_file():
            raise UserError(f"{file}: no labels ({found.name} is missing); set labels: FILE")
        return found


class CaptionedImages(ImageFiles):
    """Images with texts, in any of the forms of labelled images; in a folder, `photo.txt` may be the text of
    `photo.jpg`."""

    kind: Literal["captioned-images"] = "captioned-images"  # type: ignore[assignment]
    example: ClassVar[type[LabelledMedium]] = CaptionedImage


def _npy(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    images = entry.from_array(file, read_npy(file, mapped=True), {})
    yield from numbered(entry, file, images, texts_of(read_npy(entry.labels_of(file))), report)


def _idx(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    values = texts_of(read_idx(entry.labels_of(file)))
    yield from numbered(entry, file, read_idx(file), values, report)  # type: ignore[arg-type]
