"""Marked terms: how a model that was trained with them reads a glossary.

A term and its translation are written into the source, `a<TERM> dog<TRANSLATION> Hund<END> barks`, and the model writes
the translation where it belongs. The marks are control characters: one token each, and never part of a text, since
training files are cleaned of them and inference carries them around the model (`control` in spans.py). The space before
a term moves into the mark, for term and translation, so that both have the tokens they have in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from allyouneed.apps.translate.glossary import Term
from allyouneed.data.languages import EAST_ASIAN

TERM, TRANSLATION, END = "\x02", "\x03", "\x04"
MARKS = re.compile(f"[{TERM}{TRANSLATION}{END}]")
MARKED = re.compile(f"{TERM}[^{TRANSLATION}]*{TRANSLATION}([^{END}]*){END}")
LAST = re.compile(f"(.)(?:{TRANSLATION}[^{END}]*{END})?$")  # of the words themselves


def add_term(text: str, term: str, translation: str) -> str:
    """A text and, after it, a marked term. The space at its end moves into the mark."""
    space = " " if text.endswith(" ") else ""
    last = LAST.search(text)
    apart = space or (last is not None and EAST_ASIAN.match(last[1]))  # words of another script
    gap = " " if apart and not EAST_ASIAN.match(translation) else ""
    return f"{text.removesuffix(space)}{TERM}{space}{term}{TRANSLATION}{gap}{translation}{END}"


def mark_terms(text: str, terms: Iterable[Term]) -> str:
    """A text with these terms of it marked; they are in order and do not overlap."""
    made, at = "", 0
    for start, end, target in terms:
        made, at = add_term(made + text[at:start], text[start:end], target), end
    return made + text[at:]


def with_translations(text: str) -> str:
    """A text with the translations in place of its marked terms."""
    return MARKED.sub(r"\1", text)
