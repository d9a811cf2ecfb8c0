"""Graphemes, the characters that a reader sees: an emoji with its modifiers, a letter with combining marks, a flag."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import regex


def group_pieces(pieces: Sequence[bytes]) -> list[int]:
    """A number for each piece of a text; pieces of one grapheme have the same one. A byte that is part of no character
    is a grapheme of its own."""
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    sizes = (len(one.encode("utf-8", "surrogateescape")) for one in regex.findall(r"\X", text))
    starts, groups, at = {0, *accumulate(sizes)}, list[int](), 0
    for piece in pieces:
        begins = not groups or not piece or at in starts
        groups.append(0 if not groups else groups[-1] + begins)
        at += len(piece)
    return groups
