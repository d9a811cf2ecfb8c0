"""Sentence pairs, from one file or from two files aligned line by line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from allyouneed.data.files.lines import DataFile, decode_utf8, raw_lines
from allyouneed.data.files.readers import (
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    Paths,
    Report,
    expand_paths,
    join_paths,
)
from allyouneed.data.files.tables import Column, Layout, TableFiles, read_rows
from allyouneed.errors import UserError

SEGMENTATIONS = 8
MAX_CONTEXT = 100  # pairs
Tag = Annotated[str, StringConstraints(pattern=r"^[^\W\d_][\w-]*$")]


class Pair(NamedTuple):
    """Two sentences and their origin; `to`: target language, for multilingual models; `weight`: how many times an epoch
    reads the pair; `bpe_dropout` and `segmentation`: of a random segmentation, its rate and number. `context`: the
    pairs (source, target) before it in its document, nearest last. `others`: further right targets."""

    source: str
    target: str
    file: str
    line: int
    to: str | None = None
    from_: str | None = None
    weight: float = 1.0
    bpe_dropout: float | None = None
    segmentation: int = 0
    context: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return self.source, self.target

    @property
    def metadata(self) -> str:
        before = "".join(f"\x1e{source}\x1f{target}" for source, target in self.context)
        return (self.to or "") + (f" {self.segmentation}" if self.segmentation else "") + before


class PairFiles(TableFiles):
    """Files of sentence pairs: `path` (both sides in one file) or `source` and `target` (aligned line by line)."""

    examples: ClassVar[str] = "pairs"
    has_two_texts: ClassVar[bool] = True
    location_keys: ClassVar[tuple[str, ...]] = ("path", "source", "target")
    kind: Literal["pairs"] = "pairs"
    path: Paths | None = None
    """Files with both sides: tables or JSON."""
    source: Paths | None = None
    """Instead of `path`: files of sources, aligned line by line with `target`."""
    target: Paths | None = None
    """The targets of `source`."""
    columns: tuple[Column, ...] | None = None
    """Columns of source and target, by index from 0 or by name; default: by `keys`, or the only two. Further ones are
    of other right targets, for scoring (`correction`)."""
    keys: tuple[str, str] = ("source", "target")
    """The same names for JSON, and for a header without `columns`."""
    from_: Tag | None = Field(default=None, alias="from")
    """Source language, for multilingual models."""
    to: Tag | None = None
    """Target language, for multilingual models."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How many times an epoch reads each pair; 0.5: with probability 1/2."""
    bpe_dropout: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Segment the training texts at random: each BPE merge is left out with this probability; usual: 0.1."""
    segmentations: Annotated[int, Field(ge=1, le=1000)] | None = None
    """With `bpe_dropout`: how many segmentations of each pair are prepared; an epoch reads one of them (default: 8)."""
    context: Annotated[int, Field(ge=0, le=MAX_CONTEXT)] | None = None
    """Pairs before each pair in its document, read with it; default: as the task says. 0 for files whose lines are in
    no order."""
    document: Column | None = None
    """Column with the document of each pair; default: a blank line ends a document, and so does the end of a file."""

    @property
    def direction(self) -> tuple[str | None, str] | None:
        return None if self.to is None else (self.from_, self.to)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        together, apart = self.path is not None, (self.source is not None, self.target is not None)
        if together == any(apart) or any(apart) != all(apart):
            raise ValueError("give either 'path' (pairs in one file) or both 'source' and 'target' (aligned files)")
        if self.columns is not None and len(self.columns) < 2:
            raise ValueError("'columns' names one column; name those of source and target")
        if self.segmentations is not None and self.bpe_dropout is None:
            raise ValueError("'segmentations' counts random segmentations; set 'bpe_dropout' as well, or remove it")
        if not together:
            for name in ("columns", "header", "quotes", "document", "separator", "table", "query"):
                if getattr(self, name) is not None:
                    raise ValueError(f"'{name}' is for a table given by 'path'; aligned files have no columns")
        if isinstance(self.document, int) and self.columns is None:
            raise ValueError("'document' is an index; set 'columns' of source and target as well")
        return self

    def files(self) -> list[Path]:
        if self.path is not None:
            return expand_paths(self.path, TABLE_SUFFIXES)
        return [path for both in self._aligned() for path in both]

    def _aligned(self) -> list[tuple[Path, Path]]:
        left, right = expand_paths(self.source or (), LINE_SUFFIXES), expand_paths(self.target or (), LINE_SUFFIXES)
        if len(left) != len(right):
            raise UserError(
                f"{join_paths(self.source)} is {len(left)} file(s) but {join_paths(self.target)} is {len(right)}; "
                "aligned files come in equal numbers, in the same order"
            )
        return list(zip(left, right, strict=True))

    def read(self, report: Report) -> Iterator[Pair]:
        pairs = self._read_documents(self.context, report) if self.context else self._read_alone(report)
        if self.bpe_dropout is None:
            yield from pairs
            return
        count = self.segmentations or SEGMENTATIONS
        for pair in pairs:
            each = pair._replace(weight=pair.weight / count, bpe_dropout=self.bpe_dropout)
            yield from (each._replace(segmentation=number) for number in range(count))

    def _read_alone(self, report: Report) -> Iterator[Pair]:
        return (pair for pair, _ in self._read(report))

    def _read(self, report: Report) -> Iterator[tuple[Pair, str]]:
        """Pairs, and the document of each if a column has it."""
        besides = self.to, self.from_, self.weight
        if self.path is None:
            for left, right in self._aligned():
                yield from (
                    (Pair(*found, *besides), "")
                    for found in _read_aligned(self.opened(left), self.opened(right), report)
                )
            return
        for file, number, found in read_rows(self.sources(), self.layout, report, str(self.document)):
            last = 2 if self.columns is None else len(self.columns)
            others, document = tuple(filter(None, found[2:last])), "".join(found[last:])
            yield Pair(found[0], found[1], str(file), number, *besides, others=others), document

    @property
    def layout(self) -> Layout:
        found = super().layout
        if not self.context:
            return found
        if self.document is None:
            return replace(found, blanks=True)
        columns = None if self.columns is None else (*self.columns, self.document)
        return replace(found, columns=columns, keys=(*self.keys, str(self.document)), blanks=True)

    def _read_documents(self, count: int, report: Report) -> Iterator[Pair]:
        """Pairs with up to `count` pairs before them; blank lines are not pairs, they end a document."""
        before: deque[tuple[str, str]] = deque(maxlen=count)
        last: tuple[str, str] | None = None
        for pair, document in self._read(report):
            if (pair.file, document) != last:
                before.clear()
            last = pair.file, document
            if not (pair.source.strip() or pair.target.strip()):
                report.read -= 1
                last = None
                continue
            yield pair._replace(context=tuple(before))
            before.append((pair.source, pair.target))


def _read_aligned(left: DataFile, right: DataFile, report: Report) -> Iterator[tuple[str, str, str, int]]:
    sources, targets = raw_lines(left), raw_lines(right)
    number = 0
    while True:
        source, target = next(sources, None), next(targets, None)
        if source is None or target is None:
            break
        number += 1
        report.read += 1
        here, there = decode_utf8(source), decode_utf8(target)
        if here is None or there is None:
            file, raw = (left, source) if here is None else (right, target)
            report.drop("broken", file, number, file.not_text, raw.decode("utf-8", "backslashreplace"))
        else:
            yield here, there, str(left), number
    if source is not None or target is not None:
        counts = [
            number + (line is not None) + sum(1 for _ in rest) for line, rest in ((source, sources), (target, targets))
        ]
        raise UserError(
            f"{left} has {counts[0]} lines but {right} has {counts[1]}; aligned files must match line by line"
        )
