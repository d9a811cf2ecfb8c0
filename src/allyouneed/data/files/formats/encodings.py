"""Encodings of text files: named by the user, never guessed. A wrong one is reported with those that fit."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

USUAL = ("utf-8", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr", "cp1251", "cp1252")  # most particular first
MARK = "allyouneed.mark"
SAMPLE = 1 << 16  # bytes that tell the encoding
FIT = 0.95  # of the lines that are not ASCII
DAMAGED = 0.5  # of them that fit: the others are damaged, the encoding is right
MIXED = 0.3  # letters beside a Latin one
BESIDE_LATIN = re.compile(r"(?<=[A-Za-z])[^\x00-\x7f]|[^\x00-\x7f](?=[A-Za-z])")
IMPLAUSIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]")


def _mark(error: UnicodeError) -> tuple[str | bytes, int]:
    """A byte that is never valid in UTF-8 takes the place of what is wrong, so that its line is reported."""
    if isinstance(error, UnicodeEncodeError):
        return b"\xff", error.start + 1
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end if "utf" in error.encoding else error.start + 1


codecs.register_error(MARK, _mark)


def is_encoding(name: str) -> bool:
    """Whether Python knows this encoding of texts."""
    try:
        return isinstance("a".encode(name), bytes) and isinstance(b"".decode(name), str)
    except (LookupError, UnicodeError, ValueError):
        return False


def as_utf8(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The bytes of a file in this encoding as UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)(MARK)
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", MARK)
    yield decoder.decode(b"", final=True).encode("utf-8", MARK)


def fitting(sample: bytes) -> list[str]:
    """The usual encodings of these bytes: what most lines can be, without control characters."""
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ["utf-16"]
    if not (lines := _telling(sample)):
        return ["utf-8"]
    if _share(lines, "utf-8") >= FIT:
        return ["utf-8"]
    return [name for name in USUAL if _share(lines, name) >= FIT and _looks_written(lines, name)]


def _telling(sample: bytes) -> list[bytes]:
    """The complete lines that are not ASCII."""
    return [line for line in sample.split(b"\n")[: -1 if b"\n" in sample else None] if not line.isascii()]


def _share(lines: Sequence[bytes], encoding: str) -> float:
    return sum(_fits(line, encoding) for line in lines) / len(lines)


def _looks_written(lines: Sequence[bytes], encoding: str) -> bool:
    """Western words mix accented letters with plain ones; other scripts seldom stand beside a Latin letter."""
    text = b"\n".join(lines).decode(encoding, "replace")
    beside = sum(map(len, BESIDE_LATIN.findall(text)))
    mixed = beside / max(1, sum(not character.isascii() for character in text))
    return mixed >= MIXED if encoding == "cp1252" else mixed < 1 - MIXED


def _fits(line: bytes, encoding: str) -> bool:
    try:
        text = line.rstrip(b"\r").decode(encoding)
        return encoding == "utf-8" or IMPLAUSIBLE.search(text) is None  # nothing else is valid UTF-8 by chance
    except UnicodeDecodeError:
        return False


@lru_cache(maxsize=64)
def misfit(path: Path, named: str | None) -> str:
    """What to say of a line that is not in the encoding that was named (None: UTF-8)."""
    from allyouneed.data.files.lines import DataFile, read_chunks

    problem = f"not {named or 'UTF-8'}"
    sample = next(read_chunks(DataFile(path)), b"")[:SAMPLE]
    found = fitting(sample)
    if not found or _share(_telling(sample) or [b""], named or "utf-8") >= DAMAGED:
        return problem
    return f"{problem}; the file looks like {' or '.join(found[:3])} (set encoding: {found[0]})"
