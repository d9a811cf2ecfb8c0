"""Plain text: documents, as lines, paragraphs or whole files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from allyouneed.data.files.lines import DataFile, decode_utf8, inner_suffix, raw_lines
from allyouneed.data.files.readers import (
    CELL_SUFFIXES,
    OBJECT_SUFFIXES,
    Files,
    Paths,
    Report,
    expand_paths,
)
from allyouneed.data.files.tables import Layout, has_columns, named_rows, read_rows
from allyouneed.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", "", *CELL_SUFFIXES, *OBJECT_SUFFIXES)


class TextDocument(NamedTuple):
    """A text and where it begins."""

    text: str
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def metadata(self) -> str:
        return ""


class TextFiles(Files):
    """Files of documents: each a paragraph (up to an empty line), a line, or a whole file; in JSON, the value of `key`,
    in a table with a header, the cell of that column."""

    examples: ClassVar[str] = "documents"
    kind: Literal["text"] = "text"
    path: Paths
    """A file or a list of files."""
    document: Literal["paragraph", "line", "file"] = "paragraph"
    """What counts as one document of a text file."""
    key: str = "text"
    """Key of the text in JSON, or its column in a table with a header."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, TEXT_SUFFIXES)

    def read(self, report: Report) -> Iterator[TextDocument]:
        for file in self.sources():
            if self._is_table(file):
                layout = Layout(None, (self.key,), option="key")
                for _, number, found in read_rows([file], layout, report):
                    yield TextDocument(found[0], str(file), number)
            else:
                yield from self._documents(file, report)

    def rows(self, report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each document with the other columns of its row."""
        for file in self.sources():
            if not self._is_table(file):
                yield from ((one.text, {}) for one in self._documents(file, report))
                continue
            before = report.dropped
            for number, row in named_rows(file, Layout(None, (self.key,)), report):
                named = {str(name): value for name, value in row.items() if not isinstance(value, bytes)}
                if isinstance(text := named.pop(self.key, None), str):
                    yield text, named
                    before = -1
                    continue
                report.drop("broken", file, number, f"{self.key!r} is not a text", str(row))
            if report.dropped > before >= 0:
                raise UserError(f"{file}: no texts in {self.key!r} (columns: {', '.join(named)}); name their column")

    def _is_table(self, file: DataFile) -> bool:
        """All but plain text, which a TSV is without the key in its header."""
        suffix = inner_suffix(file)
        if suffix == ".tsv":
            return has_columns(file, (self.key,))
        return suffix in (*OBJECT_SUFFIXES, *CELL_SUFFIXES)

    def _documents(self, file: DataFile, report: Report) -> Iterator[TextDocument]:
        """Empty lines separate documents, or belong to a document that is a whole file; they are never documents."""
        held: list[bytes] = []
        begin = 1
        for number, raw in enumerate(raw_lines(file), start=1):
            if self.document != "file" and not raw.strip():
                yield from _document(held, file, begin, report)
                held = []
                continue
            begin = begin if held else number
            held.append(raw)
            if self.document == "line":
                yield from _document(held, file, begin, report)
                held = []
        yield from _document(held, file, begin, report)


def _document(lines: list[bytes], file: DataFile, begin: int, report: Report) -> Iterator[TextDocument]:
    if not lines:
        return
    report.read += 1
    texts = [decode_utf8(raw) for raw in lines]
    for number, (text, raw) in enumerate(zip(texts, lines, strict=True), start=begin):
        if text is None:
            report.drop("broken", file, number, file.not_text, raw.decode("utf-8", "backslashreplace"))
            return
    yield TextDocument("\n".join(text for text in texts if text is not None), str(file), begin)
