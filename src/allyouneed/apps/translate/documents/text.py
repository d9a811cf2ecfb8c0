"""Plain text: one passage, or one for each paragraph."""

from __future__ import annotations

import re

from allyouneed.apps.translate.documents.parts import Builder, Document, Unit
from allyouneed.apps.translate.spans.spans import Passage

BLANK_LINES = re.compile(r"(\n[ \t\r]*+\n[ \t\r\n]*+)")


def read_text(text: str, *, newlines: bool = True) -> Document:
    """Plain text is one passage; its lines and spaces are kept by the translator (split.py). Without `newlines`, a
    paragraph is one passage and becomes one line; blank lines delimit paragraphs."""
    if newlines:
        return Document([Unit(Passage(text, {}), (text,), {}, str)] if text else [])
    builder = Builder((), str)
    for number, part in enumerate(BLANK_LINES.split(text)):
        if number % 2:
            builder.skip(part)
        else:
            builder.text(part, part)
            builder.end()
    return Document(builder.parts)
