"""CSV and TSV: the cells of chosen columns are translated; everything else stays as it is, byte for byte.

A cell that was quoted stays quoted; another one is quoted if its translation needs it. In TSV, a quote that does not
enclose a whole cell is a character like others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

from allyouneed.apps.translate.documents.parts import Document, Part, Unit
from allyouneed.apps.translate.spans.spans import Passage
from allyouneed.errors import UserError, near

DELIMITERS = ",;\t|"
SAMPLED, ROWS = 1 << 16, 50  # characters and rows that the delimiter is detected from
SHOWN = 20  # columns named in a message


class Cell(NamedTuple):
    """`raw`: as it is in the file; `end`: what follows, the delimiter or the end of the row."""

    raw: str
    value: str
    end: str


def read_csv(text: str, *, column: str | Sequence[str] = (), header: bool = True) -> Document:
    """`column`: one or several, by the names in the first row or by number, from 1. Without `header`, the first row is
    translated like the others."""
    return _read(text, _detect_delimiter(text), True, column, header)


def read_tsv(text: str, *, column: str | Sequence[str] = (), header: bool = True) -> Document:
    """The same, separated by tabs."""
    return _read(text, "\t", False, column, header)


def _read(text: str, delimiter: str, strict: bool, column: str | Sequence[str], header: bool) -> Document:
    bare = text.removeprefix("\ufeff")
    first = next(_rows(bare, delimiter, strict), (1, []))[1]
    given = [column] if isinstance(column, str) else list(column)
    chosen = set[int]() if not first else _choose([cell.value for cell in first], given, header)
    encode, parts = partial(_encode, delimiter), list[Part]([text[: len(text) - len(bare)]])
    begun = not header  # past the names of the columns
    for line, row in _rows(bare, delimiter, strict):
        wanted = chosen if begun and any(cell.raw.strip() for cell in row) else ()
        begun = True
        if wanted and len(row) <= max(wanted):
            raise UserError(f"line {line}: {len(row)} columns, expected at least {max(wanted) + 1}; mend the row")
        for number, cell in enumerate(row):
            if number in wanted and any(map(str.isalpha, cell.value)):
                quoted = cell.raw != cell.value
                parts.append(Unit(Passage(cell.value, {}), (cell.raw,), {}, _quote if quoted else encode))
            else:
                parts.append(cell.raw)
            parts.append(cell.end)
    return Document(parts)


def _choose(names: list[str], given: Sequence[str], header: bool) -> set[int]:
    """The places of the given columns, from 0."""
    known = f"1 to {len(names)}"
    if header:
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        known = f"{', '.join(name.strip() for name in names[:SHOWN])}{more}; or {known}"
    if not given:
        raise UserError(f"a table: name the column that is translated (--column: {known})")
    places = set[int]()
    for name in given:
        same = [place for place, one in enumerate(names) if header and one.strip() == name.strip()]
        if len(same) > 1:
            raise UserError(f"{len(same)} columns are named {name!r}; choose one by its number")
        if not same and name.isdecimal() and 1 <= int(name[:9]) <= len(names):
            same = [int(name[:9]) - 1]
        if not same:
            raise UserError(f"no column {name!r}{near(name, names) if header else ''} (there are: {known})")
        places.update(same)
    return places


@cache
def _pattern(delimiter: str) -> re.Pattern[str]:
    mark = re.escape(delimiter)
    return re.compile(
        rf'(?P<quoted>"(?:[^"]|"")*+"(?=[{mark}\r\n]|\Z))?(?P<plain>[^{mark}\r\n]*)(?P<end>{mark}|\r\n|[\r\n]|\Z)'
    )


def _rows(text: str, delimiter: str, strict: bool) -> Iterator[tuple[int, list[Cell]]]:
    """Each row, and the line that it begins in."""
    pattern, at, line, row = _pattern(delimiter), 0, 1, list[Cell]()
    begin = line
    while at < len(text) or row:
        found = pattern.match(text, at)
        assert found is not None  # it matches any text
        quoted, plain, end = found["quoted"], found["plain"], found["end"]
        if strict and quoted is None and plain.startswith('"'):
            raise UserError(f"line {line}: {plain[:60]!r}: a quote is not closed, or something follows it in its cell")
        raw = plain if quoted is None else quoted
        row.append(Cell(raw, raw if quoted is None else raw[1:-1].replace('""', '"'), end))
        at = found.end()
        line += raw.count("\n") + end.count("\n")
        if end != delimiter:
            yield begin, row
            begin, row = line, []


def _detect_delimiter(text: str) -> str:
    """The one that divides the first row, and most rows into the same number of columns."""
    sample = text[:SAMPLED].removeprefix("\ufeff")

    def score(delimiter: str) -> tuple[bool, int, int]:
        widths = [len(row) for _, row in islice(_rows(sample, delimiter, False), ROWS)]
        usual, rows = Counter(width for width in widths if width > 1).most_common(1)[0] if max(widths) > 1 else (1, 0)
        return widths[0] > 1, rows, usual

    return max(DELIMITERS, key=score) if sample else DELIMITERS[0]


def _quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _encode(delimiter: str, text: str) -> str:
    """A cell that was not quoted."""
    if delimiter == "\t":
        return re.sub("[\t\r\n]", " ", text)
    return _quote(text) if re.search(f'["\r\n{re.escape(delimiter)}]', text) else text
