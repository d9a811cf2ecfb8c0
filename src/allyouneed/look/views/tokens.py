"""Tokens as the page shows them: [{"id", "text", "group"}]. Tokens that share a character, or one visible sign made of
several characters (combining marks, emoji), share a `group`, so that the page never tears it. `text` of a token that is
only a part of a character is its bytes: `<E6>`."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer

JOINER = "\u200d"


def token_list(tokenizer: Tokenizer, ids: Sequence[int]) -> list[dict[str, Any]]:
    pieces = [tokenizer.token_bytes(number) for number in ids]
    signs = _signs(b"".join(pieces))
    found, group, at = [], -1, 0
    for number, piece in zip(ids, pieces, strict=True):
        begins = not piece or at in signs
        group += begins or group < 0
        found.append({"id": int(number), "text": piece_text(piece), "group": group})
        at += len(piece)
    return found


def piece_text(piece: bytes) -> str:
    """Characters as they are, and bytes that are no whole character as `<E6>`."""
    text = piece.decode("utf-8", "surrogateescape")
    return "".join(f"<{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


def token_text(tokenizer: Tokenizer, number: int) -> str:
    return piece_text(tokenizer.token_bytes(number))


def _signs(raw: bytes) -> set[int]:
    """Offsets in bytes at which a visible sign begins."""
    text = raw.decode("utf-8", "surrogateescape")
    return set(_sign_starts(text))


def _sign_starts(text: str) -> Iterator[int]:
    at, before, flags = 0, "", 0
    for char in text:
        flag = "\U0001f1e6" <= char <= "\U0001f1ff"
        flags = flags + 1 if flag else 0
        joined = _extends(char) or before == JOINER or (flag and flags % 2 == 0)
        if not joined or not before:
            yield at
        at += len(char.encode("utf-8", "surrogateescape"))
        before = char


def _extends(char: str) -> bool:
    """Whether a character belongs to the sign before it."""
    return unicodedata.category(char) in ("Mn", "Mc", "Me") or char == JOINER or "\U0001f3fb" <= char <= "\U0001f3ff"
