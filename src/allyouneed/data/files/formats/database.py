"""Tables of an SQLite file: one table, or the rows of a query. Nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from allyouneed.data.files.formats import archives
from allyouneed.data.files.lines import DataFile
from allyouneed.errors import UserError, near

ROWS = 1024  # fetched at once


def rows(file: DataFile, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Every row of the table, in its order, or of the query."""
    try:
        with closing(_open(file)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            cursor = database.execute(file.query or f"select * from {_table(database, file)}")
            if cursor.description is None:
                raise UserError(f"{file}: query: gives no rows; write one that selects")
            names = [column[0] for column in cursor.description]
            while found := cursor.fetchmany(ROWS):
                for row in found:
                    yield dict(zip(names, row, strict=True))
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError, MemoryError) as error:
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
    database.execute("pragma query_only = on")
    return database


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
