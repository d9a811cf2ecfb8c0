"""Arrays of a Marian model file by name: `.npz`, numpy's archive, and `.bin`, Marian's own. Nothing in either is
executed, and no array is made that the file does not hold.

A `.bin` may hold matrices in int8 for intgemm (Bergamot's and Firefox's models), with the scale behind the values:
those of embeddings as they are, all others transposed (`loadItems` in src/common/binary.cpp of browsermt/marian-dev).
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from allyouneed.errors import UserError
from allyouneed.interop.hf.checkpoint import check_archive

VERSION, ENCRYPTED = 1, 2  # of a .bin
HEADER = struct.Struct("<4Q")  # length of the name, type, number of dimensions, bytes
MAX_ITEMS, MAX_RANK = 1_000_000, 8
# the kinds of a .bin, and those of an .npz in either byte order
DTYPES = {0x404: "<f4", 0x402: "<f2", 0x408: "<f8", 0x101: "|i1", 0x104: "<i4", 0x204: "<u4", 0x108: "<i8"}
FLOATS = ("<f4", "<f2", "<f8")
INTGEMM8 = 0x4101


class Int8Array(NamedTuple):
    """The values are codes / scale."""

    codes: Any  # (inputs, outputs) int8
    scale: float


def is_binary(path: Path) -> bool:
    """Whether a file begins as Marian's .bin does."""
    with path.open("rb") as file:
        return file.read(8) in (VERSION.to_bytes(8, "little"), ENCRYPTED.to_bytes(8, "little"))


def read_arrays(path: Path) -> dict[str, Any]:
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_bin(path)
    except (ValueError, struct.error, zipfile.BadZipFile, OSError, UnicodeDecodeError, EOFError) as error:
        raise UserError(f"{path}: not a valid Marian model: {error or 'the file is truncated'}") from None


def _read_npz(path: Path) -> dict[str, Any]:
    check_archive(path)
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename in found or len(found) > MAX_ITEMS:
                raise ValueError(f"{entry.filename} occurs twice")
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                reads = (
                    np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                )
                shape, fortran, dtype = reads(file)
                if dtype.newbyteorder("<").str not in DTYPES.values() or len(shape) > MAX_RANK:
                    raise ValueError(f"{entry.filename}: an array of {dtype} is not supported")
                raw = file.read()
            if len(raw) != prod(shape) * dtype.itemsize:
                raise ValueError(f"{entry.filename}: {len(raw):,} bytes for the shape {shape}")
            values = np.frombuffer(bytearray(raw), dtype).astype(dtype.newbyteorder("<"), copy=False)
            found[entry.filename.removesuffix(".npy")] = values.reshape(shape, order="F" if fortran else "C")
    return found


def _read_bin(path: Path) -> dict[str, Any]:
    """Version, number of arrays, a header for each, all names, all shapes (int32), padding, all values."""
    raw = memoryview(path.read_bytes())
    version, count = struct.unpack_from("<2Q", raw)
    if version == ENCRYPTED:
        raise ValueError("it is encrypted")
    if version != VERSION:
        raise ValueError(f"binary version {version} is not supported (allowed: {VERSION})")
    if count > min(MAX_ITEMS, len(raw) // HEADER.size):
        raise ValueError(f"{count:,} arrays")
    headers = [HEADER.unpack_from(raw, 16 + number * HEADER.size) for number in range(count)]
    at = 16 + count * HEADER.size
    names, shapes = [], []
    for length, *_ in headers:
        names.append(bytes(_slice(raw, at, length)).rstrip(b"\0").decode("utf-8"))
        at += length
    for name, (_, _, rank, _) in zip(names, headers, strict=True):
        if rank > MAX_RANK:
            raise ValueError(f"{name}: {rank} dimensions")
        shapes.append(struct.unpack(f"<{rank}i", _slice(raw, at, 4 * rank)))
        at += 4 * rank
    (padding,) = struct.unpack("<Q", _slice(raw, at, 8))
    at += 8 + padding
    found: dict[str, Any] = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        values = _slice(raw, at, size)
        at += size
        if kind == INTGEMM8:
            found[name] = _int8_array(name, shape, values)
            continue
        if kind not in DTYPES:
            raise ValueError(
                f"{name}: values of type {kind:#x}, arranged for one kind of processor, are not supported; use .npz, "
                "or a model in int8 for any processor (intgemm8)"
            )
        dtype = np.dtype(DTYPES[kind])
        if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize > size or name in found:
            raise ValueError(f"{name}: {size:,} bytes for the shape {shape}")
        found[name] = np.frombuffer(bytearray(values[: prod(shape) * dtype.itemsize]), dtype).reshape(shape)
    return found


def _int8_array(name: str, shape: tuple[int, ...], values: memoryview) -> Int8Array:
    count = prod(shape)
    if len(shape) != 2 or min(shape) < 1 or count + 4 > len(values):
        raise ValueError(f"{name}: {len(values):,} bytes for the shape {shape} in int8")
    (scale,) = struct.unpack("<f", values[count : count + 4])
    if not 1e-30 < scale < 1e30:
        raise ValueError(f"{name}: a scale of {scale}")
    codes = np.frombuffer(bytearray(values[:count]), np.int8)
    return Int8Array(codes.reshape(shape) if "Wemb" in name else codes.reshape(shape[::-1]).T, scale)


def _slice(raw: memoryview, at: int, size: int) -> memoryview:
    if size > len(raw) or at + size > len(raw):
        raise ValueError("the file is truncated")
    return raw[at : at + size]


def model_settings(arrays: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of the model, which Marian stores as an array of characters."""
    from allyouneed.files.reading import parse_yaml

    stored = arrays.get("special:model.yml")
    if stored is None:
        raise UserError(f"{path}: no special:model.yml, so it is not a model of Marian")
    try:
        found = parse_yaml(stored.astype("i1").tobytes().rstrip(b"\0").decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: special:model.yml: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: special:model.yml: expected a mapping")
    return found
