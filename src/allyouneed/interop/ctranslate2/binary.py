"""Read CTranslate2's model.bin: named arrays and aliases, nothing that is executed.

Layout: version (uint32), name of the spec, its revision (uint32), the number of variables (uint32), each a name, the
number of dimensions (uint8), the dimensions (uint32), the type (uint8), the size in bytes (uint32) and the values; then
the number of aliases and pairs of names. A string is its length (uint16) and bytes, the last one 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from allyouneed.errors import UserError

VERSIONS = (4, 5, 6)
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by number
MAX_RANK = 8
MAX_VARIABLES = 1_000_000


@dataclass(frozen=True)
class VariableEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in bytes, in the file


class Variables(Mapping[str, Tensor]):
    """The variables of a file by name, read on access; an alias is another name of the same variable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, VariableEntry] = {}
        self.aliases: dict[str, str] = {}
        self.size = path.stat().st_size
        try:
            with path.open("rb") as file:
                self._read_header(file)
        except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
            raise UserError(f"{path}: not a valid CTranslate2 model: {error or 'the file is truncated'}") from None

    def _read_header(self, file: BinaryIO) -> None:
        (self.version,) = _unpack(file, "<I")
        if self.version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise ValueError(f"binary version {self.version} is not supported (allowed: {known}); convert it again")
        self.spec, (self.revision,) = _string(file), _unpack(file, "<I")
        for _ in range(_count(file)):
            name, (rank,) = _string(file), _unpack(file, "<B")
            if rank > MAX_RANK:
                raise ValueError(f"{name}: {rank} dimensions")
            shape = _unpack(file, f"<{rank}I")
            kind, size = _unpack(file, "<BI")
            if kind >= len(DTYPES):
                raise ValueError(f"{name}: unknown type {kind}")
            entry = VariableEntry(DTYPES[kind], shape, file.tell())
            if size != prod(shape) * entry.dtype.itemsize:
                raise ValueError(f"{name}: {size:,} bytes for the shape {shape}")
            if entry.start + size > self.size:
                raise ValueError("the file is truncated")
            if name in self.entries:
                raise ValueError(f"{name} occurs twice")
            self.entries[name] = entry
            file.seek(size, 1)
        for _ in range(_count(file)):
            alias, name = _string(file), _string(file)
            if name not in self.entries or alias in self.entries:
                raise ValueError(f"{alias}: an alias of {name}, which does not exist")
            self.aliases[alias] = name
        if file.tell() != self.size:
            raise ValueError(f"{self.size - file.tell():,} bytes are left over")

    def resolve(self, name: str) -> str:
        """The name of the variable behind an alias; an alias covers its quantization scale too."""
        if name.endswith("_scale") and name not in self.entries:
            owner = self.aliases.get(name.removesuffix("_scale"))
            return name if owner is None else f"{owner}_scale"
        return self.aliases.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[self.resolve(name)].shape

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[self.resolve(name)]
        if not prod(entry.shape):
            return torch.empty(entry.shape, dtype=entry.dtype)
        with self.path.open("rb") as file:
            file.seek(entry.start)
            raw = bytearray(file.read(prod(entry.shape) * entry.dtype.itemsize))
        return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        yield from self.entries
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.entries) + len(self.aliases)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.resolve(name) in self.entries

    @property
    def quantized(self) -> bool:
        return any(name.endswith("weight_scale") for name in self.entries)

    def weight(self, name: str) -> Tensor:
        """A weight in floating-point numbers: an int8 weight has one scale per row, an int16 weight a single one. In a
        quantized file, everything becomes float32."""
        found = self[name]
        if not found.is_floating_point():
            if f"{name}_scale" not in self:
                raise UserError(f"{self.path}: {name}: {found.dtype} without a scale".replace("torch.", ""))
            scale = self[f"{name}_scale"].float()
            if found.dim() > 1 and scale.dim() == 1 and len(scale) == len(found):
                scale = scale.view(-1, *[1] * (found.dim() - 1))
            elif scale.numel() != 1:
                raise UserError(f"{self.path}: {name}: {tuple(scale.shape)} scales for {tuple(found.shape)} weights")
            return found.float() / scale
        return found.float() if self.quantized else found


def _unpack(file: BinaryIO, layout: str) -> tuple[int, ...]:
    size = struct.calcsize(layout)
    raw = file.read(size)
    if len(raw) < size:
        raise ValueError("the file is truncated")
    return struct.unpack(layout, raw)


def _count(file: BinaryIO) -> int:
    (count,) = _unpack(file, "<I")
    if count > MAX_VARIABLES:
        raise ValueError(f"{count:,} variables")
    return count


def _string(file: BinaryIO) -> str:
    (size,) = _unpack(file, "<H")
    raw = file.read(size)
    if len(raw) < size or size < 1:
        raise ValueError("the file is truncated")
    return raw[:-1].decode("utf-8")
