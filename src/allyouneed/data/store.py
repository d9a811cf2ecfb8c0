"""The training pairs as token ids on disk, encoded once and mapped into memory ever after.

Each side is one flat file of ids and one of offsets; a sentence is a slice. `meta.json` says what the store was made
from (a fingerprint over the contents of the inputs, the configs and the tokenizers) and what it should look like
(sizes and checksums). A store appears under its name only when it is whole, and one that no longer looks as it
should is refused or built again, never read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from allyouneed.config import tree_of
from allyouneed.data.filters import Filters
from allyouneed.data.readers import Pair, PairFiles, Report, read_pairs
from allyouneed.data.tokenizers import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.files import checksum, sha256, write_folder, write_text

FORMAT = 1
CHUNK = 4096
SIDES = ("source", "target")
MAX_TOKENS = 256

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Side:
    """One side of every pair: ids end to end, and where each sentence begins (one more offset than sentences)."""

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int32]

    def gather(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of these sentences, end to end."""
        lengths = self.lengths[indices].astype(np.int64)
        ends = np.cumsum(lengths)
        shift = np.repeat(self.offsets[indices] - (ends - lengths), lengths)
        return self.tokens[shift + np.arange(len(shift))].astype(np.int64)


class Store:
    """An opened store. `source(i)` and `target(i)` are views of the file: ids without begin and end marks."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.fingerprint: str = meta["fingerprint"]
        self.vocabularies_hash: str = meta["vocabularies"]
        self.max_tokens: int = meta["max_tokens"]
        self.report = Report.from_tree(meta["report"])
        self.sides = tuple(_open_side(folder, name, meta) for name in SIDES)
        self.source_lengths, self.target_lengths = (side.lengths for side in self.sides)

    def __len__(self) -> int:
        return len(self.source_lengths)

    def source(self, index: int) -> NDArray[Any]:
        return self._sentence(0, index)

    def target(self, index: int) -> NDArray[Any]:
        return self._sentence(1, index)

    def _sentence(self, side: int, index: int) -> NDArray[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        offsets = self.sides[side].offsets
        return self.sides[side].tokens[offsets[index] : offsets[index + 1]]

    @classmethod
    def build(
        cls,
        folder: Path | str,
        pairs: Sequence[PairFiles],
        filters: Filters,
        vocabularies: Vocabularies,
        max_tokens: int = MAX_TOKENS,
        progress: Progress | None = None,
    ) -> Store:
        """Read, filter and encode the pairs into a new store, replacing one of that name.

        `max_tokens` counts what a row will hold of either side: ids, language token and end mark. Longer pairs are
        left out and reported, never cut. `progress` is told how many pairs have been read.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / "meta.json").exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: is in the way and is no token store; give another folder")
        fingerprint = _fingerprint(pairs, filters, vocabularies, max_tokens, InputHashes())
        return cls._build(folder, fingerprint, pairs, filters, vocabularies, max_tokens, progress)

    @classmethod
    def _build(
        cls,
        folder: Path,
        fingerprint: str,
        pairs: Sequence[PairFiles],
        filters: Filters,
        vocabularies: Vocabularies,
        max_tokens: int,
        progress: Progress | None,
    ) -> Store:
        report = Report()
        inputs = [(path, _stamp(path)) for entry in pairs for path in entry.files()]

        def fill(work: Path) -> None:
            flow = filters.apply((pair for entry in pairs for pair in read_pairs(entry, report)), report)
            _encode(work, flow, vocabularies, max_tokens, report, progress)
            if not report.kept:
                raise UserError(f"no usable pair in the data\n{report.text()}")
            for path, before in inputs:
                if _stamp(path) != before:
                    raise UserError(f"{path}: changed while it was being read; start again")
            _write_meta(work, fingerprint, vocabularies, max_tokens, report)

        try:
            write_folder(folder, fill)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from None
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path | str, full: bool = False) -> Store:
        """Open a store; refuse one whose files are not as written.

        Sizes are always compared. Checksums are, too, when `full` is asked for or a file was touched since.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        for name, facts in meta["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != facts["bytes"]:
                raise UserError(f"{path}: missing or not of the size written; delete {folder} and build it again")
            touched = path.stat().st_mtime_ns != facts["mtime_ns"]
            if (full or touched) and sha256(path) != facts["sha256"]:
                raise UserError(f"{path}: its content changed since it was built; delete {folder} and build it again")
        return cls(folder, meta)

    @classmethod
    def ensure(
        cls,
        cache: Path | str,
        pairs: Sequence[PairFiles],
        filters: Filters,
        vocabularies: Vocabularies,
        max_tokens: int = MAX_TOKENS,
        progress: Progress | None = None,
    ) -> Store:
        """The store of exactly this data in the folder `cache`: opened if it is there and sound, built if not."""
        cache = Path(cache)
        cache.mkdir(parents=True, exist_ok=True)
        hashes = InputHashes(cache / "inputs.json")
        fingerprint = _fingerprint(pairs, filters, vocabularies, max_tokens, hashes)
        folder = cache / fingerprint[:16]
        try:
            store = cls.open(folder)
            if store.fingerprint == fingerprint:
                return store
        except UserError:
            pass  # absent or damaged: what is in the way is replaced by a sound one
        return cls._build(folder, fingerprint, pairs, filters, vocabularies, max_tokens, progress)


class InputHashes:
    """SHA-256 of input files, remembered by path, size and time of change: gigabytes are not read at every start."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                loaded = json.loads(path.read_text(encoding="utf-8"))
                self.known = loaded if isinstance(loaded, dict) else {}
            except ValueError:
                pass  # only a memory of work done: forget it

    def of(self, file: Path) -> str:
        key, stamp = str(file.resolve()), _stamp(file)
        entry = self.known.get(key)
        if isinstance(entry, dict) and entry.get("stamp") == stamp:
            return str(entry["sha256"])
        digest = sha256(file)
        # A file changed a moment ago may change again within the clock's grain and look the same; do not trust it yet.
        if time.time_ns() - stamp[1] > 2_000_000_000:
            self.known[key] = {"stamp": stamp, "sha256": digest}
            if self.path is not None:
                write_text(self.path, json.dumps(self.known, indent=1, ensure_ascii=False))
        return digest


def _stamp(file: Path) -> list[int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns]


def _fingerprint(
    pairs: Sequence[PairFiles], filters: Filters, vocabularies: Vocabularies, max_tokens: int, hashes: InputHashes
) -> str:
    if not pairs:
        raise UserError("no data files are given")
    facts = {
        "format": FORMAT,
        "pairs": [tree_of(entry) | {"sha256": [hashes.of(path) for path in entry.files()]} for entry in pairs],
        "filters": tree_of(filters),
        "vocabularies": vocabularies.hash,
        "max_tokens": max_tokens,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# --- writing -------------------------------------------------------------------------------------------------------


def _encode(
    work: Path,
    pairs: Iterable[Pair],
    vocabularies: Vocabularies,
    max_tokens: int,
    report: Report,
    progress: Progress | None,
) -> None:
    tokenizers = (vocabularies.source, vocabularies.target)
    flow = iter(pairs)
    with ExitStack() as stack:
        names = [f"{side}.{what}" for side in SIDES for what in ("tokens", "offsets")]
        files = [stack.enter_context((work / name).open("wb")) for name in names]
        writers = [_Writer(files[2 * n], files[2 * n + 1], _dtype(tokenizer)) for n, tokenizer in enumerate(tokenizers)]
        while chunk := list(islice(flow, CHUNK)):
            kept = list(_within(chunk, tokenizers, max_tokens, report))
            for side, writer in enumerate(writers):
                writer.add([both[side] for both in kept])
            if progress is not None:
                progress(report.read)


def _within(
    chunk: list[Pair], tokenizers: tuple[Tokenizer, Tokenizer], max_tokens: int, report: Report
) -> Iterator[tuple[list[int], list[int]]]:
    sources = tokenizers[0].encode_batch([pair.source for pair in chunk])
    targets = tokenizers[1].encode_batch([pair.target for pair in chunk])
    for pair, source, target in zip(chunk, sources, targets, strict=True):
        if pair.to is not None:
            source = [tokenizers[0].language(pair.to), *source]
        longest = max(len(source), len(target)) + 1
        if longest > max_tokens:
            detail = f"{longest} tokens with the end mark, at most {max_tokens}"
            report.drop("too many tokens", pair.file, pair.line, detail, f"{pair.source}\t{pair.target}")
        else:
            yield source, target


class _Writer:
    def __init__(self, tokens: BinaryIO, offsets: BinaryIO, dtype: str) -> None:
        self.tokens, self.offsets, self.dtype = tokens, offsets, dtype
        self.end = 0
        offsets.write(np.zeros(1, dtype="<i8").tobytes())

    def add(self, sentences: list[list[int]]) -> None:
        ends = self.end + np.cumsum([len(sentence) for sentence in sentences], dtype="<i8")
        self.tokens.write(np.array([n for sentence in sentences for n in sentence], dtype=self.dtype).tobytes())
        self.offsets.write(ends.tobytes())
        self.end = int(ends[-1]) if sentences else self.end


def _dtype(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.size <= 1 << 16 else "<u4"


def _write_meta(work: Path, fingerprint: str, vocabularies: Vocabularies, max_tokens: int, report: Report) -> None:
    names = [f"{side}.{what}" for side in SIDES for what in ("tokens", "offsets")]
    meta = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "vocabularies": vocabularies.hash,
        "max_tokens": max_tokens,
        "pairs": report.kept,
        "dtype": {side: _dtype(getattr(vocabularies, side)) for side in SIDES},
        "files": {
            name: {
                "bytes": (work / name).stat().st_size,
                "mtime_ns": (work / name).stat().st_mtime_ns,
                "sha256": sha256(work / name),
            }
            for name in names
        },
        "report": report.to_tree(),
    }
    meta["checksum"] = checksum(meta)
    write_text(work / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False))


# --- reading -------------------------------------------------------------------------------------------------------


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        raise UserError(f"{folder}: no token store here (no meta.json); build it first")
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sound = meta["checksum"] == checksum(meta) and meta["format"] == FORMAT
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: damaged or of another version; delete {folder} and build it again")
    return meta


def _open_side(folder: Path, name: str, meta: dict[str, Any]) -> Side:
    offsets: NDArray[np.int64] = np.fromfile(folder / f"{name}.offsets", dtype="<i8")
    dtype, path = np.dtype(meta["dtype"][name]), folder / f"{name}.tokens"
    # An empty file cannot be mapped: a side all of whose sentences are empty has one.
    tokens = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
    return Side(tokens, offsets, np.diff(offsets).astype(np.int32))
