"""Replacements in a text, and where they move its characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """Replaces the characters from `start` to `end`; an insertion if they are equal."""

    start: int
    end: int
    text: str


def in_order(edits: Sequence[Edit]) -> list[Edit]:
    """Edits by position; insertions at the same place keep their order and precede what is replaced there."""
    return sorted(edits, key=lambda edit: (edit.start, edit.end > edit.start))


def apply(text: str, edits: Sequence[Edit]) -> str:
    """The text after `edits`, which are in order and do not overlap."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


def moved(span: tuple[int, int], edits: Sequence[Edit]) -> tuple[int, int]:
    """Where these characters are after the edits; a part of what is replaced becomes all of the replacement."""
    begin, end = span
    new_begin, new_end, shift = begin, end, 0
    for edit in edits:
        grown = shift + len(edit.text) - (edit.end - edit.start)
        if edit.start == edit.end:
            new_begin = begin + grown if edit.start <= begin else new_begin
            new_end = end + grown if edit.start < end else new_end
        else:
            if edit.end <= begin:
                new_begin = begin + grown
            elif edit.start < begin:
                new_begin = edit.start + shift
            if edit.end <= end:
                new_end = end + grown
            elif edit.start < end:
                new_end = edit.end + grown
        shift = grown
    return new_begin, max(new_begin, new_end)
