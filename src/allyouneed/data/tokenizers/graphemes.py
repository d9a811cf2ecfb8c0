"""Graphemes, the characters that a reader sees: an emoji with its modifiers, a letter with combining marks, a flag."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

JOINER = "\u200d"  # joins emoji
SKIN_TONES = ("\U0001f3fb", "\U0001f3ff")
REGIONAL = ("\U0001f1e6", "\U0001f1ff")  # two of them are a flag
TAGS = ("\U000e0020", "\U000e007f")  # of regional flags


def grapheme_starts(raw: bytes) -> set[int]:
    """Byte offsets at which a grapheme begins. A byte that is part of no character is a grapheme of its own."""
    starts, at, before, flags = set[int](), 0, "", 0
    for char in raw.decode("utf-8", "surrogateescape"):
        flags = flags + 1 if REGIONAL[0] <= char <= REGIONAL[1] else 0
        if not before or not (_extends(char) or before == JOINER or (flags and flags % 2 == 0)):
            starts.add(at)
        at += len(char.encode("utf-8", "surrogateescape"))
        before = char
    return starts


def _extends(char: str) -> bool:
    return (
        char == JOINER
        or unicodedata.category(char) in ("Mn", "Mc", "Me")
        or SKIN_TONES[0] <= char <= SKIN_TONES[1]
        or TAGS[0] <= char <= TAGS[1]
    )


def group_pieces(pieces: Sequence[bytes]) -> list[int]:
    """A number for each piece of a text; pieces of one grapheme have the same one."""
    starts = grapheme_starts(b"".join(pieces))
    groups, at = list[int](), 0
    for piece in pieces:
        begins = not groups or not piece or at in starts
        groups.append(0 if not groups else groups[-1] + begins)
        at += len(piece)
    return groups
