"""Arrays of .npy, .npz and IDX files. Their headers are not trusted: what would expand to hundreds of times the size of
the file is refused before it takes memory, and offsets must lie in order within what they divide."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allyouneed.data.files.formats.archives import check_expansion, check_zip
from allyouneed.errors import UserError

BYTES = 0x08  # type of unsigned bytes in an IDX file
MOST_DIMENSIONS = 8


def read_npz(file: Path) -> Mapping[str, NDArray[Any]]:
    """The arrays of a .npz file by name, each read when it is asked for."""
    with _reading(file), file.open("rb") as opened:
        check_zip(file, opened)
    with _reading(file):
        return _Checked(file, np.load(file, allow_pickle=False))


class _Checked(dict[str, Any]):
    """Arrays of a .npz file; a damaged one is a message."""

    def __init__(self, file: Path, stored: Any) -> None:
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of arrays")
        super().__init__(dict.fromkeys(stored.files))
        self.file, self.stored = file, stored

    def __getitem__(self, name: str) -> NDArray[Any]:
        with _reading(self.file):
            array: NDArray[Any] = self.stored[name]
            return array


def read_npy(file: Path, mapped: bool = False) -> NDArray[Any]:
    """The array of a .npy file. `mapped`: it stays on the disk."""
    with _reading(file):
        return rows_of(np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False), file)


def read_idx(file: Path) -> NDArray[np.uint8]:
    """An array as the MNIST files have it: two zeros, type, number of dimensions, sizes (big-endian), values."""
    with _reading(file), gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as opened:
        zeros, kind, dimensions = struct.unpack(">HBB", opened.read(4))
        if zeros or kind != BYTES or not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError("not an IDX file of bytes")
        shape = struct.unpack(f">{dimensions}I", opened.read(4 * dimensions))
        count = math.prod(shape)
        check_expansion(file, count, file.stat().st_size)
        values = np.frombuffer(opened.read(count + 1), np.uint8)
        if values.size != count:
            raise ValueError(f"{values.size:,} values, expected {'×'.join(map(str, shape))}")
        return values.reshape(shape)


def divided(count: int, offsets: NDArray[Any], file: Path) -> list[tuple[int, int]]:
    """Begin and end of each part of `count` joined values."""
    ends = offsets.tolist()
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or ends != sorted(ends) or not ends:
        raise UserError(f"{file}: the offsets are not whole numbers in ascending order")
    if ends[0] < 0 or ends[-1] > count:
        raise UserError(f"{file}: offsets from {ends[0]:,} to {ends[-1]:,}, but there are {count:,} values")
    return list(pairwise(ends))


def rows_of(array: NDArray[Any], file: Path) -> NDArray[Any]:
    """The same array, if it has rows."""
    if array.ndim == 0:
        raise UserError(f"{file}: a single value, expected an array of rows")
    return array


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # numpy evaluates headers as Python and lets any error of that through
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0][:200] or type(error).__name__
    else:
        return
    raise UserError(f"{file}: cannot be read: {reason}")
