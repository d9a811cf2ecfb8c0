"""Logs of what users were shown: the items they had clicked before, the item they were shown, and whether they clicked
it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from allyouneed.config import model_validator
from allyouneed.data.files.lines import DataFile, inner_suffix
from allyouneed.data.files.objects import is_unicode
from allyouneed.data.files.readers import OBJECT_SUFFIXES, TABLE_SUFFIXES, Files, Paths, Report, expand_paths
from allyouneed.data.files.tables import Layout, read_objects, read_rows

SEPARATORS = re.compile(r"[\s,;|]+")  # between the items of a cell
CLICKS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
LONGEST_AGE = (1 << 32) - 1  # as stored
NAMING = "'sequence', 'times', 'time', 'features' and 'click'"

Name = Annotated[str, Field(min_length=1)]


class Impression(NamedTuple):
    """An item shown to a user. `items`: one tuple per column of the sequence (the item, its side information), oldest
    first, the item shown last. `ages`: time from each to the moment it was shown. Values are written `column=value`, so
    that all columns share one vocabulary."""

    items: tuple[tuple[str, ...], ...]
    ages: tuple[int, ...]
    features: tuple[str, ...]
    click: bool
    file: str = ""
    line: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        return (*(value for column in self.items for value in column), *self.features)

    @property
    def metadata(self) -> str:
        return f"{self.ages} {self.click}"


class LogFiles(Files):
    """Files of a log, one impression per line: CSV or TSV with a header, or JSON objects. In a table, the items of a
    sequence are separated by spaces, commas, semicolons or bars; in JSON they are a list."""

    examples: ClassVar[str] = "impressions"
    kind: Literal["log"] = "log"
    path: Paths
    """A file or a list of files."""
    sequence: dict[Name, Name] = Field(default={"item": "items"}, min_length=1)
    """For the item shown and each column of its side information: the column of the same of the items before it,
    oldest first: `{item: items, category: categories}`."""
    times: Name | None = None
    """Column of the times of the items before: numbers, or ISO 8601; default: only their order counts."""
    time: Name | None = None
    """Column of the time when the item was shown; required with `times`."""
    features: tuple[Name, ...] = ()
    """Columns of other features: user, context. Every value is a category of its own; put numbers into ranges."""
    click: Name = "click"
    """Column that tells whether the item was clicked: 1 or 0, true or false, yes or no."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if (self.times is None) != (self.time is None):
            raise ValueError("'times' and 'time' belong together; set both or neither")
        names = self.names
        if twice := [name for n, name in enumerate(names) if name in names[:n]]:
            raise ValueError(f"the column {twice[0]!r} is named twice")
        return self

    @property
    def input_columns(self) -> list[str]:
        """The columns that a prediction needs."""
        times = [] if self.times is None or self.time is None else [self.times, self.time]
        return [*self.sequence.values(), *self.sequence, *times, *self.features]

    @property
    def names(self) -> list[str]:
        return [*self.input_columns, self.click]

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    def read(self, report: Report) -> Iterator[Impression]:
        for file, number, row in self.rows(report):
            found = self.impression(row, str(file), number)
            if isinstance(found, str):
                report.drop("broken", file, number, found, " ".join(map(str, row.values())))
            else:
                yield found

    def rows(self, report: Report, with_clicks: bool = True) -> Iterator[tuple[DataFile, int, Mapping[str, Any]]]:
        """File, line number and cells of every row."""
        names = self.names if with_clicks else self.input_columns
        for file in self.sources():
            if inner_suffix(file) in OBJECT_SUFFIXES:
                for number, entry, _ in read_objects(file, names, report, NAMING.strip("'")):
                    yield file, number, entry
            else:
                layout = Layout(names, names, header=True, option=NAMING, several=True)
                for _, number, cells in read_rows([file], layout, report):
                    yield file, number, dict(zip(names, cells, strict=True))

    def impression(
        self, row: Mapping[str, Any], file: str = "", line: int = 0, with_click: bool = True
    ) -> Impression | str:
        """A row as an impression, or what is wrong with it."""
        for name in self.names if with_click else self.input_columns:
            if name not in row:
                return f"no {name!r}"
        columns: list[list[str]] = []
        for shown, before in self.sequence.items():
            listed = _values(row[before])
            if listed is None or (last := _value(row[shown])) is None or not last:
                wrong = before if listed is None else shown
                return f"{wrong!r} is not {'a list of items' if listed is None else 'an item'}"
            columns.append([*listed, last])
        if len({len(column) for column in columns}) > 1:
            sizes = [f"{len(c) - 1} in {name!r}" for name, c in zip(self.sequence.values(), columns, strict=True)]
            return f"the columns of the sequence differ in length: {', '.join(sizes)}"
        count = len(columns[0]) - 1
        found = self._ages(row, count)
        if isinstance(found, str):
            return found
        ages = found
        order = sorted(range(count), key=lambda n: -ages[n])  # oldest first; stable
        if self.times is not None:
            columns = [[*(column[n] for n in order), column[-1]] for column in columns]
            ages = [*(ages[n] for n in order), 0]
        features = [_value(row[name]) for name in self.features]
        if None in features:
            return f"{self.features[features.index(None)]!r} is not a text or a number"
        click = CLICKS.get(str(row[self.click]).strip().lower()) if with_click else False
        if click is None:
            return f"{self.click!r} is neither 1 nor 0: {row[self.click]!r}"
        items = tuple(
            tuple(f"{name}={value}" for value in column) for name, column in zip(self.sequence, columns, strict=True)
        )
        named = tuple(f"{name}={value}" for name, value in zip(self.features, features, strict=True))
        return Impression(items, tuple(ages), named, click, file, line)

    def _ages(self, row: Mapping[str, Any], count: int) -> list[int] | str:
        """The time since each item, or the number of items since, and 0 for the item shown."""
        if self.times is None or self.time is None:
            return list(range(count, -1, -1))
        listed = _values(row[self.times])
        times = [_seconds(text) for text in listed or []]
        now = _seconds(row[self.time])
        if listed is None or None in times or now is None:
            wrong = self.time if now is None else self.times
            return f"{wrong!r} is not {'a time' if now is None else 'a list of times'} (a number, or ISO 8601)"
        if len(times) != count:
            return f"{len(times)} in {self.times!r}, but {count} in {next(iter(self.sequence.values()))!r}"
        ages = [now - time for time in times if time is not None]
        if min(ages, default=0) < 0:
            return f"an item in {self.times!r} is later than {self.time!r}"
        return [*(min(int(age), LONGEST_AGE) for age in ages), 0]


def _value(value: Any) -> str | None:
    """A cell as text: of strings, numbers and truth values; nothing is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        return None
    text = str(value).strip()
    return text if is_unicode(text) else None


def _values(value: Any) -> list[str] | None:
    """The items of a cell, or of a list."""
    if isinstance(value, str):
        return [text for text in SEPARATORS.split(value.strip()) if text] if is_unicode(value) else None
    if value is None:
        return []
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [str(value)]
    if not isinstance(value, Sequence):
        return None
    found = [_value(one) for one in value]
    return [text for text in found if text is not None] if all(found) else None


def _seconds(value: Any) -> float | None:
    """A number, or the seconds since 1970 of a time in ISO 8601."""
    try:
        number = float(value)
        return number if math.isfinite(number) else None
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
