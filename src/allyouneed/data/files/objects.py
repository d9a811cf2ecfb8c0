"""Objects of a file: JSON, one per line or in an array, and the rows of columnar files and databases."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from allyouneed.data.files.formats import read as formats
from allyouneed.data.files.lines import MAX_LINE, DataFile, as_data_file, inner_suffix, read_chunks
from allyouneed.data.files.readers import Report, read_text
from allyouneed.errors import UserError


def at_path(entry: Mapping[str, Any], key: str) -> Any:
    """The value of a key, which may be a path: `translation.en`. KeyError if there is none."""
    if key in entry or "." not in key:
        return entry[key]
    first, _, rest = key.partition(".")
    inner = entry[first]
    if not isinstance(inner, Mapping):
        raise KeyError(key)
    return at_path(inner, rest)


def paths(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of an object that is not an object itself, with its path."""
    for key, value in entry.items():
        if isinstance(value, Mapping) and value:
            yield from paths(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def entries(file: Path | DataFile, wanted: Sequence[str], report: Report) -> Iterator[tuple[int, Any, str]]:
    """The values of a file: of JSON the elements of an array, or one per line; of other formats the rows, with at least
    the `wanted` columns. A string is an error message."""
    if inner_suffix(file) in formats.OBJECTS:
        for number, row in enumerate(formats.rows_as_objects(as_data_file(file), wanted), start=1):
            report.read += 1
            yield number, row, str(row)
        return
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


def array_elements(file: Path | DataFile) -> Iterator[tuple[int, Any]]:
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
            if len(text) - at > MAX_LINE:
                raise UserError(
                    f"{file}:{line}: an element of more than {MAX_LINE >> 20} MiB, or an array without end"
                ) from None
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


def _text_chunks(file: Path | DataFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in read_chunks(file):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: {as_data_file(file).not_text}; convert it with `iconv`, or set its encoding"
        ) from None


def has_surrogates(value: Any) -> bool:
    """Whether a text in this value has half of a character, which no file can hold."""
    if isinstance(value, str):
        return not is_unicode(value)
    if isinstance(value, Mapping):
        return any(map(has_surrogates, (*value.keys(), *value.values())))
    return isinstance(value, list) and any(map(has_surrogates, value))


def is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
