"""Atomic writes of files and folders, and checksums."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from allyouneed.errors import UserError


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(tree: Mapping[str, Any]) -> str:
    """The SHA-256 of plain data, independent of key order; its key `checksum` is left out."""
    rest = {key: value for key, value in tree.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def temporary_name(path: Path) -> Path:
    """A unique hidden name in the same folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def missing_folder(path: Path) -> Path | None:
    """The topmost folder above `path` that does not exist, and that writing it will create."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    return missing[-1] if missing else None


def leftovers(path: Path) -> list[Path]:
    """What killed writers of this file or folder left beside it, under temporary names."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}")
    return [found for found in path.parent.iterdir() if name.fullmatch(found.name)]


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    from allyouneed.files.system import sync  # not where nothing is written

    sync(path)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    write_file(path, lambda file: file.write(text.encode()))


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Let `fill` write a file under a hidden name, then rename it to `path`."""
    work = temporary_name(path)
    try:
        with work.open("wb") as file:
            fill(file)
        sync(work)
        work.replace(path)
    except BaseException as error:
        work.unlink(missing_ok=True)
        _name(error, path)
        raise


def _name(error: BaseException, path: Path) -> None:
    """Let an error say what could not be written; that of a full disk does not."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a hidden folder, then rename it to `path`, replacing an old one.

    An error keeps the old folder. A kill between the two renames leaves both, complete, under hidden names.
    """
    path = path.resolve()
    work, old = temporary_name(path), temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}; name another folder") from None
    try:
        fill(work)
        for file in work.rglob("*"):
            if file.is_file():  # safetensors makes files private; give them the mode of the folder
                file.chmod(work.stat().st_mode & 0o666)
            sync(file)
        sync(work)
        if path.exists():
            path.rename(old)
        work.rename(path)
        sync(path.parent)
    except BaseException as error:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(work, ignore_errors=True)
        _name(error, path)
        raise
    shutil.rmtree(old, ignore_errors=True)
