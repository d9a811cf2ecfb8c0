"""What is in files of data: their formats, columns and texts, and what is wrong with them."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from allyouneed.data.files.formats import read as formats
from allyouneed.data.files.formats.encodings import SAMPLE, fitting
from allyouneed.data.files.labels import DOCUMENT_START
from allyouneed.data.files.lines import DataFile, inner_suffix, read_chunks
from allyouneed.data.files.readers import (
    CELL_SUFFIXES,
    JSON_SUFFIXES,
    OBJECT_SUFFIXES,
    Report,
    expand_paths,
    read_text,
)
from allyouneed.data.files.tables import Layout, named_rows, separator_of
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.errors import UserError, printable
from allyouneed.folder import LANGUAGES
from allyouneed.models import TRANSLATOR, resolve

SCANNED = 200_000  # rows of a file that are looked at
HEAD = 200  # lines that tell the format
DISTINCT = 50_000  # values that are counted
DETECTED = 200  # texts that tell the language
EXAMPLES = 3
SETS = ("train", "valid", "test")
ROLES = {"train": "train", "training": "train", "test": "test", "eval": "test"}
ROLES |= dict.fromkeys(("valid", "validation", "val", "dev"), "valid")
SUFFIXES = (*CELL_SUFFIXES, ".txt", ".md", "", ".conll", ".bio", ".iob", *OBJECT_SUFFIXES)
ID_NAMES = re.compile(r"(.*[_ .-])?(id|uuid|guid|index|url|date|time|timestamp|编号|序号)", re.IGNORECASE)
PLAIN, TABLE, TAGGED = "text", "table", "tagged"
SCRIPTS = {"ja": "[\u3040-\u30ff]", "ko": "[\uac00-\ud7af]", "zh": "[\u4e00-\u9fff]", "Cyrillic": "[\u0400-\u04ff]"}
SCRIPTS |= {"Arabic": "[\u0600-\u06ff]", "Hebrew": "[\u0590-\u05ff]", "Greek": "[\u0370-\u03ff]"}
SCRIPTS |= {"Thai": "[\u0e00-\u0e7f]", "Devanagari": "[\u0900-\u097f]"}


@dataclass
class ColumnFacts:
    """The values of a column, as texts; lists and objects keep their type only."""

    name: int | str
    filled: int = 0
    numbers: int = 0
    lists: int = 0
    lengths: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # up to `DISTINCT` values
    examples: list[str] = field(default_factory=list)
    sample: Any = None
    low: float = 0.0
    high: float = 0.0

    def add(self, value: Any) -> None:
        if value is None or (isinstance(value, str) and not value.strip()):
            return
        self.filled += 1
        self.sample = value if self.sample is None else self.sample
        if isinstance(value, list):
            self.lists += 1
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        if not isinstance(value, list) and (number := _number(text)) is not None:
            self.low, self.high = (min(self.low, number), max(self.high, number)) if self.numbers else (number, number)
            self.numbers += 1
        self.lengths.append(len(text))
        if len(self.counts) < DISTINCT or text in self.counts:
            self.counts[text.strip()] += 1
        if len(self.examples) < EXAMPLES and text not in self.examples:
            self.examples.append(text)

    @property
    def distinct(self) -> int:
        return len(self.counts)

    @property
    def is_number(self) -> bool:
        return self.filled > 0 and self.numbers == self.filled

    @property
    def is_list(self) -> bool:
        return self.filled > 0 and self.lists == self.filled

    @property
    def is_label(self) -> bool:
        """Few values that many rows share."""
        if self.is_number and not all(float(value).is_integer() for value in self.counts):
            return False
        short = bool(self.lengths) and statistics.median(self.lengths) <= 40
        return short and not self.is_list and 1 < self.distinct <= min(200, max(2, self.filled // 4))

    @property
    def is_text(self) -> bool:
        """Letters, and not the same few values again and again."""
        worded = any(re.search(r"[^\W\d_]", example) for example in self.examples)
        return worded and not self.is_id and not self.is_list and not self.is_number and not self.is_label

    @property
    def is_id(self) -> bool:
        """A name or a number of the row, not a text."""
        spelled = [example for example in self.examples if re.fullmatch(r"(?=.*\d)[\w:./-]+", example, re.ASCII)]
        return self.names_rows or len(spelled) == len(self.examples) > 0

    @property
    def names_rows(self) -> bool:
        """A number of the row by its name."""
        return ID_NAMES.fullmatch(str(self.name)) is not None

    @property
    def length(self) -> float:
        return statistics.median(self.lengths) if self.lengths else 0

    @property
    def language(self) -> str:
        """A code or a script; empty if there are no letters."""
        return language_of(" ".join(islice(self.counts, DETECTED)))


@dataclass
class FileFacts:
    """A file, how it is read, and its columns."""

    file: DataFile
    role: str
    shape: str  # PLAIN, TABLE or TAGGED
    header: bool | None = None
    quotes: bool | str | None = None
    note: str = ""
    rows: int = 0
    complete: bool = True  # all rows were looked at
    broken: Report = field(default_factory=Report)
    empty: int = 0
    duplicates: int = 0
    columns: dict[int | str, ColumnFacts] = field(default_factory=dict)
    keys: set[bytes] = field(default_factory=set)  # of its texts
    paragraphs: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(None, (), self.header, self.quotes)

    @property
    def format(self) -> str:
        suffix = inner_suffix(self.file)
        if self.shape == TAGGED:
            return "a word and its tag per line"
        if suffix in (*formats.SUFFIXES, *JSON_SUFFIXES):
            return suffix.removeprefix(".") + ("" if self.header is not False else ", no header")
        if self.shape == PLAIN:
            return "plain text, " + ("paragraphs" if self.paragraphs else "a text per line")
        separator = repr(self.file.separator or separator_of(self.file)).replace("'\\t'", "tab")
        quoted = self.quotes if self.quotes is not None else suffix == ".csv"
        return f"separator {separator}, {'quoted' if quoted else 'no quotes'}, {'' if self.header else 'no '}header"


@dataclass
class DataFacts:
    """All files by role."""

    files: list[FileFacts]

    def of(self, role: str) -> list[FileFacts]:
        return [one for one in self.files if one.role == role]

    @property
    def first(self) -> FileFacts:
        return self.of("train")[0]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.of("train"))

    @property
    def leaks(self) -> list[tuple[str, str, int]]:
        """Sets that share texts, and how many."""
        keys = {role: set().union(*(one.keys for one in self.of(role))) for role in SETS}
        both = [("train", "valid"), ("train", "test"), ("valid", "test")]
        return [(one, other, count) for one, other in both if (count := len(keys[one] & keys[other]))]


def look_at(paths: Sequence[Path], table: str | None = None) -> DataFacts:
    """Read the files; a folder stands for the files in it. `table`: the sheet or table of those that have several."""
    given = [inner for path in paths for inner in _splits(path)]
    opened = [(file, role) for path, role in given for file in expand_paths([path], SUFFIXES)]
    files = [_look_at(path, role or _role(path), table) for path, role in opened]
    if all(one.role != "train" for one in files):  # a single file called test.tsv
        for one in files:
            one.role = "train"
    return DataFacts(sorted(files, key=lambda one: list(SETS).index(one.role)))


def _splits(path: Path) -> Iterator[tuple[Path, str | None]]:
    """A dataset of several splits is a folder for each."""
    if (path / "dataset_dict.json").is_file():
        for folder in sorted(inner for inner in path.iterdir() if inner.is_dir()):
            yield folder, ROLES.get(folder.name, "train")
    else:
        yield path, None


def _role(path: Path) -> str:
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((ROLES[word] for word in words if word in ROLES), "train")


def _look_at(path: Path, role: str, table: str | None) -> FileFacts:
    found = _opened(path, role, table)
    rows: Iterator[Mapping[int | str, Any]]
    if found.shape == TABLE:
        rows = (row for _, row in named_rows(found.file, found.layout, found.broken))
    else:
        rows = _text_rows(found)
    seen: set[bytes] = set()
    for row in rows:
        if found.rows == SCANNED:
            found.complete = False
            break
        found.rows += 1
        _add_row(found, row, seen)
    if not found.rows:
        raise UserError(f"{path}: no rows can be read\n{found.broken.text()}")
    return found


def _add_row(found: FileFacts, row: Mapping[int | str, Any], seen: set[bytes]) -> None:
    values = [str(value) for value in row.values()]
    if not all(value.strip() for value in values):
        found.empty += 1
    for name, value in row.items():
        found.columns.setdefault(name, ColumnFacts(name)).add(value)
    whole = _digest("\x1f".join(values))
    found.duplicates += whole in seen
    seen.add(whole)
    if longest := max((v for v in row.values() if isinstance(v, str)), key=len, default=""):
        found.keys.add(_digest(longest))


def _opened(path: Path, role: str, table: str | None) -> FileFacts:
    suffix = inner_suffix(path)
    if suffix in formats.SUFFIXES:
        whole = DataFile(path, table=table)
        return FileFacts(whole, role, TABLE, _names_columns(whole, None) if suffix in formats.CELLS else None)
    sample = next(read_chunks(path), b"")[:SAMPLE]
    encodings = fitting(sample)
    if not encodings:
        raise UserError(f"{path}: neither text in a usual encoding nor a known format")
    encoding = None if encodings[0] == "utf-8" else encodings[0]
    file = DataFile(path, encoding)
    note = f"{encoding}, or {' or '.join(encodings[1:3])}" if len(encodings) > 1 and encoding else encoding or ""
    if suffix in JSON_SUFFIXES:
        return FileFacts(file, role, TABLE, note=note)
    lines = [text for _, text in islice(read_text(file, Report()), HEAD)]
    filled = [line for line in lines if line.strip()]
    if suffix == ".csv":
        return FileFacts(file, role, TABLE, _names_columns(file, None), note=note)
    if len(filled) < len(lines) and _is_tagged(filled):
        return FileFacts(file, role, TAGGED, note=note)
    if (separator := _separator(filled)) is not None:
        file = DataFile(path, encoding, None if separator == "\t" else separator)
        cells = [cell for line in filled for cell in line.split(separator)]
        quotes = True if sum(cell[:1] == cell[-1:] == '"' for cell in cells) > len(cells) / 4 else None
        return FileFacts(file, role, TABLE, _names_columns(file, quotes), quotes, note)
    return FileFacts(file, role, PLAIN, note=note, paragraphs=len(filled) < 0.9 * len(lines))


def _separator(lines: Sequence[str]) -> str | None:
    """What stands equally often, and at least once, in nearly every line."""
    for separator in ("\t", "|||", "|", ";"):
        counts = Counter(line.count(separator) for line in lines)
        usual, lines_with = counts.most_common(1)[0] if counts else (0, 0)
        if usual and lines_with >= 0.9 * len(lines):
            return separator
    return None


def _is_tagged(lines: Sequence[str]) -> bool:
    """A word and its tag in every line, with few different tags."""
    cells = [line.split() for line in lines if not line.startswith(DOCUMENT_START)]
    if not cells or len({len(row) for row in cells}) != 1 or len(cells[0]) < 2:
        return False
    return len({row[-1] for row in cells}) <= max(3, len(cells) / 3)


def _names_columns(file: DataFile, quotes: bool | None) -> bool:
    """Whether the first line looks like names: short words that no other row has, over longer values or numbers."""
    rows = [list(row.values()) for _, row in islice(named_rows(file, Layout(None, (), False, quotes), Report()), HEAD)]
    if len(rows) < 2 or len(set(rows[0])) < len(rows[0]):
        return False
    named = all(re.fullmatch(r"[^\W\d][\w .:/-]{0,40}", cell.strip()) for cell in rows[0])
    again = any(cell == row[at] for row in rows[1:] for at, cell in enumerate(rows[0]) if at < len(row))
    return named and not again


def _text_rows(found: FileFacts) -> Iterator[Mapping[int | str, Any]]:
    """Lines or paragraphs of plain text; sentences of tagged words."""
    held: list[str] = []
    for _, text in read_text(found.file, found.broken):
        if not text.strip() or text.startswith(DOCUMENT_START):
            if held:
                yield _text_row(found, held)
            held = []
        elif found.shape == TAGGED or found.paragraphs:
            held.append(text)
        else:
            yield {0: text}
    if held:
        yield _text_row(found, held)


def _text_row(found: FileFacts, lines: Sequence[str]) -> Mapping[int | str, Any]:
    if found.shape == PLAIN:
        return {0: "\n".join(lines)}
    cells = [line.split() for line in lines]
    tags = found.columns.setdefault("tags", ColumnFacts("tags"))
    for row in cells:
        tags.add(row[-1])
    return {"words": " ".join(row[0] for row in cells)}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@cache
def _detector() -> LanguageDetector:
    return LanguageDetector.load(resolve(TRANSLATOR) / LANGUAGES)


def language_of(text: str) -> str:
    """The language of a text among those that the bundled detector knows, or its script."""
    letters = re.sub(r"[\W\d_]+", "", text)
    if not letters:
        return ""
    for name, script in SCRIPTS.items():
        if len(re.findall(script, letters)) > (0.1 if name == "ja" else 0.3) * len(letters):
            return name
    return _detector().detect(text) or ""


def tokens_in(length: float, text: str) -> int:
    """About how many tokens so many characters are."""
    dense = len(EAST_ASIAN.findall(text)) > len(text) / 3
    return int(length / (1.5 if dense else 3.5)) + 3


def shown(text: str, width: int) -> str:
    """A text on one line, shortened."""
    plain = printable(" ".join(text.split()))
    return plain if len(plain) <= width else plain[: width - 1] + "…"
