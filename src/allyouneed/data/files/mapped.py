"""A safetensors file as a mapping of tensors that are memory-mapped on access.

Each tensor has its own mapping, which is released with it. Mappings are copy-on-write: writing to a tensor never
changes the file.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.files.reading import parse_json

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
SMALL = 1 << 20  # bytes; smaller tensors are read, since the number of mappings is limited
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by data pointer


class MappedFile(Mapping[str, Tensor]):
    """The tensors of one file by name. `shape` and `dtype` do not read the tensor."""

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


def release_pages(tensor: Tensor) -> None:
    """Drop the resident pages of a mapped tensor; they are read again on access. Only for unmodified tensors."""
    pages = _MAPS.get(tensor.untyped_storage().data_ptr())
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the data. The library checks that the tensors fill the file exactly, without holes
    or overlaps, and that their sizes match their shapes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not a valid safetensors file: {error}") from None
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if unknown:
        raise UserError(f"{path}: unsupported dtype {', '.join(unknown)} (supported: {', '.join(DTYPES)})")
    return header, 8 + length
