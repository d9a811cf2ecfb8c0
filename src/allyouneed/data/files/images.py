"""Images with a label or a text: folders, tables of paths, arrays (.npz, .npy, IDX) and Parquet files with bytes.

One reader per form, found by the suffix (`SOURCES`); each gives (row, image, value). An image stays as it was stored, a
path, the bytes of a file or pixels, until it is encoded; one that cannot be decoded is dropped there and reported.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from allyouneed.data.files.formats.arrays import divided, read_idx, read_npy, read_npz, rows_of
from allyouneed.data.files.formats.columnar import rows
from allyouneed.data.files.labels import MANY_LABELS
from allyouneed.data.files.lines import DataFile, inner_suffix
from allyouneed.data.files.readers import TABLE_SUFFIXES, Paths, Report
from allyouneed.data.files.tables import Column, TableFiles, has_columns, read_rows
from allyouneed.errors import UserError, near

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
METADATA = ("metadata.csv", "metadata.jsonl")  # of a folder of images on the Hugging Face Hub
NAMES = {  # of the columns, in order of preference; a recipe's `keys` come first
    "image": ("image", "images", "img", "file_name", "path", "x", "x_train", "data"),
    "value": ("label", "labels", "text", "caption", "y", "y_train", "fine_label", "target"),
}
COLUMNAR = (".parquet", ".arrow", ".feather")
ENCODED = ("jpeg", "png", "bytes")  # arrays of files, joined; `offsets` separate them
DAMAGED = (OSError, ValueError, EOFError, MemoryError, zlib.error)

Stored = tuple[int, Any, str]  # row, image, label or text


class LabelledImage(NamedTuple):
    """An image (a path, the bytes of a file, or pixels) with its label or its text."""

    image: Any
    value: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """What to call the image."""
        return str(self.image) if isinstance(self.image, Path) else f"{self.file}, image {self.line}"

    @property
    def label(self) -> str:
        return self.value

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def metadata(self) -> str:
        return self.value


class CaptionedImage(LabelledImage):
    """An image with its text."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def metadata(self) -> str:
        return self.name


class ImageFiles(TableFiles):
    """Images with labels or texts. A folder has a folder of images for each class, or a `metadata.csv` (or .jsonl) that
    names its images, or Parquet files; a table (.tsv, .csv, .jsonl) has paths, relative to it; .npz, .npy and IDX files
    have arrays of pixels; .parquet files have the bytes of image files."""

    examples: ClassVar[str] = "images"
    location_keys: ClassVar[tuple[str, ...]] = ("path", "labels")
    kind: Literal["images"] = "images"
    path: Paths
    """A folder, a file, or a list of them."""
    columns: Annotated[tuple[Column, ...], Field(min_length=2, max_length=2)] | None = None
    """Columns of the image and of its label or text, by index from 0 or by name; default: by `keys`, or in this
    order."""
    keys: Annotated[tuple[str, ...], Field(min_length=2, max_length=2)] | None = None  # type: ignore[assignment]
    """The same names for JSON, arrays, Parquet, and a header without `columns`; default: the usual ones (image, path,
    file_name; label, text, caption; x, y)."""
    labels: Path | None = None
    """The array of labels of a .npy or IDX file; default: the file named alike, with `labels` in place of `images`."""

    example: ClassVar[type[LabelledImage]] = LabelledImage

    def places(self) -> list[Path]:
        """Files, and folders with a folder per class, in reading order."""
        found = [source for path in self.path for source in _sources(path)]
        for source in found:
            if not source.is_dir():
                _reader(source)
        return found

    def files(self) -> list[Path]:
        files = [source for source in self.places() if not source.is_dir()]
        beside = [self._labels_of(file) for file in files if inner_suffix(file) in (".npy", "")]
        return [*files, *beside]

    def other_inputs(self) -> dict[str, Any]:
        return self.named_inputs()

    def named_inputs(self) -> dict[str, str]:
        """Names and sizes of the image files."""
        digest, count = hashlib.sha256(), 0
        for example in self.read(Report()):
            if isinstance(example.image, Path):
                size = example.image.stat().st_size if example.image.is_file() else -1
                name = f"{example.image.parent.name}/{example.image.name}"
                digest.update(f"{name} {size} {example.value}\n".encode("utf-8", "surrogateescape"))
                count += 1
        return {"images": digest.hexdigest()} if count else {}

    def read(self, report: Report) -> Iterator[LabelledImage]:
        for source in self.places():
            reader = _folder if source.is_dir() else _reader(source)
            try:
                for number, image, value in reader(self, source, report):
                    if value.strip():
                        yield self.example(image, value.strip(), str(source), number)
                    else:
                        report.drop("broken", source, number, "the label or text is empty", str(image)[:60])
            except DAMAGED as error:
                raise UserError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def name_of(self, slot: Literal["image", "value"], present: Sequence[str], file: Path) -> str:
        """The name of the images, or of their labels or texts, among those that are present."""
        wanted = NAMES[slot] if self.keys is None else (self.keys[slot == "value"],)
        for name in wanted:
            if name in present:
                return name
        listed = ", ".join(present) or "none"
        if self.keys is not None:
            raise UserError(f"{file}: no {wanted[0]!r}{near(wanted[0], present)} (there: {listed}); set keys")
        what = "images" if slot == "image" else "labels or texts"
        raise UserError(f"{file}: which of {listed} are the {what}? Set keys: [image, label]")

    def _labels_of(self, file: Path) -> Path:
        beside = file.with_name(file.name.replace("images", "labels").replace("idx3", "idx1"))
        found = self.labels or beside
        if found == file or not found.is_file():
            raise UserError(f"{file}: no labels ({found.name} is missing); set labels: FILE")
        return found


class CaptionedImages(ImageFiles):
    """Images with texts, in any of the forms of labelled images; in a folder, `photo.txt` may be the text of
    `photo.jpg`."""

    kind: Literal["captioned-images"] = "captioned-images"  # type: ignore[assignment]
    example: ClassVar[type[LabelledImage]] = CaptionedImage


def label_names(files: Iterable[ImageFiles]) -> list[str]:
    """All labels: numbers by size, others by the alphabet. Texts in the place of labels are refused."""
    counts = Counter(example.value for entry in files for example in entry.read(Report()))
    images = counts.total()
    if len(counts) < 2:
        what = f"only one class, {next(iter(counts))!r}" if counts else "no images with a label"
        raise UserError(f"data.train: {what}; give a folder with a folder for each class, or set 'columns' or 'keys'")
    if len(counts) > MANY_LABELS and len(counts) > images / 2:
        raise UserError(
            f"data.train: {len(counts):,} different labels for {images:,} images; is it the right column? Set 'columns'"
        )
    return sorted(counts, key=lambda label: (0, int(label), "") if label.isdecimal() else (1, 0, label))


# --- forms ----------------------------------------------------------------------------------------------------------


def _sources(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; check the path")
    if not path.is_dir():
        return [path]
    for name in METADATA:
        if (path / name).is_file():
            return [path / name]
    return sorted(found for found in path.rglob("*") if found.suffix in COLUMNAR) or [path]


def _folder(entry: ImageFiles, folder: Path, report: Report) -> Iterator[Stored]:
    """A folder of images for each class; or, for texts, images with a text file beside each."""
    captioned, number = isinstance(entry, CaptionedImages), 0
    for place in [folder] if captioned else sorted(path for path in folder.iterdir() if path.name[0] != "."):
        for path in sorted(place.rglob("*")) if place.is_dir() else ():
            if path.name.startswith(".") or path.is_dir() or (captioned and path.suffix == ".txt"):
                continue
            number += 1
            report.read += 1
            if path.suffix.lower() not in IMAGE_SUFFIXES:
                report.drop("not an image file", path, 0, f"a file of type {path.suffix or 'none'}", path.name)
            elif not captioned:
                yield number, path, place.name
            elif (text := path.with_suffix(".txt")).is_file():
                yield number, path, text.read_text(encoding="utf-8", errors="replace")
            else:
                report.drop("without a text", path, 0, f"no {text.name}", path.name)
    if not number:
        wanted = "images with a text file beside each" if captioned else "a folder of images for each class"
        raise UserError(f"{folder}: no images; expected {wanted}, or {' or '.join(METADATA)} with paths")


def _table(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    keys = entry.keys
    if keys is None:  # by the header, if there is one
        pairs = [(image, value) for image in NAMES["image"] for value in NAMES["value"]]
        keys = next((pair for pair in pairs if entry.columns is None and _has(file, pair)), ("image", "label"))
    layout = entry.model_copy(update={"keys": keys}).layout
    for _, number, (path, value) in read_rows([file], layout, report, keys[1]):
        yield number, file.parent / path, value


def _has(file: Path, names: Sequence[str]) -> bool:
    if inner_suffix(file) not in (".json", ".jsonl", ".ndjson"):
        return has_columns(file, names)
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
        start = opened.read(1 << 16)
    return all(json.dumps(name).encode() in start for name in names)


def _npz(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    arrays = read_npz(file)
    names = list(arrays)
    joined = next((name for name in ENCODED if name in names and "offsets" in names), None)
    images: Any = rows_of(arrays[joined or entry.name_of("image", names, file)], file)
    values = rows_of(arrays[entry.name_of("value", names, file)], file)
    classes = arrays["classes"] if "classes" in names else None
    if joined:
        content = images.tobytes()
        images = [content[begin:end] for begin, end in divided(len(content), arrays["offsets"], file)]
    yield from _rows(file, images, _texts(values, classes), report)


def _npy(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    yield from _rows(file, read_npy(file, mapped=True), _texts(read_npy(entry._labels_of(file))), report)


def _idx(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    yield from _rows(file, read_idx(file), _texts(read_idx(entry._labels_of(file))), report)


def _rows(file: Path, images: Any, values: Sequence[str], report: Report) -> Iterator[Stored]:
    if len(images) != len(values):
        raise UserError(f"{file}: {len(images):,} images but {len(values):,} labels")
    if isinstance(images, np.ndarray) and images.dtype != np.uint8:
        raise UserError(f"{file}: pixels of type {images.dtype}, expected uint8 (0 to 255)")
    for number, (image, value) in enumerate(zip(images, values, strict=True), start=1):
        report.read += 1
        yield number, image, value


def _texts(values: NDArray[Any], classes: NDArray[Any] | None = None) -> list[str]:
    listed = values.reshape(len(values), -1)[:, 0].tolist() if values.ndim > 1 else values.tolist()
    if classes is None or not all(isinstance(value, int) and 0 <= value < len(classes) for value in listed):
        return list(map(str, listed))
    return [str(classes[value]) for value in listed]


def _columnar(entry: ImageFiles, file: Path, report: Report) -> Iterator[Stored]:
    names: list[str] = []
    for number, row in enumerate(rows(DataFile(file), entry.keys or ()), start=1):
        names = names or [entry.name_of("image", list(row), file), entry.name_of("value", list(row), file)]
        image, value = (row[name] for name in names)
        report.read += 1
        if isinstance(image, Mapping):  # as Hugging Face's `datasets` writes images
            path = image.get("path")
            image = path if image.get("bytes") is None else image.get("bytes")
        image = file.parent / image if isinstance(image, str) else image
        yield number, b"" if image is None else image, "" if value is None else str(value)


Source = Callable[[ImageFiles, Path, Report], Iterator[Stored]]
SOURCES: dict[str, Source] = {
    **dict.fromkeys(TABLE_SUFFIXES, _table),
    **dict.fromkeys(COLUMNAR, _columnar),
    ".npz": _npz,
    ".npy": _npy,
}


def _reader(file: Path) -> Source:
    suffix = inner_suffix(file).lower()
    if "ubyte" in file.name:
        return _idx
    if suffix not in SOURCES:
        what = "an image; give the folder of its class's folder" if suffix in IMAGE_SUFFIXES else "not supported"
        raise UserError(f"{file}: {what}; supported: folders, {', '.join(SOURCES)} and IDX files (…-ubyte)")
    return SOURCES[suffix]
