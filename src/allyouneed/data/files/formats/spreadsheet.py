"""Sheets of an .xlsx file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allyouneed.data.files.formats.archives import check_zip, open_seekable
from allyouneed.data.files.lines import DataFile
from allyouneed.errors import UserError, near
from allyouneed.errors.extras import require

MOST_ROWS, MOST_COLUMNS = 1 << 20, 1 << 14  # of a sheet, by the format
LEAST_ROOM = 1 << 23  # cells; more than the bytes of a file are mostly between its cells and written nowhere


def rows(file: DataFile) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of every row that is not empty; as many cells as the first of them has, or more."""
    require("xlsx", f"{file}: .xlsx")
    from openpyxl import load_workbook

    width = 0
    try:
        with open_seekable(file.path) as stream:
            room = max(LEAST_ROOM, check_zip(file.path, stream))
            book = load_workbook(stream, read_only=True, data_only=True, keep_links=False)
            sheet = _sheet(book, file)
            sheet.reset_dimensions()  # those of the file may be a lie that pads every row
            for number, row in enumerate(sheet.iter_rows(values_only=True), start=1):
                if number > MOST_ROWS or len(row) > MOST_COLUMNS:
                    raise UserError(f"{file}:{number}: more rows or columns than the format allows; save it again")
                room -= len(row)
                if room < 0:
                    raise UserError(f"{file}:{number}: rows of almost nothing but empty cells; delete their columns")
                cells = [_text(value) for value in row]
                while cells and not cells[-1]:
                    cells.pop()
                if cells:
                    width = width or len(cells)
                    yield number, cells + [""] * (width - len(cells))
    except UserError:
        raise
    except Exception as error:  # the library lets any error of the parser through
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(f"{file}: cannot be read as .xlsx ({reason}); save it again, or as .csv") from None


def _sheet(book: Any, file: DataFile) -> Any:
    names = [sheet.title for sheet in book.worksheets]
    if file.table is None and len(names) != 1:
        raise UserError(f"{file}: {len(names)} sheets ({', '.join(names[:20])}); name one with 'table'")
    chosen = names[0] if file.table is None else file.table
    if chosen not in names:
        raise UserError(f"{file}: no sheet {chosen!r}{near(chosen, names)} (sheets: {', '.join(names[:20])})")
    return book[chosen]


def _text(value: Any) -> str:
    """A cell as it is shown: whole numbers without a fraction."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
