"""A model is a folder a person can read: config.json, model.safetensors, tokenizer.json, a model card. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed.nn as parts  # every part is registered before a config is read
from allyouneed.config import parse, tree_of
from allyouneed.data.tokenizers import Vocabularies
from allyouneed.errors import UserError
from allyouneed.files import sha256, write_folder
from allyouneed.nn.model import Model

FORMAT = 1
WEIGHTS = "model.safetensors"
CARD = "README.md"
__all__ = ["Folder", "parts", "read_weights"]


@dataclass
class Folder:
    """What is in a model folder."""

    model: nn.Module
    vocabularies: Vocabularies
    task: dict[str, Any] = field(default_factory=lambda: {"kind": "translation"})
    decoding: dict[str, Any] = field(default_factory=dict)  # how it is meant to be decoded: beam, length penalty
    max_tokens: int = 256  # the longest sentence it was trained on
    directions: list[tuple[str | None, str]] = field(default_factory=list)  # (from, to), where its data named them
    labels: list[str] = field(default_factory=list)  # what it tells apart, in the order of its scores
    files: dict[str, Any] = field(default_factory=dict)  # how its training data was read: columns, keys
    card: str = ""
    path: Path | None = None

    def save(self, path: Path | str) -> None:
        """Write the whole folder beside its place and move it there in one step: it is all there or not at all."""
        config: Model = self.model.config  # type: ignore[assignment]

        def write(folder: Path) -> None:
            from safetensors.torch import save_file

            save_file(own_tensors(self.model), folder / WEIGHTS)
            self.vocabularies.save(folder)
            (folder / CARD).write_text(self.card or f"# A model of kind {tree_of(config)['kind']}\n", encoding="utf-8")
            written = sorted(p.name for p in folder.iterdir() if p.name != CARD)
            about = {
                "format": FORMAT,
                "task": self.task,
                "decoding": self.decoding,
                "max_tokens": self.max_tokens,
                "directions": self.directions,
                "labels": self.labels,
                "files": self.files,
                "tokenizer_hash": self.vocabularies.hash,
                "sha256": {name: sha256(folder / name) for name in written},
                "model": tree_of(config),
            }
            (folder / "config.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", "utf-8")

        write_folder(Path(path), write)
        self.path = Path(path)

    @classmethod
    def load(cls, path: Path | str, device: str | torch.device = "cpu") -> Folder:
        """Read a folder; every file is checked against its checksum and every weight against the config."""
        path = Path(path)
        about = read_about(path)
        problems = []
        for name, expected in about["sha256"].items():
            if not (path / name).is_file():
                problems.append(f"{path}: {name} is missing; the folder is incomplete, copy or train it again")
            elif sha256(path / name) != expected:
                problems.append(f"{path / name}: damaged (its checksum differs from config.json); copy it again")
        if problems:
            raise UserError("\n".join(problems))
        config = parse(Model, about["model"], f"{path / 'config.json'}: model")  # type: ignore[type-abstract]
        vocabularies = Vocabularies.load(path)
        if vocabularies.hash != about["tokenizer_hash"]:
            raise UserError(f"{path}: tokenizer.json is not the one this model was trained with")
        for side, tokenizer in (("source", vocabularies.source), ("target", vocabularies.target)):
            room = getattr(config, "vocabs", None)
            if room is not None and tokenizer.size > getattr(room, side):
                raise UserError(f"{path}: the {side} tokenizer has {tokenizer.size} tokens, the model {room}")
        model = config.build()
        read_weights(model, path / WEIGHTS)
        card = (path / CARD).read_text(encoding="utf-8") if (path / CARD).is_file() else ""
        return cls(
            model.to(device).eval(),
            vocabularies,
            about["task"],
            about["decoding"],
            about["max_tokens"],
            [(pair[0], pair[1]) for pair in about["directions"]],
            about.get("labels", []),
            about.get("files", {}),
            card,
            path,
        )


def read_about(path: Path) -> dict[str, Any]:
    """config.json of a model folder, or a message that says what is wrong with the folder."""
    if not path.exists():
        raise UserError(f"{path}: no such model folder")
    if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
        raise UserError(f"{path}: a run, not a model; its model is {path / 'model'}")
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: not a model folder (it has no config.json)")
    try:
        about = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path / 'config.json'}: cannot be read: {error}") from None
    needed = {"format", "model", "sha256", "tokenizer_hash", "task", "decoding", "max_tokens", "directions"}
    if not isinstance(about, dict) or not needed <= set(about):
        raise UserError(
            f"{path / 'config.json'}: not written by allyouneed (a model folder of ours has {sorted(needed)})"
        )
    if about["format"] != FORMAT:
        raise UserError(
            f"{path}: folder format {about['format']} is not {FORMAT}; use a matching version of allyouneed"
        )
    return about


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once: a tied matrix has one name."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _named(model).items()}


def _named(model: nn.Module) -> dict[str, Tensor]:
    persistent = model.state_dict(keep_vars=True)
    once: dict[int, str] = {}
    for name, tensor in persistent.items():
        once.setdefault(id(tensor), name)
    return {name: persistent[name] for name in once.values()}


def read_weights(model: nn.Module, file: Path) -> None:
    """Fill the model from a safetensors file; what is missing, left over or misshapen is reported all at once."""
    wanted = _named(model)
    with _opened(file) as stored:
        names = set(stored.keys())
        problems = [f"{name}: missing" for name in sorted(set(wanted) - names)]
        problems += [f"{name}: not a weight of this model" for name in sorted(names - set(wanted))]
        problems += _misshapen(stored, wanted)
        if problems:
            raise UserError(f"{file}: the weights do not fit the config\n  " + "\n  ".join(problems))
        _copy(stored, wanted)


def read_body(model: nn.Module, file: Path, same_head: bool = True, head: str = "head.") -> list[str]:
    """Fill all but the head, and the head too if it is to be the same and has the same weights; the names of what stays
    fresh."""
    wanted = _named(model)
    with _opened(file) as stored:
        names = set(stored.keys())
        body = {name: tensor for name, tensor in wanted.items() if not name.startswith(head)}
        problems = [f"{name}: missing" for name in sorted(set(body) - names)]
        strange = [name for name in sorted(names - set(wanted)) if not name.startswith(head)]
        problems += [f"{name}: not a weight of this model" for name in strange]
        problems += _misshapen(stored, body)
        if problems:
            raise UserError(f"{file}: the weights do not fit the config\n  " + "\n  ".join(problems))
        same = same_head and set(wanted) == names and not _misshapen(stored, wanted)
        _copy(stored, wanted if same else body)
        return [] if same else sorted(set(wanted) - set(body))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read as safetensors: {error}") from None


def _misshapen(stored: Any, wanted: dict[str, Tensor]) -> list[str]:
    problems = []
    for name in sorted(set(stored.keys()) & set(wanted)):
        shape, expected = tuple(stored.get_slice(name).get_shape()), tuple(wanted[name].shape)
        if shape != expected:
            problems.append(f"{name}: {shape} in the file, {expected} in the model")
    return problems


def _copy(stored: Any, wanted: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored.get_tensor(name))
