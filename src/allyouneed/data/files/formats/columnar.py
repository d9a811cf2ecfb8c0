"""Parquet, Arrow and Feather, and the shards of a Hugging Face dataset, whose classes are stored as numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from allyouneed.data.files.formats.archives import check_expansion, on_disk, open_seekable
from allyouneed.data.files.lines import DataFile, inner_suffix
from allyouneed.errors import UserError
from allyouneed.errors.extras import require
from allyouneed.files.reading import read_json

MOST_COLUMNS = 10_000
LONGEST_FOOTER = 64 << 20  # bytes; that of a million columns is longer
ROWS = 1024  # decoded at once
INFO = "dataset_info.json"

Decode = Callable[[Any], Any]


def rows(file: DataFile, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Every row, with the columns of these keys, or all."""
    require("parquet", f"{file}: {inner_suffix(file)}")
    with open_seekable(file.path) as stream, _reading(file):
        schema, batches = _open(stream, file, wanted)
        features = _features(schema, file.path)
        decoders = {name: _decoder(features.get(name)) for name in schema.names}
        size, unpacked = on_disk(file.path).stat().st_size, 0
        for batch in batches:
            batch.validate(full=True)  # offsets of a damaged file may lead anywhere, also when bytes are counted
            unpacked += batch.nbytes
            check_expansion(file.path, unpacked, size)
            for row in batch.to_pylist():
                yield {name: decoders[name](value) if name in decoders else value for name, value in row.items()}


def _open(stream: BinaryIO, file: DataFile, wanted: Sequence[str]) -> tuple[Any, Iterator[Any]]:
    import pyarrow
    from pyarrow import parquet

    if inner_suffix(file) == ".parquet":
        stream.seek(max(0, stream.seek(0, 2) - 8))
        if int.from_bytes(stream.read(4), "little") > LONGEST_FOOTER:
            raise UserError(f"{file}: its columns take more than {LONGEST_FOOTER >> 20} MiB; select some of them")
        stream.seek(0)
        opened = parquet.ParquetFile(stream)
        schema = opened.schema_arrow
        return schema, opened.iter_batches(ROWS, columns=_chosen(schema.names, wanted, file))
    start = stream.read(6)
    stream.seek(0)
    if start == b"ARROW1":
        reader = pyarrow.ipc.open_file(stream)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        reader = pyarrow.ipc.open_stream(stream)
        batches = iter(reader)
    chosen = _chosen(reader.schema.names, wanted, file)
    selected = (batch if chosen is None else batch.select(chosen) for batch in batches)
    return reader.schema, (part for batch in selected for part in _parts(batch))


def _parts(batch: Any) -> Iterator[Any]:
    for start in range(0, batch.num_rows, ROWS):
        yield batch.slice(start, ROWS)


def _chosen(names: Sequence[str], wanted: Sequence[str], file: DataFile) -> list[str] | None:
    """The columns of these keys. None: all, if one of them is missing, or has a dot in its own name."""
    if len(names) > MOST_COLUMNS:
        raise UserError(f"{file}: {len(names):,} columns; at most {MOST_COLUMNS:,} are read: select some of them")
    roots = list(dict.fromkeys(key if key in names else key.split(".")[0] for key in wanted))
    return roots if roots and all(root in names and "." not in root for root in roots) else None


def _features(schema: Any, path: Path) -> dict[str, Any]:
    """What the columns are to the library that wrote them, in the schema or beside the file."""
    try:
        text = (schema.metadata or {}).get(b"huggingface")
        tree = json.loads(text) if text else {"info": read_json(path.parent, INFO, needed=False)}
        found = tree["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (ValueError, LookupError, TypeError, RecursionError, UserError):
        return {}


def _decoder(feature: Any) -> Decode:
    """Names instead of the numbers of classes, also inside lists."""
    if isinstance(feature, list) and len(feature) == 1:
        return _each(_decoder(feature[0]))
    if not isinstance(feature, Mapping):
        return _same
    names = feature.get("names")
    if feature.get("_type") == "ClassLabel" and isinstance(names, list) and all(isinstance(n, str) for n in names):
        return lambda value: names[value] if isinstance(value, int) and 0 <= value < len(names) else value
    return _each(_decoder(feature["feature"])) if "feature" in feature else _same


def _each(decode: Decode) -> Decode:
    return _same if decode is _same else lambda value: [*map(decode, value)] if isinstance(value, list) else value


def _same(value: Any) -> Any:
    return value


@contextmanager
def _reading(file: DataFile) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        reason = re.split(r"\n|\. ", str(error))[0][:200]
    else:
        return
    raise UserError(f"{file}: cannot be read as {inner_suffix(file)} ({reason}); download or write it again")
