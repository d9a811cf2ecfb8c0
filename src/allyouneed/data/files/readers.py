"""Read examples from files one at a time; every line that is left out is reported.

Unusable lines are counted in a `Report` with file and line number; an
unusable file (missing, empty, truncated, misaligned) is a `UserError`.

Kinds of `Files`: pairs.py, texts.py, labels.py. Lines: lines.py. Cells of a line: tables.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BeforeValidator, Field, model_validator

from allyouneed.config import Part
from allyouneed.data.files.lines import decode_utf8, inner_suffix, raw_lines
from allyouneed.errors import UserError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".tsv", ".csv", ".txt", *JSON_SUFFIXES)
LINE_SUFFIXES = (".txt", "")
# common formats that would otherwise be read as megabytes of broken lines
FOREIGN_SUFFIXES = (".zip", ".bz2", ".xz", ".7z", ".tar", ".tgz", ".parquet", ".xlsx", ".xls", ".arrow", ".pdf")


def _as_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


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

    def drop(self, reason: str, file: Path | str, line: int, detail: str, text: str) -> None:
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

    @model_validator(mode="before")
    @classmethod
    def _plain_word_is_a_path(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str | Path) else data

    @abstractmethod
    def files(self) -> list[Path]:
        """All files, in reading order."""

    @property
    def direction(self) -> tuple[str | None, str] | None:
        """Source and target language of examples for multilingual translators."""
        return None

    def other_inputs(self) -> dict[str, Any]:
        """What the examples depend on besides these files and the keys: files that they name."""
        return {}

    @abstractmethod
    def read(self, report: Report) -> Iterator[Any]:
        """All usable examples; the others are reported."""


def expand_paths(paths: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Files unchanged; directories expanded to their shards, sorted by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _shards(path, suffixes)
        elif not path.exists():
            raise UserError(f"{path}: no such file or directory; check the path")
        elif not path.is_file():
            raise UserError(f"{path}: not a regular file; the data is read more than once, save it to a file first")
        elif path.suffix.lower() in FOREIGN_SUFFIXES:
            raise UserError(f"{path}: {path.suffix} files are not supported; convert to .tsv, .csv, .txt or .jsonl")
        else:
            files.append(path)
    return files


def _shards(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    known = ", ".join(suffix or "no suffix" for suffix in suffixes)
    shards = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    if not shards:
        raise UserError(f"{folder}: the directory is empty; put shards there ({known}, plain or .gz, .zst)")
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


def read_text(path: Path, report: Report, skip: int = 0) -> Iterator[tuple[int, str]]:
    """Every valid UTF-8 line after the first `skip`, with its line number; the others are reported."""
    for number, raw in islice(enumerate(raw_lines(path), start=1), skip, None):
        report.read += 1
        text = decode_utf8(raw)
        if text is None:
            report.drop("broken", path, number, "not UTF-8", raw.decode("utf-8", "backslashreplace"))
        else:
            yield number, text
