"""A folder of sentence-transformers: a list of modules; the first is a model, the others make one vector of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.interop.hf.checkpoint import LONGEST, inside, read_json

MODULES = "modules.json"
POOLS = {"cls": "first", "mean": "mean", "lasttoken": "last"}  # their word -> ours
LIMITS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")


@dataclass(frozen=True)
class Recipe:
    home: Path  # where the model is
    head: dict[str, Any]  # what stands on it
    longest: int | None


def read(path: Path) -> Recipe | None:
    """None where the folder is no such folder."""
    if not (path / MODULES).is_file():
        return None
    file = inside(path, MODULES)
    try:
        if file.stat().st_size > LONGEST:
            raise ValueError("too long")
        listed = json.loads(file.read_text(encoding="utf-8"))
        modules = [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in listed]
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise UserError(f"{path / MODULES}: not a list of modules: {error}") from None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path / MODULES}: made of {', '.join(kinds)}; known are Transformer, Pooling and, at the end, Normalize"
        )
    home, pooling = (folder_in(path, place) for _, place in modules[:2])
    head = {"kind": "pooled", "pool": _pool(pooling), "normalise": kinds[-1] == "Normalize"}
    limits = [read_json(home, name, needed=False).get("max_seq_length") for name in LIMITS]
    return Recipe(home, head, next((int(limit) for limit in limits if isinstance(limit, int)), None))


def folder_in(path: Path, name: str) -> Path:
    """A folder in this one, or this one itself."""
    if name in ("", "."):
        return path
    place = path / name
    if place.resolve().parent != path.resolve() or not place.is_dir():
        raise UserError(f"{path / MODULES}: {name!r} is not a folder in {path}")
    return place


def _pool(folder: Path) -> str:
    config = read_json(folder, "config.json")
    prefix = "pooling_mode_"
    chosen = [
        key.removeprefix(prefix).removesuffix("_tokens").removesuffix("_token")
        for key in config
        if key.startswith(prefix) and config[key] is True
    ]
    if isinstance(said := config.get("pooling_mode"), str | list):
        chosen = [said] if isinstance(said, str) else said
    if len(chosen) != 1 or chosen[0] not in POOLS:
        named = " and ".join(map(str, chosen)) or "nothing"
        raise UserError(f"{folder / 'config.json'}: pools by {named}; known here is one of {', '.join(POOLS)}")
    if config.get("include_prompt") is False:
        raise UserError(f"{folder / 'config.json'}: include_prompt: false is not known here")
    return POOLS[chosen[0]]


def write(out: Path, head: Mapping[str, Any], width: int, longest: int) -> None:
    """The files beside a model's that make it one of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head["normalise"] else [])]
    theirs = {ours: word for word, ours in POOLS.items()}[head["pool"]]
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "sqrt"}
    modes |= {"weightedmean_tokens": "weighted", "lasttoken": "lasttoken"}
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    pooling |= {f"pooling_mode_{name}": word == theirs for name, word in modes.items()}
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    for place in places[1:]:
        (out / place).mkdir()
    for name, tree in (
        (MODULES, modules),
        (LIMITS[0], {"max_seq_length": longest, "do_lower_case": False}),
        (f"{places[1]}/config.json", pooling),
    ):
        (out / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
