"""Images and sounds with a label or a text: folders, tables of paths, arrays (.npz, .npy) and Parquet files with bytes.

One reader per form, found by the suffix (`SOURCES`); each gives (row, content, value). Content stays as it was stored,
a path, the bytes of a file, pixels or samples, until it is encoded; what cannot be decoded is dropped there and
reported. Kinds of media: images.py, sounds.py.
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

from numpy.typing import NDArray
from pydantic import Field

from allyouneed.data.files.formats.arrays import divided, read_npz, rows_of
from allyouneed.data.files.formats.columnar import rows
from allyouneed.data.files.labels import MANY_LABELS
from allyouneed.data.files.lines import DataFile, inner_suffix
from allyouneed.data.files.readers import TABLE_SUFFIXES, Paths, Report
from allyouneed.data.files.tables import Column, Layout, TableFiles, has_columns, read_rows
from allyouneed.errors import UserError, near

METADATA = ("metadata.csv", "metadata.jsonl")  # of a folder of images or sounds on the Hugging Face Hub
COLUMNAR = (".parquet", ".arrow", ".feather")
DAMAGED = (OSError, ValueError, EOFError, MemoryError, zlib.error)

Stored = tuple[int, Any, str]  # row, content, label or text


class LabelledMedium(NamedTuple):
    """An image (a path, the bytes of a file, or pixels) or a sound (a path, bytes, or samples and their rate), with its
    label or its text."""

    content: Any
    value: str
    file: str
    line: int
    noun: str

    @property
    def name(self) -> str:
        """What to call it."""
        return str(self.content) if isinstance(self.content, Path) else f"{self.file}, {self.noun} {self.line}"

    @property
    def place(self) -> str:
        """Its folder and file, or its file and row."""
        if isinstance(self.content, Path):
            return f"{self.content.parent.name}/{self.content.name}"
        return f"{Path(self.file).name}:{self.line}"

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


class DescribedMedium(LabelledMedium):
    """An image or a sound with its text."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def metadata(self) -> str:
        return self.name


class MediaFiles(TableFiles):
    """Images or sounds with labels or texts."""

    location_keys: ClassVar[tuple[str, ...]] = ("path", "labels")
    noun: ClassVar[str]
    article: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]  # of the files of a folder
    names_of: ClassVar[Mapping[str, tuple[str, ...]]]  # columns of `content` and `value`, in order of preference
    joined: ClassVar[tuple[str, ...]]  # arrays of everything one after the other; `offsets` separate them
    example: ClassVar[type[LabelledMedium]] = LabelledMedium
    path: Paths
    """A folder, a file, or a list of them."""
    columns: Annotated[tuple[Column, ...], Field(min_length=2, max_length=2)] | None = None
    """Columns of the image or sound and of its label or text, by index from 0 or by name; default: by `keys`, or in
    this order."""
    keys: Annotated[tuple[str, ...], Field(min_length=2, max_length=2)] | None = None  # type: ignore[assignment]
    """The same names for JSON, arrays, Parquet, and a header without `columns`; default: the usual ones."""

    @property
    def described(self) -> bool:
        """Whether a value is a text, not a label."""
        return issubclass(self.example, DescribedMedium)

    def places(self) -> list[Path]:
        """Files, and folders with a folder per class, in reading order."""
        found = [source for path in self.path for source in self.sources_of(path)]
        for source in found:
            if not source.is_dir():
                self.reader_of(source)
        return found

    def sources_of(self, path: Path) -> list[Path]:
        """What is read of a path: itself, the table of a folder, or the columnar files in it."""
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path")
        if not path.is_dir():
            return [path]
        for name in METADATA:
            if (path / name).is_file():
                return [path / name]
        return sorted(found for found in path.rglob("*") if found.suffix in COLUMNAR) or [path]

    def reader_of(self, file: Path) -> Source:
        suffix = inner_suffix(file).lower()
        if suffix not in SOURCES:
            mine = suffix in self.suffixes
            what = f"{self.article} {self.noun}; give the folder of its class's folder" if mine else "not supported"
            raise UserError(f"{file}: {what}; supported: folders, {', '.join(SOURCES)}")
        return SOURCES[suffix]

    def files(self) -> list[Path]:
        return [source for source in self.places() if not source.is_dir()]

    def other_inputs(self) -> dict[str, Any]:
        return self.named_inputs()

    def named_inputs(self) -> dict[str, str]:
        """Names and sizes of the files of images or sounds."""
        digest, count = hashlib.sha256(), 0
        for example in self.read(Report()):
            if isinstance(example.content, Path):
                size = example.content.stat().st_size if example.content.is_file() else -1
                name = f"{example.content.parent.name}/{example.content.name}"
                digest.update(f"{name} {size} {example.value}\n".encode("utf-8", "surrogateescape"))
                count += 1
        return {f"{self.noun}s": digest.hexdigest()} if count else {}

    def read(self, report: Report) -> Iterator[LabelledMedium]:
        for source in self.places():
            reader = read_folder if source.is_dir() else self.reader_of(source)
            try:
                for number, content, value in reader(self, source, report):
                    if value.strip():
                        yield self.example(content, value.strip(), str(source), number, self.noun)
                    else:
                        report.drop("broken", source, number, "the label or text is empty", str(content)[:60])
            except DAMAGED as error:
                raise UserError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def name_of(self, slot: Literal["content", "value"], present: Sequence[str], file: Path) -> str:
        """The name of the images or sounds, or of their labels or texts, among those that are present."""
        wanted = self.names_of[slot] if self.keys is None else (self.keys[slot == "value"],)
        for name in wanted:
            if name in present:
                return name
        listed = ", ".join(present) or "none"
        if self.keys is not None:
            raise UserError(f"{file}: no {wanted[0]!r}{near(wanted[0], present)} (there: {listed}); set keys")
        what = f"{self.noun}s" if slot == "content" else "labels or texts"
        raise UserError(f"{file}: which of {listed} are the {what}? Set keys: [{self.noun}, label]")

    def table_layout(self, file: Path) -> tuple[DataFile, Layout]:
        """How a table is read: columns by `keys`, or by the usual names in its header."""
        keys = self.keys
        if keys is None:  # by the header, if there is one
            pairs = [(one, value) for one in self.names_of["content"] for value in self.names_of["value"]]
            keys = next((pair for pair in pairs if self.columns is None and _has(file, pair)), (self.noun, "label"))
        return DataFile(file), self.model_copy(update={"keys": keys}).layout

    def named_file(self, folder: Path, name: str) -> Path:
        """The file that a table names."""
        return folder / name

    def from_array(self, file: Path, contents: Any, arrays: Mapping[str, Any]) -> Sequence[Any]:
        """The content of each row of an array, or of a list of joined ones."""
        raise NotImplementedError

    def from_cell(self, file: Path, value: Any) -> Any:
        """The content of a cell of a Parquet file: bytes, a path, or as Hugging Face's `datasets` writes it."""
        if isinstance(value, Mapping):
            path, found = value.get("path"), value.get("bytes")
            value = path if found is None else found
        value = file.parent / value if isinstance(value, str) else value
        return b"" if value is None else value


def label_names(files: Iterable[MediaFiles]) -> list[str]:
    """All labels: numbers by size, others by the alphabet. Texts in the place of labels are refused."""
    entries = list(files)
    counts = Counter(example.value for entry in entries for example in entry.read(Report()))
    total, nouns = counts.total(), f"{entries[0].noun}s" if entries else "examples"
    if len(counts) < 2:
        what = f"only one class, {next(iter(counts))!r}" if counts else f"no {nouns} with a label"
        raise UserError(f"data.train: {what}; give a folder with a folder for each class, or set 'columns' or 'keys'")
    if len(counts) > MANY_LABELS and len(counts) > total / 2:
        raise UserError(
            f"data.train: {len(counts):,} different labels for {total:,} {nouns}; is it the right column? Set 'columns'"
        )
    return sorted(counts, key=lambda label: (0, int(label), "") if label.isdecimal() else (1, 0, label))


# --- forms ----------------------------------------------------------------------------------------------------------


def read_folder(entry: MediaFiles, folder: Path, report: Report) -> Iterator[Stored]:
    """A folder of images or sounds for each class; or, for texts, a text file beside each."""
    described, nouns, number = entry.described, f"{entry.noun}s", 0
    for place in [folder] if described else sorted(path for path in folder.iterdir() if path.name[0] != "."):
        for path in sorted(place.rglob("*")) if place.is_dir() else ():
            if path.name.startswith(".") or path.is_dir() or (described and path.suffix == ".txt"):
                continue
            number += 1
            report.read += 1
            if path.suffix.lower() not in entry.suffixes:
                kind = f"a file of type {path.suffix or 'none'}"
                report.drop(f"not {entry.article} {entry.noun} file", path, 0, kind, path.name)
            elif not described:
                yield number, path, place.name
            elif (text := path.with_suffix(".txt")).is_file():
                yield number, path, text.read_text(encoding="utf-8", errors="replace")
            else:
                report.drop("without a text", path, 0, f"no {text.name}", path.name)
    if not number:
        wanted = f"{nouns} with a text file beside each" if described else f"a folder of {nouns} for each class"
        raise UserError(f"{folder}: no {nouns}; expected {wanted}, or {' or '.join(METADATA)} with paths")


def _table(entry: MediaFiles, file: Path, report: Report) -> Iterator[Stored]:
    table, layout = entry.table_layout(file)
    for _, number, (path, value) in read_rows([table], layout, report, layout.keys[1]):
        yield number, entry.named_file(file.parent, path), value


def _has(file: Path, names: Sequence[str]) -> bool:
    if inner_suffix(file) not in (".json", ".jsonl", ".ndjson"):
        return has_columns(file, names)
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
        start = opened.read(1 << 16)
    return all(json.dumps(name).encode() in start for name in names)


def _npz(entry: MediaFiles, file: Path, report: Report) -> Iterator[Stored]:
    arrays = read_npz(file)
    names = list(arrays)
    joined = next((name for name in entry.joined if name in names and "offsets" in names), None)
    contents: Any = rows_of(arrays[joined or entry.name_of("content", names, file)], file)
    values = rows_of(arrays[entry.name_of("value", names, file)], file)
    classes = arrays["classes"] if "classes" in names else None
    if joined:
        contents = [contents[begin:end] for begin, end in divided(len(contents), arrays["offsets"], file)]
    contents = entry.from_array(file, contents, {name: arrays[name] for name in names if arrays[name].ndim == 0})
    yield from numbered(entry, file, contents, texts_of(values, classes), report)


def numbered(
    entry: MediaFiles, file: Path, contents: Sequence[Any], values: Sequence[str], report: Report
) -> Iterator[Stored]:
    if len(contents) != len(values):
        raise UserError(f"{file}: {len(contents):,} {entry.noun}s but {len(values):,} labels")
    for number, (content, value) in enumerate(zip(contents, values, strict=True), start=1):
        report.read += 1
        yield number, content, value


def texts_of(values: NDArray[Any], classes: NDArray[Any] | None = None) -> list[str]:
    listed = values.reshape(len(values), -1)[:, 0].tolist() if values.ndim > 1 else values.tolist()
    if classes is None or not all(isinstance(value, int) and 0 <= value < len(classes) for value in listed):
        return list(map(str, listed))
    return [str(classes[value]) for value in listed]


def _columnar(entry: MediaFiles, file: Path, report: Report) -> Iterator[Stored]:
    names: list[str] = []
    for number, row in enumerate(rows(DataFile(file), entry.keys or ()), start=1):
        names = names or [entry.name_of("content", list(row), file), entry.name_of("value", list(row), file)]
        content, value = (row[name] for name in names)
        report.read += 1
        yield number, entry.from_cell(file, content), "" if value is None else str(value)


Source = Callable[[Any, Path, Report], Iterator[Stored]]
SOURCES: dict[str, Source] = {
    **dict.fromkeys(TABLE_SUFFIXES, _table),
    **dict.fromkeys(COLUMNAR, _columnar),
    ".npz": _npz,
}
