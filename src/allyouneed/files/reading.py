"""Read files that somebody else may have written: the files of a folder by name, JSON and YAML within bounds.

Nothing outside the folder is read, and nothing is parsed that would not fit: sizes, depth and numbers are checked
first."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from allyouneed.errors import UserError

MAX_JSON_BYTES = 64 << 20  # the largest published shard index has a tenth of it
MAX_DEPTH = 100  # of nested lists and mappings
MAX_NODES = 1_000_000  # values of a YAML file, aliases expanded
MAX_KEYS = 10_000  # of a YAML mapping, merged ones included
MAX_DIGITS = 40  # tokenizers without a limit write numbers of thirty digits


# --- files of a folder ----------------------------------------------------------------------------------------------


def file_in(folder: Path, name: str) -> Path:
    """A file of this folder by name. Links must stay inside the folder, or lead to the `blobs` folder of Hugging Face's
    own cache, which its `snapshots` link to."""
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or any(part in ("", ".", "..") or set(part) & set("\\\0") for part in parts):
        raise UserError(f"{folder}: {name!r} is not the name of a file in this folder")
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):
        raise UserError(f"{path}: broken link; put the file itself there") from None
    cached = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not (target.is_relative_to(root) or cached):
        raise UserError(f"{path}: link to a file outside the folder; put the file itself there")
    if not target.is_file():
        raise UserError(f"{path}: missing; the folder is incomplete, copy it again")
    return target


def named_file(path: Path) -> tuple[Path, str]:
    """Folder and name of a file that the caller named: a link is followed, and what it leads to is read within the same
    bounds as a file of a folder."""
    found = path.resolve()
    return found.parent, found.name


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has this file; a link counts, wherever it leads."""
    return (folder / name).is_file() or (folder / name).is_symlink()


def read_bytes(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file of the folder, of at most `limit` bytes."""
    file = file_in(folder, name)
    try:
        if (size := file.stat().st_size) > limit:
            raise UserError(f"{folder / name}: {size:,} bytes; at most {limit:,} are read")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{folder / name}: cannot be read: {error.strerror}") from None


def read_text(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(folder, name, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{folder / name}: not UTF-8 text; copy it again") from None


def read_json(folder: Path, name: str, needed: bool = True) -> dict[str, Any]:
    """A JSON object from a file of the folder; an empty one if the file is missing and not `needed`."""
    if not needed and not has_file(folder, name):
        return {}
    found = read_json_value(folder, name)
    if not isinstance(found, dict):
        raise UserError(f"{folder / name}: expected a JSON object, found {type(found).__name__}")
    return found


def read_json_value(folder: Path, name: str) -> Any:
    text = read_text(folder, name)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{folder / name}: not valid JSON: {error}") from None


# --- JSON and YAML --------------------------------------------------------------------------------------------------


def parse_json(text: str | bytes) -> Any:
    """Plain data, or a `ValueError`: duplicate keys, NaN and infinity, deep nesting and huge integers are refused."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python refuses to convert thousands of digits
        raise ValueError(_reason(error)) from None
    check_bounds(found, finite=True)
    return found


def parse_yaml(text: str) -> Any:
    """Plain data, or a `ValueError`: as `parse_json`, and aliases may not multiply the values of the file."""
    try:
        found = yaml.load(text, Loader=_YamlLoader)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(_reason(error)) from None  # the library lets these through: dates that do not exist, …
    check_bounds(found, most=MAX_NODES)
    return found


class _YamlLoader(yaml.SafeLoader):
    """Merge keys (`<<: [*a, *a]`) are expanded while loading, so they are bounded here."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_KEYS:
            raise ValueError(f"a mapping of more than {MAX_KEYS:,} keys")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, which parsers resolve differently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} is duplicated")
    return found


def check_bounds(tree: Any, most: int | None = None, finite: bool = False) -> None:
    """Refuse plain data that is nested too deeply, has huge integers (with `finite`, also infinite numbers), or more
    than `most` values. An alias counts as often as it is used."""
    waiting = [(tree, 0)]
    count = 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if isinstance(node, dict | list | tuple | set):
            if depth == MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
            if most is not None and count + len(node) > most:
                raise ValueError(f"more than {most:,} values, with aliases expanded")
            count += len(node)
            inner = node.values() if isinstance(node, dict) else node
            waiting += [(value, depth + 1) for value in inner if not isinstance(value, str | bool)]
        elif isinstance(node, int) and abs(node) >= 10**MAX_DIGITS:
            raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
        elif finite and isinstance(node, float) and not math.isfinite(node):
            raise ValueError("a number too large for a float")


def _reason(error: Exception) -> str:
    if "digits" in str(error):
        return f"an integer of more than {MAX_DIGITS} digits"
    return str(error) if isinstance(error, ValueError) else "a value does not match its tag"


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
