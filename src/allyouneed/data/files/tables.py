"""Rows of a table: lines of cells (TSV, CSV), or JSON objects (one per line, or in an array).

The suffix decides what a file is: `.json`, `.jsonl` and `.ndjson` are JSON; `.csv` has commas or semicolons, quoted
cells and a header; everything else has tabs, and its quotes are characters like any other, for sentences contain them.
`header` and `quotes` say otherwise. A file without a header may still have one: a first line of exactly the names that
are looked for. Files are read in a stream.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from allyouneed.data.files.formats import read as formats
from allyouneed.data.files.lines import DataFile, as_data_file, inner_suffix, raw_lines
from allyouneed.data.files.objects import at_path, entries, has_surrogates, is_unicode, paths
from allyouneed.data.files.readers import (
    CELL_SUFFIXES,
    JSON_SUFFIXES,
    OBJECT_SUFFIXES,
    Files,
    Report,
    read_text,
)
from allyouneed.errors import UserError, near

Column = NonNegativeInt | Annotated[str, Field(min_length=1)]  # an index from 0, or a name in the header
Cells = tuple[int, list[str], str]  # number, cells and text of a row
Row = tuple[DataFile, int, list[str]]  # file, line number, the selected cells
WORDS = {1: "one", 2: "two", 3: "three"}
SHOWN_KEYS = 50  # in messages
MOST_COLUMNS = 10_000
LONGEST_CELL = 1 << 24  # characters; a quote that is never closed ends there
LISTED = "\x1f"  # between the elements of a list in a cell
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # perhaps: as JSON and Python write it
READING = Lock()  # while the limit of cells is ours


class TableFiles(Files):
    """Files of rows. `columns`: by index or name; `keys`: the same names for JSON, and for a header without `columns`.
    `header`, `quotes`: None: as the suffix says."""

    columns: tuple[Column, ...] | None = None
    """Columns, by index from 0 or by name."""
    keys: tuple[str, ...]
    """The same names for JSON, and for a header without `columns`."""
    header: bool | None = None
    """Whether the first line of a table names its columns; default: as the suffix and the first line say."""
    quotes: bool | Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Whether cells may be quoted, or the character that quotes them; default: in .csv files."""

    @property
    def layout(self) -> Layout:
        return Layout(self.columns, self.keys, self.header, self.quotes)


@dataclass(frozen=True)
class Layout:
    """How rows are read from a file: see `TableFiles`. `option`: the key that names columns, for messages; `several`:
    there are several such keys. `blanks`: a blank line is a row of empty cells, not a broken one."""

    columns: Sequence[int | str] | None
    keys: Sequence[str]
    header: bool | None = None
    quotes: bool | str | None = None
    option: str = "columns"
    blanks: bool = False
    several: bool = False

    @property
    def names(self) -> Sequence[str]:
        """The keys of a JSON object."""
        named = [name for name in self.columns or () if isinstance(name, str)]
        return named if named and len(named) == len(self.columns or ()) else self.keys

    @property
    def key_option(self) -> str:
        return "keys" if self.option == "columns" else self.option


def read_rows(files: Sequence[Path | DataFile], layout: Layout, report: Report, numbers: str = "") -> Iterator[Row]:
    """The selected cells of every row, in the order of `layout.keys`. In JSON, the value of key `numbers` may be a
    number, or a list of texts, joined by `LISTED`."""
    for file in map(as_data_file, files):
        if inner_suffix(file) in OBJECT_SUFFIXES:
            yield from _object_rows(file, layout, report, numbers)
        else:
            yield from _table_rows(file, layout, report)


# --- lines of cells -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableDialect:
    separator: str
    quote: str | None  # around cells
    has_header: bool  # by convention
    is_text: bool = True

    @property
    def name(self) -> str:
        return {"\t": "a tab", ",": "a comma", ";": "a semicolon"}.get(self.separator, repr(self.separator))


def _dialect(file: DataFile, layout: Layout) -> TableDialect:
    suffix = inner_suffix(file)
    if suffix in formats.CELLS:
        return TableDialect("\t", None, True, is_text=False)
    given = layout.quotes if isinstance(layout.quotes, str) else '"'
    separator = file.separator
    if suffix == ".csv" and separator is None:
        first = next(raw_lines(file)).decode("utf-8", "replace")
        bare = re.sub(r'"[^"]*"', "", first)
        separator = max(",;\t|", key=bare.count)  # of equals, the first
        suffix = ".tsv" if separator == "\t" else suffix
    quoted = suffix == ".csv" if layout.quotes is None else bool(layout.quotes)
    if quoted and len(separator or "\t") > 1:
        raise UserError(f"{file}: separator {separator!r} has several characters; set quotes: false")
    return TableDialect(separator or "\t", given if quoted else None, suffix == ".csv")


def separator_of(file: DataFile) -> str:
    """What separates the cells of a text file."""
    return _dialect(file, Layout(None, ())).separator


def has_columns(file: Path | DataFile, names: Sequence[str]) -> bool:
    """Whether the first line of a table names these columns."""
    file, layout = as_data_file(file), Layout(None, names)
    return all(_find(name, _first_row(file, _dialect(file, layout))) is not None for name in names)


def _first_row(file: DataFile, dialect: TableDialect) -> list[str]:
    found = next((cells for _, cells, _ in _cells(file, dialect, Report())), [])
    if len(found) > MOST_COLUMNS:
        raise UserError(
            f"{file}: {len(found):,} columns; at most {MOST_COLUMNS:,} are read: is it the right separator?"
        )
    return found


def _cells(file: DataFile, dialect: TableDialect, report: Report, skip: int = 0) -> Iterator[Cells]:
    """Line number, cells and text of every row after the first `skip`."""
    if not dialect.is_text:
        for number, cells in islice(formats.rows_as_cells(file), skip, None):
            report.read += 1
            yield number, cells, "\t".join(cells)
        return
    if dialect.quote is not None:
        yield from _quoted_cells(file, dialect, report, skip)
        return
    for number, text in read_text(file, report, skip):
        yield number, text.split(dialect.separator), text


def _quoted_cells(file: DataFile, dialect: TableDialect, report: Report, skip: int) -> Iterator[Cells]:
    """Cells by the rules of RFC 4180: a quoted cell may contain separators, line breaks and doubled quotes."""
    lines = (raw.decode("utf-8", "surrogateescape") + "\n" for raw in raw_lines(file))
    rows = csv.reader(lines, delimiter=dialect.separator, quotechar=dialect.quote, strict=True)
    done = 0
    while True:
        number = rows.line_num + 1
        try:
            cells = _next_row(rows)
        except StopIteration:
            return
        except csv.Error as error:
            report.read += 1
            report.drop("broken", file, number, f"{error} (quotes: false reads quotes as characters)", "")
            continue
        if not cells:
            continue  # an empty line
        done += 1
        if done <= skip:
            continue
        report.read += 1
        text = dialect.separator.join(cells)
        if all(map(is_unicode, cells)):
            yield number, cells, text
        else:
            shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            report.drop("broken", file, number, file.not_text, shown)


def _next_row(rows: Iterator[list[str]]) -> list[str]:
    """The process has one limit for all cells, by default less than a document: other readers keep theirs."""
    with READING:
        before = csv.field_size_limit(LONGEST_CELL)
        try:
            return next(rows)
        finally:
            csv.field_size_limit(before)


def _table_rows(file: DataFile, layout: Layout, report: Report) -> Iterator[Row]:
    dialect, columns, count = _dialect(file, layout), layout.columns, len(layout.keys)
    first = _first_row(file, dialect)
    header = _is_header(first, layout, dialect)
    chosen = _resolve(file, first, layout) if header else _indices(file, columns)
    if header and layout.header is None and columns is not None and not any(isinstance(c, str) for c in columns):
        report.read += 1
        report.drop("header", file, 1, "column names; set header: false if it is an example", "\t".join(first))
    if dialect.quote is not None or not dialect.is_text:
        for number, cells, text in _cells(file, dialect, report, skip=int(header)):
            found = select_columns(cells, chosen, count, dialect.name)
            if isinstance(found, str):
                report.drop("broken", file, number, found, text)
            else:
                yield file, number, found
        return
    separator, name = dialect.separator, dialect.name
    for number, text in read_text(file, report, skip=int(header)):
        found = select_columns(text.split(separator), chosen, count, name)
        if isinstance(found, str) and layout.blanks and not text.strip():
            found = [""] * count
        if isinstance(found, str):
            quoted = "; quoted cells? set quotes: true" if text.lstrip().startswith('"') else ""
            report.drop("broken", file, number, found + quoted, text)
        else:
            yield file, number, found


def _is_header(first: Sequence[str], layout: Layout, dialect: TableDialect) -> bool:
    if layout.header is not None:
        return layout.header
    if layout.columns is None:
        return dialect.has_header or all(_find(key, first) is not None for key in layout.keys)
    return dialect.has_header or any(isinstance(column, str) for column in layout.columns)


def _indices(file: DataFile, columns: Sequence[int | str] | None) -> list[int] | None:
    if columns is None:
        return None
    for column in columns:
        if isinstance(column, str):
            raise UserError(f"{file}: column {column!r} is a name, but header: false; use indices from 0")
    return [column for column in columns if isinstance(column, int)]


def _resolve(file: DataFile, names: Sequence[str], layout: Layout) -> list[int] | None:
    """The indices of the columns in this header; None: all, in order."""
    wanted = layout.keys if layout.columns is None else layout.columns
    found = [column if isinstance(column, int) else _find(column, names) for column in wanted]
    if None not in found:
        return [column for column in found if column is not None]
    if layout.header and layout.columns is None and len(names) == len(wanted):
        return None
    missing = next(str(name) for name, at in zip(wanted, found, strict=True) if at is None)
    shown = [" ".join(name.split()) for name in names[:SHOWN_KEYS]]
    listed = ", ".join(shown)
    example = ", ".join(shown[: len(wanted)])
    naming = f"{layout.option}: {example}" if layout.option == "key" else f"{layout.option}: [{example}]"
    otherwise = "; if the first line is an example, set header: false" if layout.header is None else ""
    twice = sum(name.strip() == missing for name in names) > 1
    what = f"two columns are named {missing!r}" if twice else f"no column {missing!r}{near(missing, names)}"
    if layout.several:
        raise UserError(f"{file}: {what} (columns: {listed}); name yours with {layout.option}{otherwise}")
    raise UserError(f"{file}: {what} (columns: {listed}); name yours, e.g. {naming}{otherwise}")


def _find(name: str, names: Sequence[str]) -> int | None:
    """The only column of this name; if there is none, the only one that differs in case."""
    plain = [cell.strip() for cell in names]
    for known, wanted in ((plain, name), ([cell.casefold() for cell in plain], name.casefold())):
        if wanted in known:
            return known.index(wanted) if known.count(wanted) == 1 else None
    return None


def select_columns(found: list[str], columns: Sequence[int] | None, count: int, separator: str) -> list[str] | str:
    """The chosen cells, or an error message."""
    if columns is None:
        if len(found) == count:
            return found
        more = len(found) > count
        hint = f"; choose {WORDS.get(count, count)} with 'columns'" if more else f" separated by {separator}"
        return f"{len(found)} column(s), expected {count}{hint}"
    if len(found) <= max(columns):
        return f"{len(found)} column(s), no column {max(columns)} (counted from 0)"
    return [found[column] for column in columns]


# --- JSON objects ---------------------------------------------------------------------------------------------------


def _object_rows(file: DataFile, layout: Layout, report: Report, numbers: str) -> Iterator[Row]:
    names = layout.names
    for number, entry, text in read_objects(file, names, report, layout.key_option):
        found = _values(entry, names, numbers)
        if isinstance(found, str):
            report.drop("broken", file, number, found, text)
        else:
            yield file, number, found


def read_objects(
    file: Path | DataFile, keys: Sequence[str], report: Report, option: str = "keys"
) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """Line number, value and text of every object with these keys. `option`: what sets the keys, for messages."""
    file = as_data_file(file)
    found = _cell_objects(file, report) if inner_suffix(file) in CELL_SUFFIXES else entries(file, keys, report)
    for number, entry, text in found:
        problem = entry if isinstance(entry, str) else _problem(entry, keys, option)
        if problem and isinstance(entry, Mapping) and inner_suffix(file) not in JSON_SUFFIXES:
            raise UserError(f"{file}: {problem}")  # of every row
        if not problem and SURROGATE.search(text) and has_surrogates(entry):
            problem = "an unpaired surrogate, or bytes that are not text"
        if problem:
            report.drop("broken", file, number, problem, text)
        else:
            yield number, _with_paths(entry, keys), text


def _with_paths(entry: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    inner = [key for key in keys if key not in entry]
    return {**entry, **{key: at_path(entry, key) for key in inner}} if inner else entry


def _problem(entry: Any, keys: Sequence[str], option: str) -> str:
    if not isinstance(entry, Mapping):
        return f"a JSON {type(entry).__name__}, expected an object"
    for key in keys:
        try:
            at_path(entry, key)
        except KeyError:
            listed = [path for path, _ in islice(paths(entry), SHOWN_KEYS)]
            return f"no key {key!r} (keys: {', '.join(map(repr, listed)) or 'none'}); name yours with '{option}'"
    return ""


def _cell_objects(file: DataFile, report: Report) -> Iterator[tuple[int, Any, str]]:
    """Rows of cells by the names in the first row."""
    dialect = _dialect(file, Layout(None, ()))
    names = [name.strip() for name in _first_row(file, dialect)]
    for number, cells, text in _cells(file, dialect, report, skip=1):
        found = dict(zip(names, cells, strict=False))
        yield number, found if len(cells) == len(names) else f"{len(cells)} cells, the header has {len(names)}", text


def _values(entry: Mapping[str, Any], keys: Sequence[str], numbers: str) -> list[str] | str:
    for key in keys:
        value = entry[key]
        if value is None:
            return f"{key!r} is empty"
        if (
            key == numbers
            and isinstance(value, list)
            and all(isinstance(one, str) and is_unicode(one) for one in value)
        ):
            continue
        number = key == numbers and isinstance(value, int | float) and not isinstance(value, bool)
        if not number and not isinstance(value, str):
            return f"{key!r} is not a string but {type(value).__name__}"
        if isinstance(value, str) and not is_unicode(value):
            return f"{key!r} contains an unpaired surrogate"
    return [LISTED.join(entry[key]) if isinstance(entry[key], list) else str(entry[key]) for key in keys]


# --- what the columns look like -------------------------------------------------------------------------------------


def named_rows(file: Path | DataFile, layout: Layout, report: Report) -> Iterator[tuple[int, dict[int | str, Any]]]:
    """The number and all values of every row, by name where there are names, else by index."""
    file = as_data_file(file)
    if inner_suffix(file) in OBJECT_SUFFIXES:
        for number, entry, _ in read_objects(file, (), report):
            yield number, dict(paths(entry))
        return
    dialect = _dialect(file, layout)
    first = _first_row(file, dialect)
    header = _is_header(first, layout, dialect)
    names = [cell.strip() if header else at for at, cell in enumerate(first)]
    for number, cells, _ in _cells(file, dialect, report, skip=int(header)):
        yield number, {names[at] if at < len(names) else at: cell for at, cell in enumerate(cells)}


def sample_columns(file: Path | DataFile, layout: Layout, rows: int) -> dict[int | str, list[str]]:
    """The first cells of every column, by name where there are names, else by index."""
    found: dict[int | str, list[str]] = {}
    for _, row in islice(named_rows(file, layout, Report()), rows):
        for name, value in row.items():
            if isinstance(value, str | int | float):
                found.setdefault(name, []).append(str(value))
    return found
