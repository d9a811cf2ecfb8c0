"""Rows of a table: lines of cells (TSV, CSV), or JSON objects (one per line, or in an array).

The suffix decides what a file is: `.json`, `.jsonl` and `.ndjson` are JSON; `.csv` has commas or semicolons, quoted
cells and a header; everything else has tabs, and its quotes are characters like any other, for sentences contain them.
`header` and `quotes` say otherwise. A file without a header may still have one: a first line of exactly the names that
are looked for. Files are read in a stream.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt

from allyouneed.data.files.lines import inner_suffix, raw_lines, read_chunks
from allyouneed.data.files.readers import JSON_SUFFIXES, Files, Report, read_text
from allyouneed.errors import UserError, near

Column = NonNegativeInt | Annotated[str, Field(min_length=1)]  # an index from 0, or a name in the header
Row = tuple[Path, int, list[str]]  # file, line number, the selected cells
WORDS = {1: "one", 2: "two", 3: "three"}
LONGEST_CELL = 1 << 24  # characters; a quote that is never closed ends there
LISTED = "\x1f"  # between the elements of a list in a cell
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
    quotes: bool | None = None
    """Whether cells may be quoted; default: in .csv files."""

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
    quotes: bool | None = None
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


def read_rows(files: Sequence[Path], layout: Layout, report: Report, numbers: str = "") -> Iterator[Row]:
    """The selected cells of every row, in the order of `layout.keys`. In JSON, the value of key `numbers` may be a
    number, or a list of texts, joined by `LISTED`."""
    for file in files:
        if inner_suffix(file) in JSON_SUFFIXES:
            yield from _object_rows(file, layout, report, numbers)
        else:
            yield from _table_rows(file, layout, report)


# --- lines of cells -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableDialect:
    separator: str
    quotes: bool
    has_header: bool  # by convention

    @property
    def name(self) -> str:
        return {"\t": "a tab", ",": "a comma", ";": "a semicolon"}[self.separator]


def _dialect(file: Path, layout: Layout) -> TableDialect:
    if inner_suffix(file) == ".csv":
        first = next(raw_lines(file)).decode("utf-8", "replace")
        bare = re.sub(r'"[^"]*"', "", first)
        separator = max(",;\t", key=bare.count)  # of equals, the first
        if separator != "\t":
            return TableDialect(separator, layout.quotes is not False, True)
    return TableDialect("\t", bool(layout.quotes), False)


def has_columns(file: Path, names: Sequence[str]) -> bool:
    """Whether the first line of a table names these columns."""
    layout = Layout(None, names)
    return all(_find(name, _first_row(file, _dialect(file, layout))) is not None for name in names)


def _first_row(file: Path, dialect: TableDialect) -> list[str]:
    return next((cells for _, cells, _ in _cells(file, dialect, Report())), [])


def _cells(file: Path, dialect: TableDialect, report: Report, skip: int = 0) -> Iterator[tuple[int, list[str], str]]:
    """Line number, cells and text of every row after the first `skip`."""
    if dialect.quotes:
        yield from _quoted_cells(file, dialect, report, skip)
        return
    for number, text in read_text(file, report, skip):
        yield number, text.split(dialect.separator), text


def _quoted_cells(file: Path, dialect: TableDialect, report: Report, skip: int) -> Iterator[tuple[int, list[str], str]]:
    """Cells by the rules of RFC 4180: a quoted cell may contain separators, line breaks and doubled quotes."""
    lines = (raw.decode("utf-8", "surrogateescape") + "\n" for raw in raw_lines(file))
    rows = csv.reader(lines, delimiter=dialect.separator, strict=True)
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
            report.drop("broken", file, number, "not UTF-8", shown)


def _next_row(rows: Iterator[list[str]]) -> list[str]:
    """The process has one limit for all cells, by default less than a document: other readers keep theirs."""
    with READING:
        before = csv.field_size_limit(LONGEST_CELL)
        try:
            return next(rows)
        finally:
            csv.field_size_limit(before)


def _table_rows(file: Path, layout: Layout, report: Report) -> Iterator[Row]:
    dialect, columns, count = _dialect(file, layout), layout.columns, len(layout.keys)
    first = _first_row(file, dialect)
    header = _is_header(first, layout, dialect)
    chosen = _resolve(file, first, layout) if header else _indices(file, columns)
    if header and layout.header is None and columns is not None and not any(isinstance(c, str) for c in columns):
        report.read += 1
        report.drop("header", file, 1, "column names; set header: false if it is an example", "\t".join(first))
    if dialect.quotes:
        for number, cells, text in _quoted_cells(file, dialect, report, skip=int(header)):
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


def _indices(file: Path, columns: Sequence[int | str] | None) -> list[int] | None:
    if columns is None:
        return None
    for column in columns:
        if isinstance(column, str):
            raise UserError(f"{file}: column {column!r} is a name, but header: false; use indices from 0")
    return [column for column in columns if isinstance(column, int)]


def _resolve(file: Path, names: Sequence[str], layout: Layout) -> list[int] | None:
    """The indices of the columns in this header; None: all, in order."""
    wanted = layout.keys if layout.columns is None else layout.columns
    found = [column if isinstance(column, int) else _find(column, names) for column in wanted]
    if None not in found:
        return [column for column in found if column is not None]
    if layout.header and layout.columns is None and len(names) == len(wanted):
        return None
    missing = next(str(name) for name, at in zip(wanted, found, strict=True) if at is None)
    listed = ", ".join(names)
    example = ", ".join(names[: len(wanted)])
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


def _object_rows(file: Path, layout: Layout, report: Report, numbers: str) -> Iterator[Row]:
    names = layout.names
    for number, entry, text in read_objects(file, names, report, layout.key_option):
        found = _values(entry, names, numbers)
        if isinstance(found, str):
            report.drop("broken", file, number, found, text)
        else:
            yield file, number, found


def read_objects(
    file: Path, keys: Sequence[str], report: Report, option: str = "keys"
) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """Line number, value and text of every object with these keys. `option`: what sets the keys, for messages."""
    for number, entry, text in _entries(file, report):
        problem = entry if isinstance(entry, str) else _problem(entry, keys, option)
        if problem:
            report.drop("broken", file, number, problem, text)
        else:
            yield number, entry, text


def _problem(entry: Any, keys: Sequence[str], option: str) -> str:
    if not isinstance(entry, dict):
        return f"a JSON {type(entry).__name__}, expected an object"
    for key in keys:
        if key not in entry:
            return f"no key {key!r} (keys: {', '.join(map(repr, entry)) or 'none'}); name yours with '{option}'"
    return ""


def _entries(file: Path, report: Report) -> Iterator[tuple[int, Any, str]]:
    """The values of a file: the elements of an array, or one per line. A string is an error message."""
    start = next(read_chunks(file), b"").removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        for number, value in array_elements(file):
            report.read += 1
            yield number, value if not isinstance(value, str) else "a JSON str, expected an object", json.dumps(value)
        return
    for number, text in read_text(file, report):
        try:
            value = json.loads(text)
            yield number, "a JSON str, expected an object" if isinstance(value, str) else value, text
        except (ValueError, RecursionError) as error:
            if number == 1 and inner_suffix(file) == ".json":
                raise UserError(f"{file}: expected an array of objects, [{{…}}, …], or one object per line") from None
            yield number, f"not JSON: {error}", text


def array_elements(file: Path) -> Iterator[tuple[int, Any]]:
    """Line number and value of each element of a file that is one JSON array; at most a few of them are in memory."""
    chunks, decode, space = _text_chunks(file), json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    text = next(chunks).removeprefix("\ufeff")
    at = text.index("[") + 1
    line, more = 1 + text.count("\n", 0, at), True
    while True:
        start = at
        at = space.match(text, at).end()  # type: ignore[union-attr]
        try:
            if text.startswith("]", at):
                return
            value, end = decode(text, at)
            if end == len(text) and more:  # a number may continue
                raise ValueError("incomplete")
        except RecursionError:
            raise UserError(f"{file}:{line}: not JSON: nested too deeply") from None
        except ValueError as error:  # perhaps incomplete: read as much again
            fresh = "".join(islice(chunks, 1 + len(text) // (1 << 18)))
            more = bool(fresh)
            if not more:
                breaks = text.count("\n", start, at)
                reason = getattr(error, "msg", error) if at < len(text) else "the array does not end; is it truncated?"
                raise UserError(f"{file}:{line + breaks}: not JSON: {reason}") from None
            text, at = text[start:] + fresh, 0
            continue
        line += text.count("\n", start, at)
        yield line, value
        line += text.count("\n", at, end)
        text, at = (text[end:], 0) if end > 1 << 18 else (text, end)


def _text_chunks(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in read_chunks(file):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8; convert it with `iconv`") from None


def _values(entry: Mapping[str, Any], keys: Sequence[str], numbers: str) -> list[str] | str:
    for key in keys:
        value = entry[key]
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


def is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# --- what the columns look like -------------------------------------------------------------------------------------


def sample_columns(file: Path, layout: Layout, rows: int) -> dict[int | str, list[str]]:
    """The first cells of every column, by name where there are names, else by index."""
    found: dict[int | str, list[str]] = {}
    if inner_suffix(file) in JSON_SUFFIXES:
        for _, entry, _ in islice(read_objects(file, (), Report()), rows):
            for key, value in entry.items():
                if isinstance(value, str | int | float):
                    found.setdefault(key, []).append(str(value))
        return found
    dialect = _dialect(file, layout)
    first = _first_row(file, dialect)
    header = _is_header(first, layout, dialect)
    for _, cells, _ in islice(_cells(file, dialect, Report(), skip=int(header)), rows):
        for at, cell in enumerate(cells):
            name = first[at].strip() if header and at < len(first) else at
            found.setdefault(name, []).append(cell)
    return found
