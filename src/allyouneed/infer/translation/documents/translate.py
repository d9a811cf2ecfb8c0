"""Translate a document: all of its passages at once, into one language."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allyouneed.errors import UserError
from allyouneed.infer.translation.documents.formats import read_document
from allyouneed.infer.translation.glossary import Glossary
from allyouneed.infer.translation.spans import without_spans

if TYPE_CHECKING:
    from allyouneed.infer.predictors.translator import Translator

SYMBOLS = re.compile("[\ue000-\uf8ff]")
STOP = re.compile("[.!。！]([\ue000-\uf8ff\\s]*)$")
DETECTED = 5000  # characters from which the language of a document is detected


@dataclass(frozen=True)
class DocumentTranslation:
    """A translated document; `passages`: how many were translated; `notes`: as in `Translation`."""

    text: str
    passages: int
    notes: list[str] = field(default_factory=list)


def translate_document(
    translator: Translator,
    text: str,
    to: str | None,
    format: str,
    from_: str | None,
    glossary: Glossary | Mapping[str, str] | None,
    reading: Mapping[str, object],
    options: Mapping[str, Any],
) -> DocumentTranslation:
    """`reading`: options of the format; `options`: of `translate_full`."""
    if not isinstance(text, str):
        raise UserError(f"a document must be a string, not {type(text).__name__}")
    if wrong := sorted({"best", "align", "first", "protect"} & options.keys()):
        raise UserError(f"{', '.join(wrong)}: not for documents; remove it")
    if not translator.protects:
        raise UserError("documents require a model that was trained with languages")
    document = read_document(text, format, **reading)
    passages = [unit.passage for unit in document.units]
    if to is None and translator.routes.detector is not None:
        words = without_spans("\n".join(passages)[:DETECTED])
        to = next(reversed(translator.routes.of(words, None, from_).into), None)  # one language for all of it
    found = translator.translate_full(passages, to, from_=from_, glossary=glossary, **options)
    notes = [note for one in found for note in one.notes]
    texts = [one.text if format == "text" else same_end(one.source, one.text) for one in found]
    return DocumentTranslation(document.write(texts), len(passages), notes)


def same_end(source: str, text: str) -> str:
    """Without a full stop that the source does not have: a model of sentences ends a heading or a cell with one."""
    words = SYMBOLS.sub("", source).rstrip()
    return STOP.sub(r"\1", text) if words[-1:].isalnum() else text
