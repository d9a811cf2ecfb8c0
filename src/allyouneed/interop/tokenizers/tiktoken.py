"""A byte-pair vocabulary in merge order (`*.tiktoken`: each line is base64 bytes and a rank).

The rank of a piece is its id and its merge priority; its two parts follow from merging its bytes with all lower ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.bounds import check_pieces
from allyouneed.errors import UserError
from allyouneed.files.reading import read_bytes

BYTES = 256


def read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = read_bytes(path.parent, path.name).splitlines()
        pairs = [line.split() for line in lines if line.strip()]
        found = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in pairs}
    except (ValueError, binascii.Error):
        raise UserError(f"{path}: not a tiktoken file (each line: base64 and a number)") from None
    check_pieces(found, str(path))
    if sorted(found.values()) != list(range(len(found))) or any(bytes([byte]) not in found for byte in range(BYTES)):
        raise UserError(f"{path}: incomplete tiktoken file: it must contain every byte, and ranks 0, 1, 2, …")
    return found


def byte_pair_encoding(ranks: Mapping[bytes, int], specials: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` with GPT-2's pre-tokenizer; the ids of special tokens follow the pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges = []
    for piece, _ in sorted(ranks.items(), key=lambda both: both[1]):
        if len(piece) > 1:
            left, right = _parts(piece, ranks)
            merges.append((spelled[left], spelled[right]))
    made = Tokenizer(models.BPE(vocab={spelled[piece]: rank for piece, rank in ranks.items()}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return made


def _parts(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while len(parts) > 2:
        joined = [ranks.get(one + other, len(ranks)) for one, other in pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        if joined[best] >= ranks[piece]:
            raise UserError(f"ranks: {piece!r} is not a merge of two lower ranks; the file is damaged")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _letters() -> dict[int, str]:
    """GPT-2's byte-to-character map: printable bytes stay, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(BYTES) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(BYTES + n) for n, byte in enumerate(hidden)}
