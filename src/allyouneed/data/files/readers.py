"""Read examples from files one at a time; every line that is left out is reported.

Unusable lines are counted in a `Report` with file and line number; an
unusable file (missing, empty, truncated, misaligned) is a `UserError`.

Kinds of `Files`: pairs.py, texts.py, labels.py. Lines: lines.py. Cells of a line: tables.py.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from allyouneed.config import Part
from allyouneed.data.files.formats import archives
from allyouneed.data.files.formats import read as formats
from allyouneed.data.files.formats.encodings import is_encoding
from allyouneed.data.files.lines import DataFile, as_data_file, decode_utf8, inner_suffix, raw_lines
from allyouneed.errors import UserError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
OBJECT_SUFFIXES = (*JSON_SUFFIXES, *formats.OBJECTS)
CELL_SUFFIXES = (".tsv", ".csv", *formats.CELLS)
TABLE_SUFFIXES = (*CELL_SUFFIXES, ".txt", *OBJECT_SUFFIXES)
LINE_SUFFIXES = (".txt", "")
# common formats that would otherwise be read as megabytes of broken lines
FOREIGN_SUFFIXES = (".bz2", ".xz", ".7z", ".rar", ".xls", ".ods", ".docx", ".pdf")
DATASET_FILES = ("dataset_info.json", "state.json", "dataset_dict.json")  # of a Hugging Face dataset on disk


def _as_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


def _check_encoding(name: str) -> str:
    if not is_encoding(name):
        raise ValueError(f"unknown encoding {name!r}; examples: gb18030, big5, shift_jis, cp1252, utf-16")
    return name


Encoded = Annotated[str, AfterValidator(_check_encoding)]
Separator = Annotated[str, Field(min_length=1, max_length=8, pattern=r"^[^\r\n]*$")]


def _check_portion(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] < bounds[1] <= 1:
        raise ValueError(f"[from, to] within 0 and 1, not {list(bounds)}")
    return bounds


Portion = Annotated[tuple[float, float], AfterValidator(_check_portion)]
Paths = Annotated[tuple[Path, ...], Field(min_length=1), BeforeValidator(_as_paths)]


@dataclass
class Drops:
    """How many lines were dropped for one reason, and the first few of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Report:
    """How many examples were read and dropped, by readers, filters and the store."""

    read: int = 0
    drops: dict[str, Drops] = field(default_factory=dict)
    truncated: int = 0  # examples that are kept with a part of their source
    show: int = 5  # examples kept per reason

    @property
    def dropped(self) -> int:
        return sum(drops.count for drops in self.drops.values())

    @property
    def kept(self) -> int:
        return self.read - self.dropped

    @property
    def broken(self) -> int:
        return self.drops["broken"].count if "broken" in self.drops else 0

    def drop(self, reason: str, file: Path | DataFile | str, line: int, detail: str, text: str) -> None:
        """Count one dropped line under `reason`; `detail` describes this line."""
        drops = self.drops.setdefault(reason, Drops())
        drops.count += 1
        if len(drops.examples) < self.show:
            shown = text if len(text) <= 60 else text[:60] + "…"
            drops.examples.append(f"{file}:{line}: {detail}: {shown!r}")

    def text(self) -> str:
        lines = [f"{self.read:,} read, {self.kept:,} kept, {self.dropped:,} left out"]
        lines += [f"  source truncated to data.max_tokens: {self.truncated:,}"] if self.truncated else []
        for reason, drops in self.drops.items():
            lines.append(f"  {reason}: {drops.count:,}")
            lines += [f"    {example}" for example in drops.examples]
            if drops.count > len(drops.examples):
                lines.append(f"    … and {drops.count - len(drops.examples):,} more")
        return "\n".join(lines)

    def to_tree(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "kept": self.kept,
            "drops": {reason: vars(drops) for reason, drops in self.drops.items()},
        } | ({"truncated": self.truncated} if self.truncated else {})

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Report:
        drops = {reason: Drops(**drops) for reason, drops in tree["drops"].items()}
        return cls(tree["read"], drops, tree.get("truncated", 0))


class Example(Protocol):
    """Something to train or evaluate on, and where it was read."""

    @property
    def file(self) -> str: ...

    @property
    def line(self) -> int: ...

    @property
    def texts(self) -> tuple[str, ...]:
        """All its texts, in column order."""

    @property
    def metadata(self) -> str:
        """What distinguishes it from an example with the same texts: a label, a language."""


class Files(Part, slot="kind of files"):
    """Files of examples. A task defines which kind it reads; a bare string is a path."""

    examples: ClassVar[str]  # what to call them, plural
    has_two_texts: ClassVar[bool] = False  # each example has two comparable texts
    location_keys: ClassVar[tuple[str, ...]] = ("path",)  # keys that locate files and do not affect how they are read
    encoding: Encoded | None = None
    """Encoding of a text file, such as gb18030; default: UTF-8."""
    separator: Separator | None = None
    """What separates cells; default: by the suffix, a tab or, in .csv, the most frequent of comma, semicolon, tab and
    `|`."""
    table: Annotated[str, Field(min_length=1)] | None = None
    """Sheet of an .xlsx file, or table of an SQLite file; default: the only one."""
    query: Annotated[str, Field(min_length=1)] | None = None
    """SQL that selects the rows of an SQLite file, instead of `table`."""
    portion: Portion | None = None
    """Which part of the examples to read: [0, 0.9] and [0.9, 1] split a file, always in the same way; equal texts stay
    together."""

    @classmethod
    def __pydantic_init_subclass__(cls, slot: str = "", default: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(slot, default, **kwargs)
        if "read" in vars(cls):
            cls.read = _by_portion(cls.read)  # type: ignore[method-assign, assignment]

    @model_validator(mode="before")
    @classmethod
    def _plain_word_is_a_path(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str | Path) else data

    @abstractmethod
    def files(self) -> list[Path]:
        """All files, in reading order."""

    def opened(self, path: Path) -> DataFile:
        """A file with what these keys say of its format."""
        return DataFile(path, self.encoding, self.separator, self.table, self.query)

    def sources(self) -> list[DataFile]:
        """All files with what these keys say of their format."""
        return [self.opened(path) for path in self.files()]

    @property
    def direction(self) -> tuple[str | None, str] | None:
        """Source and target language of examples for multilingual translators."""
        return None

    def other_inputs(self) -> dict[str, Any]:
        """What the examples depend on besides these files and the keys: files that they name."""
        return {}

    def named_inputs(self) -> dict[str, str]:
        """Digests of files that these name, to be recorded with the checksums of a run."""
        return {}

    @abstractmethod
    def read(self, report: Report) -> Iterator[Any]:
        """All usable examples; the others are reported."""


def _by_portion(read: Callable[[Any, Report], Iterator[Any]]) -> Callable[[Any, Report], Iterator[Any]]:
    """`read`, with the examples of the portion only."""

    @wraps(read)
    def reading(files: Any, report: Report) -> Iterator[Any]:
        if files.portion is None:
            return read(files, report)
        return _in_portion(read(files, report), files.portion, report)

    return reading


def _in_portion(examples: Iterator[Any], bounds: tuple[float, float], report: Report) -> Iterator[Any]:
    low, high = bounds
    for example in examples:
        if low <= position(example) < high:
            yield example
        else:
            report.read -= 1


def position(example: Example) -> float:
    """A number in [0, 1) that depends on nothing but the texts, or on the place of an example without any, or of an
    image or a sound, whose text many others may share."""
    texts = getattr(example, "place", None) or "\x1f".join(example.texts)
    key = texts if texts.strip("\x1f") else f"{Path(example.file).name}:{example.line}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / (1 << 48)


def expand_paths(paths: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Files unchanged; directories, archives and patterns (`*`) expanded to their shards, sorted by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _shards(path, suffixes)
        elif archives.is_archive(path) and path.is_file():
            files += _checked(archives.members(path), path, suffixes)
        elif archives.split(path) is not None:
            files.append(path)
        elif "*" in path.name and not path.exists() and (found := sorted(path.parent.glob(path.name))):
            files += _checked(found, path.parent, suffixes)
        elif not path.exists():
            raise UserError(f"{path}: no such file or directory; check the path")
        elif not path.is_file():
            raise UserError(f"{path}: not a regular file; the data is read more than once, save it to a file first")
        elif path.suffix.lower() in FOREIGN_SUFFIXES:
            raise UserError(
                f"{path}: {path.suffix} files are not supported; convert to .tsv, .csv, .xlsx, .txt or .jsonl"
            )
        else:
            files.append(path)
    return files


def _shards(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    known = ", ".join(suffix or "no suffix" for suffix in suffixes)
    shards = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    if not shards:
        raise UserError(f"{folder}: the directory is empty; put shards there ({known}, plain or .gz, .zst)")
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(path.name for path in shards if path.is_dir())
        raise UserError(f"{folder}: a dataset of several splits ({splits}); name the folder of one, {folder}/train")
    return _checked([path for path in shards if path.name not in DATASET_FILES], folder, suffixes)


def _checked(shards: list[Path], folder: Path, suffixes: Sequence[str]) -> list[Path]:
    known = ", ".join(suffix or "no suffix" for suffix in suffixes)
    for shard in shards:
        if shard.is_dir() or inner_suffix(shard) not in suffixes:
            what = "a directory" if shard.is_dir() else f"a file of unknown type {shard.suffix!r}"
            raise UserError(
                f"{shard}: {what} among the shards; supported: {known} (plain or .gz, .zst). "
                "Move it away, or list the files to read"
            )
    return shards


def join_paths(paths: Iterable[Path] | None) -> str:
    return ", ".join(str(path) for path in paths or ())


# --- bytes to lines ------------------------------------------------------------------------------------------------


def read_text(path: Path | DataFile, report: Report, skip: int = 0) -> Iterator[tuple[int, str]]:
    """Every valid UTF-8 line after the first `skip`, with its line number; the others are reported."""
    for number, raw in islice(enumerate(raw_lines(path), start=1), skip, None):
        report.read += 1
        text = decode_utf8(raw)
        if text is None:
            report.drop("broken", path, number, as_data_file(path).not_text, raw.decode("utf-8", "backslashreplace"))
        else:
            yield number, text
