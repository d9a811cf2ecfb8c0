"""Texts with a target: a label, a score, or a tag per word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeInt

from allyouneed.data.files.lines import decode_utf8, inner_suffix, raw_lines
from allyouneed.data.files.readers import (
    JSON_SUFFIXES,
    TABLE_SUFFIXES,
    Files,
    Paths,
    Report,
    expand_paths,
    is_unicode,
    json_object,
    read_rows,
    read_text,
    select_columns,
)

TAG_SUFFIXES = (*TABLE_SUFFIXES, ".conll", ".bio", ".iob", "")
DOCUMENT_START = "-DOCSTART-"  # separates documents in CoNLL-2003; not a word

Columns = Annotated[tuple[NonNegativeInt, ...], Field(min_length=2, max_length=3)]
Keys = Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]


class Labelled(NamedTuple):
    """One text or two, with a label."""

    texts: tuple[str, ...]
    label: str
    file: str
    line: int

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @property
    def metadata(self) -> str:
        return self.label


class LabelledFiles(Files):
    """Files of labelled texts, one example per line. `columns` and `keys` select the text, an optional second text, and
    the label last."""

    examples: ClassVar[str] = "texts"
    kind: Literal["labelled"] = "labelled"
    path: Paths
    columns: Columns | None = None
    keys: Keys = ("text", "label")

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    def read(self, report: Report) -> Iterator[Labelled]:
        keys = self.keys
        if self.columns is not None and len(self.columns) > len(keys):
            keys = ("text", "second", "label")
        for file in self.files():
            named = self.keys if inner_suffix(file) in JSON_SUFFIXES else keys
            for _, number, (*texts, label) in read_rows([file], self.columns, named, report, named[-1]):
                if label.strip():
                    yield Labelled(tuple(texts), label.strip(), str(file), number)
                else:
                    report.drop("broken", file, number, "the label is empty", "\t".join(texts))


class Scored(NamedTuple):
    """Two texts and their similarity score."""

    first: str
    second: str
    score: float
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return self.first, self.second

    @property
    def metadata(self) -> str:
        return repr(self.score)


class ScoredFiles(Files):
    """Files of scored text pairs, one per line."""

    examples: ClassVar[str] = "scored pairs"
    has_two_texts: ClassVar[bool] = True
    kind: Literal["scored"] = "scored"
    path: Paths
    columns: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = None
    keys: tuple[str, str, str] = ("first", "second", "score")

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    def read(self, report: Report) -> Iterator[Scored]:
        for file, number, (first, second, text) in read_rows(
            self.files(), self.columns, self.keys, report, self.keys[-1]
        ):
            score = _number(text)
            if score is None:
                report.drop("broken", file, number, f"the score {text!r} is not a number", f"{first}\t{second}")
            else:
                yield Scored(first, second, score, str(file), number)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Tagged(NamedTuple):
    """A sentence as words, with one tag per word."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (" ".join(self.words),)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.tags

    @property
    def metadata(self) -> str:
        return " ".join(self.tags)


class TaggedFiles(Files):
    """Files of tagged sentences: one word per line with its tag in another column and an empty line after each
    sentence, or JSONL with two lists."""

    examples: ClassVar[str] = "sentences"
    kind: Literal["tagged"] = "tagged"
    path: Paths
    columns: tuple[NonNegativeInt, NonNegativeInt] | None = None
    keys: tuple[str, str] = ("tokens", "tags")

    def files(self) -> list[Path]:
        return expand_paths(self.path, TAG_SUFFIXES)

    def read(self, report: Report) -> Iterator[Tagged]:
        for file in self.files():
            yield from (self._objects if inner_suffix(file) in JSON_SUFFIXES else self._lines)(file, report)

    def _objects(self, file: Path, report: Report) -> Iterator[Tagged]:
        for number, text in read_text(file, report):
            entry = json_object(text, self.keys)
            found = entry if isinstance(entry, str) else _two_lists(entry[self.keys[0]], entry[self.keys[1]], self.keys)
            if isinstance(found, str):
                report.drop("broken", file, number, found, text)
            else:
                yield Tagged(tuple(found[0]), tuple(found[1]), str(file), number)

    def _lines(self, file: Path, report: Report) -> Iterator[Tagged]:
        held: list[tuple[int, bytes]] = []
        for number, raw in enumerate(raw_lines(file), start=1):
            if raw.strip() and not raw.startswith(DOCUMENT_START.encode()):
                held.append((number, raw))
            else:
                yield from self._sentence(held, file, report)
                held = []
        yield from self._sentence(held, file, report)

    def _sentence(self, lines: list[tuple[int, bytes]], file: Path, report: Report) -> Iterator[Tagged]:
        if not lines:
            return
        report.read += 1
        words, tags = [], []
        for number, raw in lines:
            text = decode_utf8(raw)
            shown = raw.decode("utf-8", "backslashreplace")
            found = "not UTF-8" if text is None else select_columns(text.split(), self.columns, 2, "a space or a tab")
            if isinstance(found, str):
                report.drop("broken", file, number, found, shown)
                return
            words.append(found[0])
            tags.append(found[1])
        yield Tagged(tuple(words), tuple(tags), str(file), lines[0][0])


def _two_lists(words: object, tags: object, keys: Sequence[str]) -> tuple[list[str], list[str]] | str:
    for key, value in zip(keys, (words, tags), strict=True):
        if not isinstance(value, list) or not all(isinstance(item, str) and is_unicode(item) for item in value):
            return f"{key!r} is not a list of strings"
    assert isinstance(words, list) and isinstance(tags, list)
    if len(words) != len(tags):
        return f"{len(words)} in {keys[0]!r}, but {len(tags)} in {keys[1]!r}"
    if not all(word.strip() for word in words):
        return f"a word in {keys[0]!r} is empty"
    if not words:
        return f"{keys[0]!r} is empty"
    return words, tags
