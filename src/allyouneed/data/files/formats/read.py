"""Tables that are not text: which module reads a suffix. A reader yields the rows of a file as objects, or as cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from allyouneed.data.files.lines import DataFile, inner_suffix

OBJECTS = dict.fromkeys((".parquet", ".arrow", ".feather"), "columnar")
OBJECTS |= dict.fromkeys((".db", ".sqlite", ".sqlite3"), "database")
CELLS = {".xlsx": "spreadsheet"}
SUFFIXES = (*OBJECTS, *CELLS)


def rows_as_objects(file: DataFile, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Every row by column name, at least the columns of these (dotted) keys; all, if there are none."""
    found: Iterator[Mapping[str, Any]] = _reader(OBJECTS, file).rows(file, wanted)
    return found


def rows_as_cells(file: DataFile) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of every row that is not empty."""
    found: Iterator[tuple[int, list[str]]] = _reader(CELLS, file).rows(file)
    return found


def _reader(table: Mapping[str, str], file: DataFile) -> Any:
    return import_module(f"allyouneed.data.files.formats.{table[inner_suffix(file)]}")
