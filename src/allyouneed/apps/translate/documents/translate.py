"""Translate documents: all of their passages at once, into one language."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.apps.translate.documents.parts import Document
from allyouneed.apps.translate.glossary import Glossary
from allyouneed.apps.translate.spans.spans import without_spans
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.translate.result import Translation
    from allyouneed.apps.translate.translator import Translator

SYMBOLS = re.compile("[\ue000-\uf8ff]")
STOP = re.compile("[.!。！]([\ue000-\uf8ff\\s]*)$")
DETECTED = 5000  # characters from which the language of a document is detected


@dataclass(frozen=True)
class DocumentTranslation:
    """A translated document; `data`: the same as the content of a file. `text` of a packed one (Word, EPUB) has its
    passages, one a line. `passages`: how many were translated; `notes`: as in `Translation`. `source`: the language of
    most of its words, if the model knows languages. `words`: its passages, without markup. `others`: further
    translations, best first, if asked for with `best`."""

    text: str
    passages: int
    data: bytes = b""
    notes: list[str] = field(default_factory=list)
    source: str | None = None
    words: str = ""
    others: list[str] = field(default_factory=list)


def translate_documents(
    translator: Translator,
    texts: Sequence[str | bytes],
    to: str | None,
    format: str,
    from_: str | None = None,
    glossary: Glossary | Mapping[str, str] | None = None,
    reading: Mapping[str, object] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[DocumentTranslation]:
    """`reading`: options of the format; `options`: of `translate_full`."""
    options = dict(options or {})
    if wrong := [text for text in texts if not isinstance(text, str | bytes)]:
        raise UserError(f"a document must be a string or bytes, not {type(wrong[0]).__name__}")
    if unfit := sorted({"align", "first", "protect"} & options.keys()):
        raise UserError(f"{', '.join(unfit)}: not for documents; remove it")
    documents = [read_document(text, format, **(reading or {})) for text in texts]
    passages = [unit.passage for document in documents for unit in document.units]
    to = target_language(translator, passages, to, from_)
    options |= {"from_": from_, "glossary": glossary}
    several = [passages]
    if isinstance(options.get("context"), int):  # each document has its own
        several = [[unit.passage for unit in document.units] for document in documents]
    found = chain.from_iterable(translator.translate_full(some, to, **options) for some in several)
    named = named_target(translator, to)
    return [_write(document, list(islice(found, len(document.units))), format, from_, named) for document in documents]


def target_language(translator: Translator, passages: Sequence[str], to: str | None, from_: str | None) -> str | None:
    """The target language of a document: given, or the default for the language of its words."""
    if not translator.protects:
        raise UserError("documents require a model that was trained with languages")
    if to is not None or translator.routes.detector is None:
        return to
    words = without_spans("\n".join(passages)[:DETECTED])
    return next(reversed(translator.routes.of(words, None, from_).into), None)  # one language for all of it


def named_target(translator: Translator, to: str | None) -> str | None:
    """The language that a translated document names as its own."""
    found = {there for _, there in getattr(translator.routes, "directions", ())}
    return to if to is not None or len(found) != 1 else found.pop()


def named_source(translator: Translator, passages: Sequence[str], from_: str | None) -> str | None:
    """The language that a document is in: given, or that of its words."""
    if from_ is not None or translator.routes.detector is None:
        found = {here for here, _ in getattr(translator.routes, "directions", ())}
        return from_ if from_ is not None or len(found) != 1 else found.pop()
    return translator.routes.of(without_spans("\n".join(passages)[:DETECTED]), None, None).here


def passage_text(source: str, text: str, format: str) -> str:
    """The translation of a passage as it is written in a document of this format."""
    return text if format == "text" else same_end(source, text)


def _write(
    document: Document, found: list[Translation], format: str, from_: str | None, to: str | None
) -> DocumentTranslation:
    def texts(rank: int) -> list[str]:
        chosen = [(one.source, one.candidates[min(rank, len(one.candidates) - 1)].text) for one in found]
        return [passage_text(before, after, format) for before, after in chosen]

    letters = Counter[str]()
    for one in found:
        if one.route:
            letters[one.route[0]] += len(one.source)
    return DocumentTranslation(
        document.write(texts(0), to),
        len(found),
        document.data(texts(0), to),
        [note for one in found for note in one.notes],
        letters.most_common(1)[0][0] if letters else from_,
        SYMBOLS.sub("", "\n".join(one.source for one in found)),
        [document.write(texts(rank), to) for rank in range(1, max((len(one.candidates) for one in found), default=1))],
    )


def same_end(source: str, text: str) -> str:
    """Without a full stop that the source does not have: a model of sentences ends a heading or a cell with one."""
    words = SYMBOLS.sub("", source).rstrip()
    return STOP.sub(r"\1", text) if words[-1:].isalnum() else text


def same_form(source: str, text: str, german: bool) -> str:
    """Each line ends and begins as in the source: without a full stop that is not there, and in the same case.
    `german`: a capital at the beginning may be that of a noun."""
    before, after = source.split("\n"), text.split("\n")
    if len(before) != len(after):
        return text
    return "\n".join(same_case(a, same_end(a, b), german) for a, b in zip(before, after, strict=True))


def same_case(source: str, text: str, german: bool) -> str:
    first = next((char for char in source if char.isalpha()), "")
    at = next((n for n, char in enumerate(text) if char.isalpha()), None)
    if at is None:
        return text
    if first.isupper():
        return text[:at] + text[at].upper() + text[at + 1 :]
    is_word = first.islower() and not german and not text[at + 1 : at + 2].isupper()
    return text[:at] + text[at].lower() + text[at + 1 :] if is_word else text
