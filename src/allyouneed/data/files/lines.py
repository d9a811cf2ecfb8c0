"""Lines of a file: a byte stream (plain, gzip, zstd) split at `\\n` only, so that U+2028 or a vertical tab inside a
sentence does not shift the later lines of an aligned file."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from allyouneed.errors import UserError

PACKED_SUFFIXES = (".gz", ".zst")
CHUNK = 1 << 18
PACKED_CHUNK = 1 << 12  # bytes of zstd, which become up to 32,000 times as many at once
MAX_LINE = 1 << 24  # bytes: a longer one is no text of a file of texts, and takes a hundred times its size to encode


@dataclass(frozen=True)
class DataFile:
    """A file, or a member of an archive, and how it is read: see `Files`."""

    path: Path
    encoding: str | None = None
    separator: str | None = None
    table: str | None = None
    query: str | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def not_text(self) -> str:
        """What is wrong with a line that cannot be decoded."""
        from allyouneed.data.files.formats.encodings import misfit

        return misfit(self.path, self.encoding)


def as_data_file(file: Path | DataFile) -> DataFile:
    return file if isinstance(file, DataFile) else DataFile(file)


def inner_suffix(file: Path | DataFile) -> str:
    """`.tsv` of `a.tsv.gz`."""
    path = as_data_file(file).path
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix in PACKED_SUFFIXES else suffix


def raw_lines(path: Path | DataFile, keep_returns: bool = False) -> Iterator[bytes]:
    """Lines without their terminators and without a leading byte order mark. `keep_returns`: without `\\n` only; a last
    line without a terminator gets the `\\r` of the line before."""
    first, rest, number, returns = True, b"", 1, False
    for chunk in read_chunks(path):
        text = rest + chunk
        *lines, rest = text.split(b"\n")
        if keep_returns:
            returns = lines[-1].endswith(b"\r") if lines else returns
        elif b"\r" in text:
            lines = [line.removesuffix(b"\r") for line in lines]
        if first and lines:
            lines[0], first = without_mark(lines[0], str(path)), False
        for passed, line in enumerate(lines):
            if len(line) > MAX_LINE:
                _check_length(line, path, number + passed)
            yield line
        number += len(lines)
        _check_length(rest, path, number)
    if rest:
        rest = rest + b"\r" * returns if keep_returns else rest.removesuffix(b"\r")
        yield without_mark(rest, str(path)) if first else rest
    elif first:
        raise UserError(f"{path}: the file is empty; remove it from the data or create it again")


def trim_lines(lines: Iterable[bytes], name: str, keep_returns: bool = False) -> Iterator[bytes]:
    """The same of lines that come from elsewhere."""
    first = True
    for number, line in enumerate(lines, start=1):
        _check_length(line, name, number)
        line = line.removesuffix(b"\n")
        line = line if keep_returns else line.removesuffix(b"\r")
        yield without_mark(line, name) if first else line
        first = False


def _check_length(line: bytes, file: Path | DataFile | str, number: int) -> None:
    if len(line) > MAX_LINE:
        raise UserError(
            f"{file}:{number}: a line of more than {MAX_LINE >> 20} MiB; a text is a line, so break it into lines"
        )


def without_mark(line: bytes, name: str) -> bytes:
    """The first line of a file without its byte order mark."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{name}: this is UTF-16; convert it with `iconv -f UTF-16 -t UTF-8`, or set encoding: utf-16")
    return line.removeprefix(b"\xef\xbb\xbf")


def decode_utf8(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def read_chunks(path: Path | DataFile) -> Iterator[bytes]:
    """Decompressed content in chunks; text of another encoding as UTF-8."""
    file = as_data_file(path)
    chunks = _unpacked(file.path)
    if file.encoding is None:
        return chunks
    from allyouneed.data.files.formats.encodings import as_utf8

    return as_utf8(chunks, file.encoding)


def _unpacked(path: Path) -> Iterator[bytes]:
    from allyouneed.data.files.formats.archives import open_binary

    packed = path.suffix.lower()
    damaged = f"{path}: the {packed} file is truncated or damaged; download or compress it again"
    try:
        with open_binary(path) as file:
            if packed == ".zst":
                yield from _bounded(_unzstd(file, damaged), path)
                return
            stream = gzip.GzipFile(fileobj=file) if packed == ".gz" else file
            chunks = iter(lambda: stream.read(CHUNK), b"")
            yield from _bounded(chunks, path) if packed == ".gz" else chunks
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(damaged) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _bounded(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Chunks of a compressed file, until it turns out to be a bomb."""
    from allyouneed.data.files.formats.archives import check_expansion, on_disk

    unpacked, size = 0, on_disk(path).stat().st_size
    for chunk in chunks:
        unpacked += len(chunk)
        check_expansion(path, unpacked, size)
        yield chunk


def _unzstd(file: BinaryIO, damaged: str) -> Iterator[bytes]:
    """Frame by frame: the library's stream reader treats a truncated file as complete; `eof` does not."""
    import zstandard

    unpacker, inside = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), False
    while chunk := file.read(PACKED_CHUNK):
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
