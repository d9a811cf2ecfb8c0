"""What differs between operating systems: file locks, flushing folders, the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def lock(file: IO[bytes] | IO[str] | int) -> bool:
    """Lock an open file for this process, which the system undoes however the process ends. False: another process has
    it. True without a lock on systems and file systems that have none."""
    handle = file if isinstance(file, int) else file.fileno()
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock_on_windows(handle: int) -> bool:
    try:
        import msvcrt
    except ImportError:
        return True
    here = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, 1 << 40, os.SEEK_SET)  # a byte that nobody reads: there, a locked one cannot be read
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except OSError:
        return False
    finally:
        os.lseek(handle, here, os.SEEK_SET)
    return True


def sync(path: Path) -> None:
    """Flush a file or folder to the disk. Windows opens no folders, and flushes what can be written only."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
