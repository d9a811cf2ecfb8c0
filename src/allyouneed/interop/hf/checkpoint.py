"""Open a Hugging Face folder, which is untrusted input.

Nothing in it is executed: `pytorch_model.bin` is a pickle and only goes through torch's `weights_only` loader. Nothing
outside it is read: a shard's name must be a file name, not a path. Declared sizes are compared with the real ones
before memory is allocated. Tensors are memory-mapped and read when used."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.data.files.mapped import MappedFile
from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, read_json

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
MODULES = "modules.json"  # marks a folder of sentence-transformers
MAX_LAYERS = 1024  # a config may declare this many layers with fewer tensors: layers may share weights
MAX_SHARING = 32  # times that the weights of a file are used on average: layers may share them
LAYER_COUNT_KEYS = ("*layers*", "*_layer", "attention_types", "block_sizes")


def is_hf_folder(path: Path | str) -> bool:
    """Whether a folder was written for `transformers` or `sentence-transformers`."""
    path = Path(path)
    if (path / MODULES).is_file():
        return True
    try:
        config = read_json(path, "config.json", needed=False)
    except UserError:
        return False  # the error is reported when the folder is read
    return "format" not in config and bool({"model_type", "architectures"} & set(config))


@dataclass(frozen=True)
class HfCheckpoint:
    path: Path
    config: dict[str, Any]
    weights: Mapping[str, Tensor]
    files: list[Path]  # that hold the weights

    @classmethod
    def open(cls, path: Path | str) -> HfCheckpoint:
        path = Path(path)
        config = read_json(path, "config.json")
        if isinstance(config.get("architectures"), str):  # some files have one name instead of a list
            config["architectures"] = [config["architectures"]]
        file_of = _weight_map(path)
        shards = {name: _open_weights(file_in(path, name)) for name in sorted(set(file_of.values()))}
        weights = next(iter(shards.values())) if "" in file_of else ShardedWeights(shards, file_of)
        if isinstance(weights, ShardedWeights):
            weights.check(path)
        found = cls(path, config, weights, [path / name for name in shards])
        found.check_depth()
        return found

    def check_depth(self) -> None:
        """Refuse a layer count far beyond the number of tensors, before anything iterates over layers."""
        most = max(MAX_LAYERS, len(self.weights))
        for key, value in _integers(self.config):
            if value > most and any(fnmatchcase(key, pattern) for pattern in LAYER_COUNT_KEYS):
                raise UserError(
                    f"{self.path / 'config.json'}: {key}: {value:,} layers, but the weights are {len(self.weights):,} "
                    f"tensors; the config does not belong to these weights"
                )


class ShardedWeights(Mapping[str, Tensor]):
    """The tensors of several files; `file_of` is the index: tensor name -> file name."""

    def __init__(self, files: Mapping[str, Mapping[str, Tensor]], file_of: Mapping[str, str]) -> None:
        self.files, self.file_of = files, file_of

    def check(self, path: Path) -> None:
        wrong = [f"{name}: not in {file}" for name, file in self.file_of.items() if name not in self.files[file]]
        wrong += [
            f"{name}: in {file}, but the index does not list it there"
            for file, content in self.files.items()
            for name in content
            if self.file_of.get(name) != file
        ]
        if wrong:
            raise UserError(f"{path}: the shard index is wrong\n  " + "\n  ".join(sorted(wrong)))

    def __getitem__(self, name: str) -> Tensor:
        return self.files[self.file_of[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def __contains__(self, name: object) -> bool:
        return name in self.file_of


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name; {"": file} for a single file without an index."""
    for name in (SAFETENSORS, PICKLE):
        index = f"{name}.index.json"
        if (path / name).exists() or (path / name).is_symlink():
            return {"": name}
        if (path / index).is_file():
            file_of = read_json(path, index).get("weight_map")
            if not isinstance(file_of, dict) or not file_of or not all(isinstance(v, str) for v in file_of.values()):
                raise UserError(f"{path / index}: no 'weight_map' from tensors to files")
            suffix = Path(name).suffix
            wrong = sorted({file for file in file_of.values() if not file.endswith(suffix)})
            if wrong:
                raise UserError(f"{path / index}: {wrong[0]!r} is not a {suffix} file")
            return file_of
    raise UserError(f"{path}: no weights ({SAFETENSORS} or {PICKLE}, or an index of shards)")


def _open_weights(file: Path) -> Mapping[str, Tensor]:
    # files in Hugging Face's cache have no suffix, so look at the content
    with file.open("rb") as opened:
        is_zip = opened.read(4) == b"PK\x03\x04"
    return _load_pickle(file) if is_zip or file.suffix == ".bin" else MappedFile(file)


def check_archive(file: Path) -> None:
    """Refuse a file of torch that unpacks to more than its own size: a megabyte may unpack to gigabytes."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"{file}: cannot be read: {error}; if torch before 1.6 wrote it, load and save it with a newer version"
        ) from None
    compressed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise UserError(f"{file}: {compressed[0]} is compressed; torch does not write such files")
    if (total := sum(entry.file_size for entry in entries)) > file.stat().st_size:
        raise UserError(f"{file}: declares {total:,} bytes of content, more than it has")


def _load_pickle(file: Path) -> dict[str, Tensor]:
    """A .bin: a zip of stored tensors and a pickle that names them. Anything else in the pickle is refused."""
    check_archive(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler raises any type
        raise UserError(
            f"{file}: contains more than weights, or is damaged ({type(error).__name__}); nothing in it was executed; "
            "get the model as safetensors"
        ) from None
    return plain_tensors(found, file)


def plain_tensors(found: Any, file: Path) -> dict[str, Tensor]:
    """The tensors by name of a file of torch, once each is known to be no larger than what is stored for it: a tensor
    of stride 0 or of overlapping rows takes a few bytes of the file, and any amount of memory."""
    if not isinstance(found, Mapping):
        raise UserError(f"{file}: expected weights by name, found {type(found).__name__}")
    for name, tensor in found.items():
        plain = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.is_meta:
            raise UserError(f"{file}: {name!r} is not a plain tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{file}: {name} declares more bytes than are stored")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found.values()}
    if (total := sum(tensor.nbytes for tensor in found.values())) > MAX_SHARING * sum(storages.values()):
        raise UserError(f"{file}: {total:,} bytes of weights are made of {sum(storages.values()):,} that are stored")
    return {name: tensor.detach() for name, tensor in found.items()}


def _integers(tree: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every integer with the nearest key above it."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _integers(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _integers(value, key)
    elif isinstance(tree, int) and not isinstance(tree, bool):
        yield key, tree
