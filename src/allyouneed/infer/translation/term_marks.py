"""Marked terms: how a model that was trained with them reads a glossary.

A term and its translation are written into the source, `a<TERM> dog<TRANSLATION> Hund<END> barks`, and the model writes
the translation where it belongs. The marks are control characters: one token each, and never part of a text, since
training files are cleaned of them and inference carries them around the model (`control` in spans.py). The space before
a term moves into the mark, for term and translation, so that both have the tokens they have in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable

from allyouneed.infer.translation.glossary import Term
from allyouneed.infer.translation.sentences import EAST_ASIAN

TERM, TRANSLATION, END = "\x02", "\x03", "\x04"


def mark_terms(text: str, terms: Iterable[Term]) -> str:
    """A text with these terms of it marked; they are in order and do not overlap."""
    made, at = "", 0
    for start, end, target in terms:
        before = text[at:start]
        spaced = before.endswith(" ")
        made += before[: len(before) - spaced]
        wide = EAST_ASIAN.match(target) is not None
        apart = not wide and (spaced or EAST_ASIAN.match(text[:start][-1:]) is not None)
        made += f"{TERM}{' ' * spaced}{text[start:end]}{TRANSLATION}{' ' * apart}{target}{END}"
        at = end
    return made + text[at:]
