"""Files inside archives: `data.zip/train.tsv` is the path of a member. Nothing is unpacked to the disk.

A member is as untrusted as its archive: names that lead elsewhere are refused, and so are members that would expand to
hundreds of times the size of the archive.
"""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, cast

from allyouneed.errors import UserError

SUFFIXES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
LARGE, MOST_EXPANDED = 64 << 20, 200  # bytes of a member that may be a bomb, and times its packed size
MOST_MEMBERS = 100_000
IN_MEMORY = 1 << 30  # bytes of a packed file that must be read at random


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def split(path: Path) -> tuple[Path, str] | None:
    """The archive on the disk and the name of the member; None for any other path."""
    for folder in path.parents:
        if is_archive(folder) and folder.is_file():
            return folder, path.relative_to(folder).as_posix()
    return None


def on_disk(path: Path) -> Path:
    """The file whose content decides what is read from this path."""
    found = split(path)
    return path if found is None else found[0]


def members(archive: Path) -> list[Path]:
    """The paths of its files, sorted, without hidden ones."""
    with _reading(archive):
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as packed:
                names = [info.filename for info in packed.infolist() if not info.is_dir()]
                check_expansion(archive, sum(info.file_size for info in packed.infolist()), archive.stat().st_size)
        else:
            with tarfile.open(archive) as tar:
                names = [info.name for info in _tar_members(tar, archive) if info.isreg()]
    if len(names) > MOST_MEMBERS:
        raise UserError(f"{archive}: {len(names):,} files; at most {MOST_MEMBERS:,} are read: pack them into fewer")
    plain = sorted({name.removeprefix("./") for name in names})
    for name in plain:
        if any(part in ("", ".", "..") or set(part) & set("\\\0") for part in name.split("/")):
            raise UserError(f"{archive}: {name!r} is not the name of a file in this archive; pack it again")
    shown = [name for name in plain if not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))]
    if not shown:
        raise UserError(f"{archive}: there are no files in it")
    return [archive / name for name in shown]


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """A file, or a member of an archive, to be read from the start."""
    found = split(path)
    if found is None:
        with path.open("rb") as file:
            yield file
        return
    archive, name = found
    with _reading(archive):
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as packed:
                info = _zip_member(packed, name, path)
                check_expansion(path, info.file_size, info.compress_size)
                with packed.open(info) as member:
                    yield cast("BinaryIO", member)
            return
        with tarfile.open(archive) as tar:
            for entry in _tar_members(tar, archive):
                if entry.isreg() and entry.name.removeprefix("./") == name:
                    file_object = tar.extractfile(entry)
                    assert file_object is not None
                    with file_object:
                        yield cast("BinaryIO", file_object)
                    return
        raise _missing(path, archive)


@contextmanager
def open_seekable(path: Path) -> Iterator[BinaryIO]:
    """The same, to be read at random: a member of an archive is held in memory."""
    with open_binary(path) as file:
        if split(path) is None:
            yield file
            return
        content = file.read(IN_MEMORY + 1)
    if len(content) > IN_MEMORY:
        raise UserError(f"{path}: more than {IN_MEMORY >> 30} GiB inside an archive; unpack it")
    yield BytesIO(content)


def check_zip(path: Path, file: BinaryIO) -> int:
    """Refuse a zipped document (.xlsx, .npz) that expands to hundreds of times its size; its size when it is
    unpacked."""
    with _reading(path), zipfile.ZipFile(file) as packed:
        unpacked = sum(info.file_size for info in packed.infolist())
        check_expansion(path, unpacked, file.seek(0, 2))
    file.seek(0)
    return unpacked


def _zip_member(packed: zipfile.ZipFile, name: str, path: Path) -> zipfile.ZipInfo:
    for candidate in (name, f"./{name}"):
        if candidate in packed.NameToInfo:
            return packed.NameToInfo[candidate]
    raise _missing(path, Path(str(packed.filename)))


def _missing(path: Path, archive: Path) -> UserError:
    shown = ", ".join(member.relative_to(archive).as_posix() for member in members(archive)[:10])
    return UserError(f"{path}: no such file in the archive ({shown}); check the path")


def _tar_members(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """Each before the next is looked for, which unpacks all of it."""
    packed, unpacked = archive.stat().st_size, 0
    while (info := tar.next()) is not None:
        unpacked += info.size
        check_expansion(archive / info.name.lstrip("/"), unpacked, packed)
        yield info


def check_expansion(path: Path, size: int, packed: int) -> None:
    """Refuse content of `size` bytes that `packed` bytes are said to expand to, if they may be a bomb."""
    if size > LARGE and size > MOST_EXPANDED * max(packed, 1):
        raise UserError(
            f"{path}: {packed:,} bytes that expand to {size:,}; more than {MOST_EXPANDED} times as many are not read: "
            "unpack it yourself if you trust it"
        )


@contextmanager
def _reading(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        reason = str(error).split(":\n")[0]
    except (RuntimeError, NotImplementedError, ValueError, LookupError, OverflowError) as error:  # encrypted, …
        reason = str(error)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        return
    raise UserError(f"{archive}: the archive cannot be read ({reason}); download or pack it again")
