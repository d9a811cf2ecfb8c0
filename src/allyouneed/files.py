"""Files that are there whole or not at all, and the checksums that prove it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(tree: Mapping[str, Any]) -> str:
    """Of plain data, whatever the order of its keys; a key `checksum` of its own is left out."""
    rest = {key: value for key, value in tree.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def aside(path: Path) -> Path:
    """A hidden name beside `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """All of it or nothing."""
    work = aside(path)
    try:
        work.write_text(text, encoding="utf-8", newline="\n")
        sync(work)
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a hidden folder, then give it its name, replacing what had it.

    An error leaves the old folder as it was. A kill between the two renames leaves both, whole, under hidden names.
    """
    path = path.resolve()
    work, old = aside(path), aside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; name another place") from None
    try:
        fill(work)
        for file in work.rglob("*"):
            if file.is_file():  # safetensors lets nobody but the owner read; whoever may read the folder may read all
                file.chmod(work.stat().st_mode & 0o666)
            sync(file)
        sync(work)
        if path.exists():
            path.rename(old)
        work.rename(path)
        sync(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
