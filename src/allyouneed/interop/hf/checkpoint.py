"""A Hugging Face folder, opened with care: whoever made it may mean harm.

Nothing in it is run: `pytorch_model.bin` is a pickle, and is only read by torch's loader of plain weights. Nothing
outside it is read: a shard's name is a name, not a path. What it declares is compared with what there is before memory
is taken for it. Tensors are mapped into memory, and read when they are used.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.mapped import MappedFile, once

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
LONGEST = 64 << 20  # bytes of a JSON file; the largest index of shards there is has a tenth of it
DEEPEST = 1024  # layers a config may speak of though there are fewer tensors: layers may share all they have
COUNTS = ("*layers*", "*_layer", "attention_types", "block_sizes")  # keys that say how many layers there are


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]
    weights: Mapping[str, Tensor]
    files: list[Path]  # that hold them

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        path = Path(path)
        config = read_json(path, "config.json")
        if isinstance(config.get("architectures"), str):  # one name, as some write it
            config["architectures"] = [config["architectures"]]
        files = _files(path)
        shards = {name: _opened(inside(path, name)) for name in sorted(set(files.values()))}
        weights = Shards(shards, files) if _named(files) else next(iter(shards.values()))
        if isinstance(weights, Shards):
            weights.check(path)
        found = cls(path, config, weights, [path / name for name in shards])
        found.check_depth()
        return found

    def check_depth(self) -> None:
        """Refuse a config that asks for more layers than there can be, before anybody counts to that number."""
        most = max(DEEPEST, len(self.weights))
        for key, value in _numbers(self.config):
            if value > most and any(fnmatchcase(key, pattern) for pattern in COUNTS):
                raise UserError(
                    f"{self.path / 'config.json'}: {key}: {value:,} layers, but the weights are {len(self.weights):,} "
                    f"tensors; the config is not that of these weights"
                )


class Shards(Mapping[str, Tensor]):
    """The tensors of several files, each where the index says it is."""

    def __init__(self, files: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, str]) -> None:
        self.files, self.places = files, places

    def check(self, path: Path) -> None:
        wrong = [f"{name}: not in {file}" for name, file in self.places.items() if name not in self.files[file]]
        wrong += [
            f"{name}: in {file}, but not in the index or there for another file"
            for file, content in self.files.items()
            for name in content
            if self.places.get(name) != file
        ]
        if wrong:
            raise UserError(f"{path}: the index of the shards is wrong\n  " + "\n  ".join(shortened(sorted(wrong))))

    def __getitem__(self, name: str) -> Tensor:
        return self.files[self.places[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places


def read_json(path: Path, name: str, needed: bool = True) -> dict[str, Any]:
    """A JSON object in a file of the folder; an empty one if it may be missing and is."""
    file = path / name
    if not file.is_file():
        if needed:
            raise UserError(f"{file}: missing; this is no whole model folder")
        return {}
    file = inside(path, name)
    if file.stat().st_size > LONGEST:
        raise UserError(f"{file}: {file.stat().st_size:,} bytes are too many for such a file")
    try:
        found = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once, parse_constant=_no_number)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: a set of keys is expected, this is a {type(found).__name__}")
    return found


def inside(path: Path, name: str) -> Path:
    """A file of this folder by its name. Links must stay in the folder, or lead to where Hugging Face's own cache keeps
    the files that its `snapshots` link to."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    if not plain:
        raise UserError(f"{path}: {name!r} is not the name of a file in this folder")
    try:
        place, root = (path / name).resolve(), path.resolve()
    except (OSError, RuntimeError):
        raise UserError(f"{path / name}: a link that leads nowhere; put the file itself there") from None
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if place.parent not in homes:
        raise UserError(f"{path / name}: a link that leads out of the folder; put the file itself there")
    if not place.is_file():
        raise UserError(f"{path / name}: missing; the folder is incomplete, copy it again")
    return place


def shortened(lines: list[str], most: int = 20) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"… and {len(lines) - most:,} more"]


def _files(path: Path) -> dict[str, str]:
    """Which file holds which tensor; one file that is not in an index is under the name ''."""
    for name in (SAFE, PICKLED):
        index = f"{name}.index.json"
        if (path / name).exists() or (path / name).is_symlink():
            return {"": name}
        if (path / index).is_file():
            places = read_json(path, index).get("weight_map")
            if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
                raise UserError(f"{path / index}: it has no 'weight_map' from tensors to files")
            end = Path(name).suffix
            strange = sorted({file for file in places.values() if not file.endswith(end)})
            if strange:
                raise UserError(f"{path / index}: {strange[0]!r} is no {end} file")
            return places
    raise UserError(f"{path}: has no weights ({SAFE} or {PICKLED}, or an index of several)")


def _named(files: Mapping[str, str]) -> bool:
    return "" not in files


def _opened(file: Path) -> Mapping[str, Tensor]:
    # what a link in the cache of Hugging Face leads to has no suffix, so the content tells
    with file.open("rb") as opened:
        pickled = opened.read(4) == b"PK\x03\x04"
    return _plain_weights(file) if pickled or file.suffix == ".bin" else MappedFile(file)


def _plain_weights(file: Path) -> dict[str, Tensor]:
    """A .bin: a zip of stored tensors and a pickle that says which they are. Anything else in the pickle is refused."""
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(
            f"{file}: cannot be read: {error}; if a torch older than 1.6 wrote it, load and save it with a newer one"
        ) from None
    if packed:
        raise UserError(f"{file}: {packed[0]} is compressed; torch does not write such files")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # its unpickler raises what it likes
        raise UserError(
            f"{file}: holds more than weights, or is damaged ({type(error).__name__}); nothing of it was run; ask for "
            "the model as safetensors"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: weights by name are expected, this is a {type(found).__name__}")
    for name, tensor in found.items():
        plain = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_meta:
            raise UserError(f"{file}: {name!r} is no plain tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{file}: {name} says it is larger than what is stored of it")
    return {name: tensor.detach() for name, tensor in found.items()}


def _numbers(tree: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number under the nearest key above it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _numbers(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _numbers(value, key)
    elif isinstance(tree, int) and not isinstance(tree, bool):
        yield key, tree


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")
