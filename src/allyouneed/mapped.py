"""A safetensors file as a mapping of tensors that are read when they are used, out of memory-mapped pages.

Each tensor has a mapping of its own: when the tensor is gone, so are its pages. A tensor can be written to; what is
written stays in memory and never reaches the file.
"""

from __future__ import annotations

import json
import mmap
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SMALL = 1 << 20  # bytes: less is read, not mapped, for there is an end to the number of mappings
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by the address of their tensor


class MappedFile(Mapping[str, Tensor]):
    """The tensors of one file by name. `shape` and `dtype` tell about one without reading it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries, self.start = _header(path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.entries[name]["dtype"]]

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        first, size = self.start + begin, end - begin
        with self.path.open("rb") as file:
            if size < SMALL or first % dtype.itemsize:
                file.seek(first)
                return torch.frombuffer(bytearray(file.read(size)), dtype=dtype).view(shape)
            page = first - first % mmap.ALLOCATIONGRANULARITY
            pages = mmap.mmap(file.fileno(), first + size - page, access=mmap.ACCESS_COPY, offset=page)
        found = torch.frombuffer(pages, dtype=dtype, count=size // dtype.itemsize, offset=first - page).view(shape)
        _MAPS[found.data_ptr()] = pages
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries


def give_back(tensor: Tensor) -> None:
    """Its pages are not needed for now: if they are mapped they leave memory, and come again when they are looked at.
    For tensors nobody has written to."""
    pages = _MAPS.get(tensor.untyped_storage().data_ptr())
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What the file says of its tensors, and where they begin. The library checks that they fill the file exactly,
    without holes and overlaps, and have the sizes their shapes say."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=once)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None
    header.pop("__metadata__", None)
    strange = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if strange:
        raise UserError(f"{path}: holds numbers of kind {', '.join(strange)}; known here are {', '.join(DTYPES)}")
    return header, 8 + length


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of which every key is there once: two readers would not agree on which of two counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found
