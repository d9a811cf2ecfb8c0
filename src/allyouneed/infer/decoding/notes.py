"""Notes on a generated text: it repeats itself, or has bytes that form no character."""

from __future__ import annotations

import re

from allyouneed.errors import quote

INVALID = "\ufffd"  # what bytes become that form no character


class Note(str):
    """A note about one translation. `kind` ("numbers", "confidence", "score", "characters") groups notes that are too
    many to print."""

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Note:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


def drop_invalid(text: str) -> str:
    """The text without bytes that form no character (a model over bytes can generate any)."""
    return re.sub(f" ?{INVALID}+", "", text) if INVALID in text else text


def invalid_notes(source: str, decoded: str) -> list[str]:
    """`decoded`: what the model generated, before `drop_invalid`."""
    return [Note(f"{quote(source)}: bytes that form no character were left out", "characters")] * (INVALID in decoded)


def loop_note(text: str, tokens: int) -> str:
    return f"{quote(text)}: stopped after {tokens} tokens because it repeats itself; loops=0 disables this"
