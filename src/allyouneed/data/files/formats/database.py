"""Tables of an SQLite file: one table, or the rows of a query. Nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from allyouneed.data.files.formats import archives
from allyouneed.data.files.formats.archives import on_disk
from allyouneed.data.files.lines import DataFile
from allyouneed.errors import UserError, near

ROWS = 1024  # fetched at once
LEAST_ROOM = 1 << 18  # rows
INSTRUCTIONS, STEPS = 1 << 20, 256  # of SQLite between looks; for each byte of the file, without rows
LONGEST = 1 << 28  # bytes of a cell


def rows(file: DataFile, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Every row of the table, in its order, or of the query."""
    try:
        with closing(_open(file)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            chosen = file.query or f"select * from {_table(database, file)}"
            room = max(LEAST_ROOM, on_disk(file.path).stat().st_size)  # a row takes a byte at least
            steps = [0, room * STEPS]
            database.set_progress_handler(lambda: _is_endless(steps), INSTRUCTIONS)
            cursor = database.execute(chosen)
            if cursor.description is None:
                raise UserError(f"{file}: query: gives no rows; write one that selects")
            names = [column[0] for column in cursor.description]
            while found := cursor.fetchmany(ROWS):
                steps[0], room = 0, room - len(found)
                if room < 0 and file.query is None:
                    raise UserError(f"{file}: more rows than bytes: a view without end? Select some with 'query'")
                for row in found:
                    yield dict(zip(names, row, strict=True))
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError, MemoryError) as error:
        if "interrupted" in str(error):
            error = sqlite3.OperationalError("no row for too long: a view without end?")
        what = f"query: {error}" if file.query else f"cannot be read as SQLite ({error}); copy it again"
        raise UserError(f"{file}: {what}") from None


def _open(file: DataFile) -> sqlite3.Connection:
    if archives.split(file.path) is not None:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        with archives.open_seekable(file.path) as packed:
            database.deserialize(packed.read())
    else:
        uri = f"{file.path.absolute().as_uri()}?mode=ro"
        database = sqlite3.connect(uri, uri=True, check_same_thread=False)  # the store is built in any thread
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    for setting in ("query_only = on", "trusted_schema = off", "cell_size_check = on"):
        database.execute(f"pragma {setting}")
    return database


def _is_endless(steps: list[int]) -> bool:
    """Whether a view computes for very long without a row, for the size of the file."""
    steps[0] += INSTRUCTIONS
    return steps[0] > steps[1]


def _table(database: sqlite3.Connection, file: DataFile) -> str:
    known = "select name from sqlite_master where type in ('table', 'view') and name not like 'sqlite_%' order by name"
    names = [str(name) for (name,) in database.execute(known)]
    if file.table is None and len(names) != 1:
        listed = ", ".join(names[:20]) or "none"
        raise UserError(f"{file}: {len(names)} tables ({listed}); name one with 'table', or select with 'query'")
    chosen = names[0] if file.table is None else file.table
    if chosen not in names:
        raise UserError(f"{file}: no table {chosen!r}{near(chosen, names)} (tables: {', '.join(names[:20])})")
    return '"' + chosen.replace('"', '""') + '"'
