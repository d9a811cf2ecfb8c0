"""Files inside of downloaded packages: npm's .tgz and Debian's .deb."""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pairs import Pair


def find(folder: Path, name: str) -> Path | None:
    """The last version, by its name, of NAME-VERSION.tgz or NAME_VERSION_ARCHITECTURE.deb."""
    found = sorted([*folder.glob(f"{name}-[0-9]*.tgz"), *folder.glob(f"{name}_[0-9]*.deb")])
    return found[-1] if found else None


def files(path: Path, pattern: str) -> Iterator[tuple[re.Match[str], bytes]]:
    """Match of the path, and content, of the files whose path has the pattern."""
    content = path.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(_data_of_deb(content) if path.suffix == ".deb" else content)) as archive:
        for member in archive:
            found = re.search(pattern, member.name)
            file = archive.extractfile(member) if found and member.isfile() else None
            if found and file is not None:
                yield found, file.read()


def _data_of_deb(content: bytes) -> bytes:
    """data.tar.* of an `ar` archive: after 8 bytes, members with 60 bytes of header, at even positions."""
    at = 8
    while at < len(content):
        name, size = content[at : at + 16].decode().strip(), int(content[at + 48 : at + 58])
        at += 60
        if name.startswith("data.tar"):
            return content[at : at + size]
        at += size + size % 2
    raise ValueError("no data.tar in the package")


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The texts of nested JSON objects, with the keys that lead to them."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif isinstance(value, str):
            yield (*path, key), value


def json_leaves(content: bytes) -> Iterator[tuple[tuple[str, ...], str]]:
    return leaves(json.loads(content))


def catalog(content: bytes) -> Iterator[Pair]:
    """Entries of a compiled catalog of gettext (.mo, little-endian); of plurals, the first form."""
    count, ours, theirs = struct.unpack("<3I", content[8:20])
    for entry in range(count):
        texts = []
        for table in (ours, theirs):
            size, at = struct.unpack_from("<2I", content, table + 8 * entry)
            texts.append(content[at : at + size].decode("utf-8").split("\0")[0])
        yield texts[0].rpartition("\x04")[2], texts[1]  # after the context


def records(content: bytes) -> Iterator[dict[str, str]]:
    """Rows of a dBASE file, by column in capitals, as far as the columns begin with NAME."""
    count, begin, size = struct.unpack("<IHH", content[4:12])
    columns, at, position = [], 32, 1
    while content[at] != 0x0D:
        name = content[at : at + 11].split(b"\0")[0].decode().upper()
        if name.startswith("NAME"):
            columns.append((name, position, content[at + 16]))
        position += content[at + 16]
        at += 32
    for row in range(begin, begin + count * size, size):
        yield {
            name: content[row + start : row + start + width].decode("utf-8", "replace").strip(" \0")
            for name, start, width in columns
        }
