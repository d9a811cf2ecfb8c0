"""Texts with a target: a label, a score, or a tag per word."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeInt

from allyouneed.data.files.formats import read as formats
from allyouneed.data.files.lines import DataFile, decode_utf8, inner_suffix, raw_lines
from allyouneed.data.files.objects import is_unicode
from allyouneed.data.files.readers import (
    OBJECT_SUFFIXES,
    TABLE_SUFFIXES,
    Files,
    Paths,
    Report,
    expand_paths,
)
from allyouneed.data.files.tables import (
    LISTED,
    Column,
    Layout,
    TableFiles,
    read_objects,
    read_rows,
    sample_columns,
    select_columns,
)
from allyouneed.errors import UserError

TAG_SUFFIXES = (*TABLE_SUFFIXES, ".conll", ".bio", ".iob", "")
SAMPLE = 2000  # rows that tell what the columns are
CHECK_EVERY = 1 << 20  # texts between checks: too many labels are refused before all are collected
MANY_LABELS = 20  # fewer are never refused
HEADER_WORDS = {"label", "labels", "class", "category", "target", "tag", "sentiment", "score", "intent", "topic", "y"}
DOCUMENT_START = "-DOCSTART-"  # separates documents in CoNLL-2003; not a word

Columns = Annotated[tuple[Column, ...], Field(min_length=2, max_length=3)]
Keys = Annotated[tuple[str, ...], Field(min_length=2, max_length=3)]


class Labelled(NamedTuple):
    """One text or two, with a label; `several`: any number of labels, if a text may have them."""

    texts: tuple[str, ...]
    label: str
    file: str
    line: int
    several: tuple[str, ...] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,) if self.several is None else self.several

    @property
    def metadata(self) -> str:
        return self.label


class LabelledFiles(TableFiles):
    """Files of labelled texts, one example per line. `columns` and `keys` select the text, an optional second text, and
    the label last."""

    examples: ClassVar[str] = "texts"
    kind: Literal["labelled"] = "labelled"
    path: Paths
    """A file or a list of files."""
    columns: Columns | None = None
    """Columns of the text, an optional second text, and the label, by index from 0 or by name; default: by `keys`, or
    in this order."""
    keys: Keys = ("text", "label")
    """The same names for JSON, and for a header without `columns`."""
    between: Annotated[str, Field(min_length=1)] | None = None
    """Stands between the labels of a text, which may have any number of them (`task.several`); JSON may have lists."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    @property
    def layout(self) -> Layout:
        pairs = self.columns is not None and len(self.columns) > len(self.keys)
        return replace(super().layout, keys=("text", "second", "label") if pairs else self.keys)

    def read(self, report: Report) -> Iterator[Labelled]:
        for file, number, (*texts, label) in read_rows(self.sources(), self.layout, report, self.layout.names[-1]):
            if self.between is not None:
                names = label.replace(self.between, LISTED).split(LISTED)
                several = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
                yield Labelled(tuple(texts), label, str(file), number, several)
            elif LISTED in label:
                report.drop("broken", file, number, "a list of labels; set task.several: true", "\t".join(texts))
            elif label.strip():
                yield Labelled(tuple(texts), label.strip(), str(file), number)
            else:
                report.drop("broken", file, number, "the label is empty", "\t".join(texts))

    def suggestion(self) -> str:
        """Which column looks like the label: the one with the fewest values, if many rows share them."""
        file = self.sources()[0]
        columns = sample_columns(file, self.layout, SAMPLE)
        counts = {name: len(set(cells)) for name, cells in columns.items()}
        likely = [name for name, cells in columns.items() if 1 < counts[name] <= len(cells) / 2]
        if not likely or len(columns) < 2:
            return f"No column of {file} looks like a label"
        label = min(likely, key=counts.__getitem__)
        text = max((name for name in columns if name != label), key=lambda name: sum(map(len, columns[name])))
        option = "keys" if inner_suffix(file) in OBJECT_SUFFIXES else "columns"
        return (
            f"Column {label} of {file} looks like the label, with {counts[label]:,} values in the first "
            f"{len(columns[label]):,} lines: set {option}: [{text}, {label}]"
        )


def classes(files: Sequence[LabelledFiles]) -> list[str]:
    """All labels, sorted. Refused are texts in the place of labels, and a header in the place of an example."""
    counts, texts, first = Counter[str](), 0, list[Labelled]()
    for entry in files:
        file = ""
        for example in entry.read(Report()):
            if example.file != file and entry.header is None and example.several is None:
                first.append(example)
            file, texts = example.file, texts + 1
            counts.update(example.labels)
            if texts % CHECK_EVERY == 0:
                _check_repeated(files, texts, len(counts))
    _check_repeated(files, texts, len(counts))
    for example in first:
        if counts[example.label] == 1 and example.label.lower() in HEADER_WORDS:
            raise UserError(
                f"{example.file}: the first line has the label {example.label!r}, and no other line has it: a header? "
                "Set header: true, or header: false if it is an example"
            )
    return sorted(counts)


def _check_repeated(files: Sequence[LabelledFiles], texts: int, labels: int) -> None:
    """Refuse a column with about one value per text: these are not labels."""
    if labels > MANY_LABELS and labels > texts / 2:
        raise UserError(
            f"data.train: {labels:,} different labels for {texts:,} texts; is it the right column? "
            + files[0].suggestion()
        )


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


class ScoredFiles(TableFiles):
    """Files of scored text pairs, one per line."""

    examples: ClassVar[str] = "scored pairs"
    has_two_texts: ClassVar[bool] = True
    kind: Literal["scored"] = "scored"
    path: Paths
    """A file or a list of files."""
    columns: tuple[Column, Column, Column] | None = None
    """Columns of both texts and the score, by index from 0 or by name; default: by `keys`, or in this order."""
    keys: tuple[str, str, str] = ("first", "second", "score")
    """The same names for JSON, and for a header without `columns`."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    def read(self, report: Report) -> Iterator[Scored]:
        for file, number, (first, second, text) in read_rows(
            self.sources(), self.layout, report, self.layout.names[-1]
        ):
            score = _number(text)
            if score is None:
                hint = " (a header? set header: true)" if number == 1 else ""
                report.drop("broken", file, number, f"the score {text!r} is not a number{hint}", f"{first}\t{second}")
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
    """A file or a list of files."""
    columns: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """Columns of word and tag, by index from 0; default: there are exactly two."""
    keys: tuple[str, str] = ("tokens", "tags")
    """In JSON: keys of the list of words and the list of tags."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, TAG_SUFFIXES)

    def read(self, report: Report) -> Iterator[Tagged]:
        for file in self.sources():
            yield from (self._objects if inner_suffix(file) in OBJECT_SUFFIXES else self._lines)(file, report)

    def _objects(self, file: DataFile, report: Report) -> Iterator[Tagged]:
        for number, entry, text in read_objects(file, self.keys, report):
            found = _two_lists(entry[self.keys[0]], entry[self.keys[1]], self.keys)
            if isinstance(found, str):
                report.drop("broken", file, number, found, text)
            else:
                yield Tagged(tuple(found[0]), tuple(found[1]), str(file), number)

    def _lines(self, file: DataFile, report: Report) -> Iterator[Tagged]:
        held: list[tuple[int, bytes]] = []
        for number, raw in _numbered(file):
            if raw.strip() and not raw.startswith(DOCUMENT_START.encode()):
                held.append((number, raw))
            else:
                yield from self._sentence(held, file, report)
                held = []
        yield from self._sentence(held, file, report)

    def _sentence(self, lines: list[tuple[int, bytes]], file: DataFile, report: Report) -> Iterator[Tagged]:
        if not lines:
            return
        report.read += 1
        words, tags = [], []
        for number, raw in lines:
            text = decode_utf8(raw)
            shown = raw.decode("utf-8", "backslashreplace")
            cells = (text or "").split(file.separator)
            found = file.not_text if text is None else select_columns(cells, self.columns, 2, "a space or a tab")
            if isinstance(found, str):
                report.drop("broken", file, number, found, shown)
                return
            words.append(found[0])
            tags.append(found[1])
        yield Tagged(tuple(words), tuple(tags), str(file), lines[0][0])


def _numbered(file: DataFile) -> Iterator[tuple[int, bytes]]:
    """Lines, or the rows of a sheet: one that is left out in the numbers is empty."""
    if inner_suffix(file) not in formats.CELLS:
        yield from enumerate(raw_lines(file), start=1)
        return
    last = 0
    for number, cells in formats.rows_as_cells(file):
        if number > last + 1:
            yield last + 1, b""
        yield number, "\t".join(cells).encode("utf-8", "surrogateescape")
        last = number


def _two_lists(words: object, tags: object, keys: Sequence[str]) -> tuple[list[str], list[str]] | str:
    if isinstance(tags, list):  # some datasets number their tags
        tags = [str(tag) if type(tag) is int else tag for tag in tags]
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
