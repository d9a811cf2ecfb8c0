"""Marian's binary shortlist, `lex.….s2t.bin` (src/data/shortlist.cpp of browsermt/marian-dev)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from allyouneed.data.shortlist import Shortlist
from allyouneed.errors import UserError
from allyouneed.files.reading import read_bytes

MAGIC = 0xF11A48D5013417F5
HEADER = struct.Struct("<6Q")  # magic, checksum, tokens always allowed, longest list, offsets, ids
MAX_BYTES = 256 << 20


def read(file: Path, sizes: tuple[int, int], shared: bool) -> Shortlist:
    """`sizes`: of the source and the target vocabulary; `shared`: they are one, and source tokens may be copied."""
    raw = read_bytes(file.parent, file.name, MAX_BYTES)
    if len(raw) < HEADER.size or int.from_bytes(raw[:8], "little") != MAGIC:
        raise UserError(f"{file}: not a binary shortlist of Marian")
    _, checksum, first, _, lists, count = HEADER.unpack_from(raw)
    if HEADER.size + 8 * lists + 4 * count != len(raw):
        raise UserError(f"{file}: {len(raw):,} bytes for {lists:,} offsets and {count:,} tokens; copy it again")
    if hash_of(raw[16:]) != checksum:
        raise UserError(f"{file}: damaged (its checksum differs); copy it again")
    if lists > sizes[0] + 1:
        raise UserError(f"{file}: lists for {lists - 1:,} source tokens; the model has {sizes[0]:,}")
    offsets = np.frombuffer(raw, "<u8", lists, HEADER.size).astype(np.int64)
    ids = np.frombuffer(raw, "<u4", count, HEADER.size + 8 * lists).astype(np.int64)
    found = Shortlist.checked(file, np.arange(min(first, sizes[1])), offsets, ids, sizes)
    return with_source_tokens(found) if shared else found


def with_source_tokens(given: Shortlist) -> Shortlist:
    """Each source token heads its own list."""
    rows = np.arange(len(given.offsets) - 1)
    rows = rows[rows < given.size]
    ids = np.insert(given.ids, given.offsets[:-1][: len(rows)], rows)
    begins = given.offsets + np.minimum(np.arange(len(given.offsets)), len(rows))
    return Shortlist(given.always, begins, ids, given.size)


def hash_of(content: bytes) -> int:
    """Marian's hash of a block of memory, by words of 64 bits."""
    found, kept = 0, (1 << 64) - 1
    for word in np.frombuffer(content, "<u8", len(content) // 8).tolist():
        found ^= (word + 0x9E3779B9 + (found << 6) + (found >> 2)) & kept
    return found
