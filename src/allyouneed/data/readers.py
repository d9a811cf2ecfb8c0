"""Sentence pairs and lines out of whatever files people have, one at a time and nothing lost without a word.

A file is a stream of bytes (plain, gzip, zstd) cut at `\\n` and only there: U+2028 or a vertical tab inside a sentence
must not shift every later line of an aligned file. What cannot be used is counted in a `Report` with its file and
line; what makes the whole file useless (missing, empty, truncated, unequal) is a `UserError`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, StringConstraints, model_validator

from allyouneed.config import Config
from allyouneed.errors import UserError

PAIR_SUFFIXES = (".tsv", ".txt", ".jsonl", ".ndjson")
LINE_SUFFIXES = (".txt", "")
JSON_SUFFIXES = (".jsonl", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst")
# Formats people do have and that would otherwise be read as megabytes of broken lines.
FOREIGN_SUFFIXES = (".zip", ".bz2", ".xz", ".7z", ".tar", ".tgz", ".parquet", ".xlsx", ".xls", ".arrow", ".pdf")
CHUNK = 1 << 18


def _as_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


Paths = Annotated[tuple[Path, ...], Field(min_length=1), BeforeValidator(_as_paths)]
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


@dataclass
class Drops:
    """How many were left out for one reason, and the first few of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What was read and what became of it. Readers count, filters and the store subtract."""

    read: int = 0
    drops: dict[str, Drops] = field(default_factory=dict)
    show: int = 5  # examples remembered per reason

    @property
    def dropped(self) -> int:
        return sum(drops.count for drops in self.drops.values())

    @property
    def kept(self) -> int:
        return self.read - self.dropped

    @property
    def broken(self) -> int:
        return self.drops["broken"].count if "broken" in self.drops else 0

    def drop(self, why: str, file: Path | str, line: int, detail: str, text: str) -> None:
        """Count one left-out line under `why`; `detail` says what is wrong with this very one."""
        drops = self.drops.setdefault(why, Drops())
        drops.count += 1
        if len(drops.examples) < self.show:
            shown = text if len(text) <= 60 else text[:60] + "…"
            drops.examples.append(f"{file}:{line}: {detail}: {shown!r}")

    def text(self) -> str:
        lines = [f"{self.read:,} read, {self.kept:,} kept, {self.dropped:,} left out"]
        for why, drops in self.drops.items():
            lines.append(f"  {why}: {drops.count:,}")
            lines += [f"    {example}" for example in drops.examples]
            if drops.count > len(drops.examples):
                lines.append(f"    … and {drops.count - len(drops.examples):,} more")
        return "\n".join(lines)

    def to_tree(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "drops": {why: vars(drops) for why, drops in self.drops.items()}}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Report:
        return cls(tree["read"], {why: Drops(**drops) for why, drops in tree["drops"].items()})


class Pair(NamedTuple):
    """Two sentences, where they stood, and the language to translate into when the model must be told."""

    source: str
    target: str
    file: str
    line: int
    to: str | None = None


class PairFiles(Config):
    """Where sentence pairs lie: `path` (both sides in one file) or `source` and `target` (aligned line by line)."""

    path: Paths | None = None
    source: Paths | None = None
    target: Paths | None = None
    columns: tuple[NonNegativeInt, NonNegativeInt] | None = None
    keys: tuple[str, str] = ("source", "target")
    from_: Tag | None = Field(default=None, alias="from")
    to: Tag | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_word_is_a_path(cls, data: Any) -> Any:
        return {"path": data} if isinstance(data, str | Path) else data

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        together, apart = self.path is not None, (self.source is not None, self.target is not None)
        if together == any(apart) or any(apart) != all(apart):
            raise ValueError("give either 'path' (pairs in one file) or both 'source' and 'target' (aligned files)")
        if self.columns is not None and not together:
            raise ValueError("'columns' chooses columns of a TSV given by 'path'; aligned files have none")
        return self

    def files(self) -> list[Path]:
        """Every file that will be read, in reading order."""
        if self.path is not None:
            return expand(self.path, PAIR_SUFFIXES)
        return [path for both in self._aligned() for path in both]

    def _aligned(self) -> list[tuple[Path, Path]]:
        left, right = expand(self.source or (), LINE_SUFFIXES), expand(self.target or (), LINE_SUFFIXES)
        if len(left) != len(right):
            raise UserError(
                f"{_names(self.source)} is {len(left)} file(s) but {_names(self.target)} is {len(right)}; "
                "aligned files come in equal numbers, in the same order"
            )
        return list(zip(left, right, strict=True))


def read_pairs(config: PairFiles, report: Report) -> Iterator[Pair]:
    """Every usable pair of the files; the others are in the report."""
    if config.path is None:
        for left, right in config._aligned():
            yield from _read_aligned(left, right, report, config.to)
        return
    for file in expand(config.path, PAIR_SUFFIXES):
        split = _split_json if _inner_suffix(file) in JSON_SUFFIXES else _split_columns
        for number, text in _read_text(file, report):
            found = split(text, config)
            if isinstance(found, str):
                report.drop("broken", file, number, found, text)
            else:
                yield Pair(*found, str(file), number, config.to)


def read_lines(paths: str | Path | Sequence[str | Path], report: Report | None = None) -> Iterator[str]:
    """Every usable line of monolingual text, with the same manners as `read_pairs`."""
    report = Report() if report is None else report
    for file in expand([Path(path) for path in _as_paths(paths)], LINE_SUFFIXES):
        for _, text in _read_text(file, report):
            yield text


def expand(paths: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Files as they are; directories as their shards, by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _shards(path, suffixes)
        elif not path.exists():
            raise UserError(f"{path}: no such file or directory; check the path")
        elif not path.is_file():
            raise UserError(f"{path}: not a regular file; the data is read more than once, save it to a file first")
        elif path.suffix.lower() in FOREIGN_SUFFIXES:
            raise UserError(f"{path}: {path.suffix} files cannot be read; unpack or convert to .tsv, .txt or .jsonl")
        else:
            files.append(path)
    return files


def _shards(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    known = ", ".join(suffix or "no suffix" for suffix in suffixes)
    shards = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    if not shards:
        raise UserError(f"{folder}: the directory holds no files; put shards there ({known}, plain or .gz, .zst)")
    for shard in shards:
        if shard.is_dir() or _inner_suffix(shard) not in suffixes:
            what = "a directory" if shard.is_dir() else f"a file of unknown kind {shard.suffix!r}"
            raise UserError(
                f"{shard}: {what} among the shards; known are {known} (plain or .gz, .zst). "
                "Move it away, or list the files to read one by one"
            )
    return shards


def _inner_suffix(path: Path) -> str:
    """`.tsv` of `a.tsv.gz`."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in PACKED_SUFFIXES else suffix


def _names(paths: Iterable[Path] | None) -> str:
    return ", ".join(str(path) for path in paths or ())


# --- from bytes to lines -------------------------------------------------------------------------------------------


def _read_text(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(raw_lines(path), start=1):
        report.read += 1
        text = _decode(raw)
        if text is None:
            report.drop("broken", path, number, "not UTF-8", raw.decode("utf-8", "backslashreplace"))
        else:
            yield number, text


def _read_aligned(left: Path, right: Path, report: Report, to: str | None) -> Iterator[Pair]:
    sources, targets = raw_lines(left), raw_lines(right)
    number = 0
    while True:
        source, target = next(sources, None), next(targets, None)
        if source is None or target is None:
            break
        number += 1
        report.read += 1
        here, there = _decode(source), _decode(target)
        if here is None or there is None:
            file, raw = (left, source) if here is None else (right, target)
            report.drop("broken", file, number, "not UTF-8", raw.decode("utf-8", "backslashreplace"))
        else:
            yield Pair(here, there, str(left), number, to)
    if source is not None or target is not None:
        counts = [
            number + (line is not None) + sum(1 for _ in rest) for line, rest in ((source, sources), (target, targets))
        ]
        raise UserError(
            f"{left} has {counts[0]} lines but {right} has {counts[1]}; aligned files must match line by line"
        )


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file without their ends and without the byte order mark of its beginning."""
    first, rest = True, b""
    for chunk in _chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield _trim(line, path, first)
            first = False
    if rest:
        yield _trim(rest, path, first)
    elif first:
        raise UserError(f"{path}: the file is empty; remove it from the data or make it again")


def _trim(line: bytes, path: Path, first: bool) -> bytes:
    if first:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError(f"{path}: this is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`")
        line = line.removeprefix(b"\xef\xbb\xbf")
    return line.removesuffix(b"\r")


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _chunks(path: Path) -> Iterator[bytes]:
    packed = path.suffix.lower()
    damaged = f"{path}: the {packed} file is truncated or damaged; download or compress it again"
    try:
        with path.open("rb") as file:
            if packed == ".zst":
                yield from _unzstd(file, damaged)
                return
            stream = gzip.GzipFile(fileobj=file) if packed == ".gz" else file
            while chunk := stream.read(CHUNK):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(damaged) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _unzstd(file: BinaryIO, damaged: str) -> Iterator[bytes]:
    """Frame after frame. The library's own stream reader takes a cut-off file for a finished one; `eof` tells."""
    import zstandard

    unpacker, inside = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), False
    while chunk := file.read(CHUNK):
        while chunk:
            try:
                yield unpacker.decompress(chunk)
            except zstandard.ZstdError:
                raise UserError(damaged) from None
            inside, chunk = not unpacker.eof, unpacker.unused_data
            if unpacker.eof:
                unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    if inside:
        raise UserError(damaged)


# --- from a line to a pair: two texts, or the reason why not -------------------------------------------------------


def _split_columns(text: str, config: PairFiles) -> tuple[str, str] | str:
    cells = text.split("\t")
    if config.columns is None:
        if len(cells) == 2:
            return cells[0], cells[1]
        hint = "; choose two with 'columns'" if len(cells) > 2 else " separated by a tab"
        return f"{len(cells)} column(s) where 2 are expected{hint}"
    if len(cells) <= max(config.columns):
        return f"{len(cells)} column(s), no column {max(config.columns)} (counted from 0)"
    return cells[config.columns[0]], cells[config.columns[1]]


def _split_json(text: str, config: PairFiles) -> tuple[str, str] | str:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(entry, dict):
        return f"a JSON {type(entry).__name__} where an object is expected"
    for key in config.keys:
        if key not in entry:
            return f"no key {key!r}; there are: {', '.join(map(repr, entry)) or 'none'}"
        if not isinstance(entry[key], str):
            return f"{key!r} is not a string but {type(entry[key]).__name__}"
        if not _is_unicode(entry[key]):
            return f"{key!r} holds half a surrogate pair, which is no character"
    return entry[config.keys[0]], entry[config.keys[1]]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
