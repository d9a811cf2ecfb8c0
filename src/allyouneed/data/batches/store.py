"""Encoded training examples on disk, built once and memory-mapped afterwards.

Each column (the ids of a text, a label) is one flat file of values and one of offsets; an example is a slice.
`meta.json` records what the store was built from (a fingerprint of input contents, configs and encoding) and its files'
sizes and checksums. A store is renamed to its final path only when complete; one whose files do not match is rebuilt or
refused, never read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from allyouneed.config import Config, parse, tree_of
from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.formats import archives
from allyouneed.data.files.lines import inner_suffix
from allyouneed.data.files.readers import Example, Files, Report
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.files import checksum, sha256, write_folder, write_text
from allyouneed.files.reading import file_in, has_file, parse_json, read_text

FORMAT = 2
CHUNK = 4096  # examples encoded together
CHARACTERS = 1 << 22  # fewer, once they hold this many characters
SAVE_AFTER = 1 << 30  # bytes hashed before their sums are saved

Progress = Callable[[int], None]


class StoredFile(Config):
    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    mtime_ns: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    sha256: str


class StoredDrops(Config):
    count: int
    examples: list[str]


class StoredReport(Config):
    read: int
    kept: int
    drops: dict[str, StoredDrops]
    truncated: int = 0


class StoreMeta(Config):
    """meta.json."""

    format: Literal[2]
    fingerprint: str
    facts: dict[str, Any]
    examples: int
    dtype: Annotated[dict[str, Literal["<u1", "<u2", "<u4", "<i2", "<f4"]], Field(min_length=1)]
    files: dict[str, StoredFile]
    report: StoredReport
    weights: list[tuple[Annotated[float, Field(gt=0)], Annotated[int, Field(gt=0)]]] | None = None
    checksum: str


@dataclass(frozen=True)
class Column:
    """One column of all examples: values concatenated, and offsets (one more than examples)."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int32]

    def __getitem__(self, index: int) -> NDArray[Any]:
        """A view of the file."""
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"example {index} of {len(self.lengths)}")
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values of these examples, concatenated."""
        return self.slices(self.offsets[indices], self.lengths[indices].astype(np.int64))

    def slices(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slices of the whole file, concatenated."""
        ends = np.cumsum(lengths)
        shift = np.repeat(begins - (ends - lengths), lengths)
        return self.values[shift + np.arange(len(shift))].astype(np.int64)


class Store:
    """An open store. `store["source"][i]` is a view of the file: token ids without BOS and EOS."""

    weights: NDArray[np.float64] | None = None  # how many times an epoch reads each example; None: once

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.fingerprint: str = meta["fingerprint"]
        self.spec: dict[str, Any] = meta["facts"]
        self.report = Report.from_tree(meta["report"])
        self.columns = {name: _open_column(folder, name, dtype) for name, dtype in meta["dtype"].items()}
        if "weights" in meta:
            self.weights = np.concatenate([np.full(count, weight, float) for weight, count in meta["weights"]])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).lengths)

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    def check(self, **tokenizers: Tokenizer) -> None:
        """Raise if the columns were encoded with other tokenizers."""
        for column, tokenizer in tokenizers.items():
            texts = self.spec.get("texts")
            if not isinstance(texts, dict) or texts.get(column) != tokenizer.hash:
                raise UserError(f"{self.folder}: was encoded with another tokenizer; rebuild it with this one")

    @classmethod
    def build(
        cls,
        folder: Path | str,
        files: Sequence[Files],
        filters: Filters,
        encoding: Encoding,
        progress: Progress | None = None,
    ) -> Store:
        """Read, filter and encode the examples into a new store, replacing one of that name.

        Examples the encoding cannot hold are dropped and reported, never truncated. `progress` receives the number
        read.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / "meta.json").exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: exists and is not a token store; choose another folder")
        fingerprint = _fingerprint(files, filters, encoding, InputHashes())
        return cls._build(folder, fingerprint, files, filters, encoding, progress)

    @classmethod
    def _build(
        cls,
        folder: Path,
        fingerprint: str,
        files: Sequence[Files],
        filters: Filters,
        encoding: Encoding,
        progress: Progress | None,
    ) -> Store:
        report = Report()
        inputs = [(path, _stamp(path)) for entry in files for path in entry.files()]

        def fill(work: Path) -> None:
            flow = filters.apply((example for entry in files for example in entry.read(report)), report)
            weights = _encode(work, flow, encoding, report, progress)
            if not report.kept:
                raise UserError(f"none of the {files[0].examples} in the data is usable\n{report.text()}")
            for path, before in inputs:
                if _stamp(path) != before:
                    raise UserError(f"{path}: changed while it was being read; run again")
            _write_meta(work, fingerprint, encoding, report, weights)

        try:
            write_folder(folder, fill)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None
        return cls.open(folder, full=False)

    @classmethod
    def open(cls, folder: Path | str, full: bool = True) -> Store:
        """Open a store; raise if a file differs from what was written, whatever its modification time says.

        `full=False`: only sizes are compared, for files that were written just now.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        for name, expected in meta["files"].items():
            path = folder / name
            if not has_file(folder, name) or file_in(folder, name).stat().st_size != expected["bytes"]:
                raise UserError(f"{path}: missing or truncated; delete {folder} and build it again")
            if full and sha256(path) != expected["sha256"]:
                raise UserError(f"{path}: changed since it was built; delete {folder} and build it again")
        try:
            return cls(folder, meta)
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(f"{folder}: damaged ({error}); delete {folder} and build it again") from None

    @classmethod
    def open_or_build(
        cls,
        cache: Path | str,
        files: Sequence[Files],
        filters: Filters,
        encoding: Encoding,
        progress: Progress | None = None,
    ) -> Store:
        """The store of exactly this data under `cache`: opened if present and intact, otherwise built."""
        cache = Path(cache)
        cache.mkdir(parents=True, exist_ok=True)
        with InputHashes(cache / "inputs.json") as hashes:
            fingerprint = _fingerprint(files, filters, encoding, hashes)
        folder = cache / fingerprint[:16]
        try:
            store = cls.open(folder)
            if store.fingerprint == fingerprint:
                return store
        except UserError:
            pass  # absent or damaged: build it
        return cls._build(folder, fingerprint, files, filters, encoding, progress)


# keys of files that older versions do not know: without them, their fingerprints stay valid
LATER_KEYS = frozenset(["header", "quotes", "bpe_dropout", "segmentations", "context", "document"]) | frozenset(
    ["encoding", "separator", "table", "query", "portion", "between"]
)


class InputHashes:
    """SHA-256 of input files, cached by path, size and times, so that large files are not hashed at every start.

    The cache is written when the `with` block ends, however it ends, and after every `SAVE_AFTER` bytes: not after
    every file, because the table is written whole."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self._unsaved = path, 0  # bytes hashed since the last write
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                loaded = parse_json(path.read_text(encoding="utf-8"))
                self.known = loaded if isinstance(loaded, dict) else {}
            except (ValueError, OSError):
                pass  # a damaged cache is ignored

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._save()

    def _save(self) -> None:
        if self._unsaved and self.path is not None:
            write_text(self.path, json.dumps(self.known, indent=1, ensure_ascii=False))
        self._unsaved = 0

    def sha256(self, file: Path) -> str:
        if (inside := archives.split(file)) is not None:  # a member: the archive, and which
            return hashlib.sha256(f"{self.sha256(inside[0])} {inside[1]}".encode()).hexdigest()
        key, stamp = str(file.resolve()), _stamp(file)
        entry = self.known.get(key)
        if isinstance(entry, dict) and entry.get("stamp") == stamp:
            return str(entry.get("sha256"))
        digest = sha256(file)
        # A file modified just now could change again within the clock's resolution and keep its stamp: do not cache.
        if time.time_ns() - stamp[1] > 2_000_000_000:
            self.known[key] = {"stamp": stamp, "sha256": digest}
            self._unsaved += stamp[0] + 1
            if self._unsaved >= SAVE_AFTER:
                self._save()
        return digest


def _stamp(file: Path) -> list[int]:
    """Size and times: a program may set back the time of modification, but not that of the last change of any kind."""
    try:
        stat = archives.on_disk(file).stat()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _fingerprint(files: Sequence[Files], filters: Filters, encoding: Encoding, hashes: InputHashes) -> str:
    if not files:
        raise UserError("no data files given")
    inputs = {
        "format": FORMAT,
        "files": [_read_as(entry, hashes) for entry in files],
        "filters": tree_of(filters),
        "encoding": [encoding.name, encoding.spec],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _read_as(entry: Files, hashes: InputHashes) -> dict[str, Any]:
    """Contents and reading options, not locations: a store can be moved to another machine."""
    kept = {key: value for key, value in tree_of(entry).items() if key not in entry.location_keys}
    kept = {key: value for key, value in kept.items() if value is not None or key not in LATER_KEYS}
    return (
        kept
        | entry.other_inputs()
        | {
            "sha256": [hashes.sha256(path) for path in entry.files()],
            "as": [*map(inner_suffix, entry.files())],
        }
    )


# --- writing -------------------------------------------------------------------------------------------------------


def _encode(
    work: Path, examples: Iterable[Example], encoding: Encoding, report: Report, progress: Progress | None
) -> list[tuple[float, int]]:
    """Write the columns. Returns run-length encoded example weights: (weight, how many in a row)."""
    weights: list[tuple[float, int]] = []
    truncated = encoding.truncated  # by earlier stores
    with ExitStack() as stack:
        writers = []
        for name, dtype in encoding.columns.items():
            both = [stack.enter_context((work / f"{name}.{what}").open("wb")) for what in ("values", "offsets")]
            writers.append(_Writer(both[0], both[1], dtype))
        for chunk in _chunks(examples, min(CHUNK, encoding.most)):
            kept: list[EncodedRow] = []
            for example, found in zip(chunk, encoding.encode(chunk), strict=True):
                if isinstance(found, Dropped):
                    report.drop(found.reason, example.file, example.line, found.detail, "\t".join(example.texts))
                else:
                    kept.append(found)
                    weight, count = getattr(example, "weight", 1.0), 0
                    if weights and weights[-1][0] == weight:
                        weight, count = weights.pop()
                    weights.append((weight, count + 1))
            for number, writer in enumerate(writers):
                writer.add([row[number] for row in kept])
            if progress is not None:
                progress(report.read)
    report.truncated = encoding.truncated - truncated
    return weights


def _chunks(examples: Iterable[Example], most: int) -> Iterator[list[Example]]:
    chunk: list[Example] = []
    held = 0
    for example in examples:
        chunk.append(example)
        held += sum(map(len, example.texts))
        if len(chunk) >= most or held >= CHARACTERS:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


class _Writer:
    def __init__(self, values: BinaryIO, offsets: BinaryIO, dtype: str) -> None:
        self.values, self.offsets, self.dtype = values, offsets, dtype
        self.end = 0
        offsets.write(np.zeros(1, dtype="<i8").tobytes())

    def add(self, rows: list[Sequence[float]]) -> None:
        ends = self.end + np.cumsum([len(row) for row in rows], dtype="<i8")
        if rows and isinstance(rows[0], np.ndarray):
            self.values.write(np.concatenate(rows).astype(self.dtype, copy=False).tobytes())
        else:
            self.values.write(np.array([n for row in rows for n in row], dtype=self.dtype).tobytes())
        self.offsets.write(ends.tobytes())
        self.end = int(ends[-1]) if rows else self.end


def _write_meta(
    work: Path, fingerprint: str, encoding: Encoding, report: Report, weights: list[tuple[float, int]]
) -> None:
    names = [f"{column}.{what}" for column in encoding.columns for what in ("values", "offsets")]
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "facts": encoding.spec,
        "examples": report.kept,
        "dtype": encoding.columns,
        "files": {
            name: {
                "bytes": (work / name).stat().st_size,
                "mtime_ns": (work / name).stat().st_mtime_ns,
                "sha256": sha256(work / name),
            }
            for name in names
        },
        "report": report.to_tree(),
        **({"weights": weights} if any(weight != 1 for weight, _ in weights) else {}),
    }
    meta["checksum"] = checksum(meta)
    write_text(work / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))


# --- reading -------------------------------------------------------------------------------------------------------


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        raise UserError(f"{folder}: no token store here (no meta.json); build it first")
    try:
        meta: dict[str, Any] = parse_json(read_text(folder, "meta.json"))
        parse(StoreMeta, meta)
        sound = meta["checksum"] == checksum(meta)
    except (ValueError, UserError):
        sound = False
    if not sound:
        raise UserError(f"{path}: damaged or from another version; delete {folder} and build it again")
    return meta


def _open_column(folder: Path, name: str, dtype: str) -> Column:
    offsets: NDArray[np.int64] = np.memmap(file_in(folder, f"{name}.offsets"), dtype="<i8", mode="r")
    path = file_in(folder, f"{name}.values")
    # an empty file cannot be mapped
    values = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(values) or (lengths < 0).any():
        raise ValueError(f"the offsets of {name} do not fit its values")
    return Column(values, offsets, lengths.astype(np.int32))
