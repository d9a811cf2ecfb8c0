"""A sentence-transformers folder: a list of modules; the first is a model, the others pool its vectors into one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, read_json, read_json_value
from allyouneed.interop.hf.checkpoint import MODULES

POOLS = {"cls": "first", "mean": "mean", "lasttoken": "last"}  # theirs -> ours
LIMITS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")


@dataclass(frozen=True)
class SentenceModules:
    model_path: Path
    head: dict[str, Any]
    max_tokens: int | None


def read(path: Path) -> SentenceModules | None:
    """None for any other folder."""
    if not has_file(path, MODULES):
        return None
    listed = read_json_value(path, MODULES)
    try:
        modules = [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in listed]
    except (TypeError, LookupError) as error:
        raise UserError(f"{path / MODULES}: not a list of modules: {error}") from None
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path / MODULES}: modules {', '.join(kinds)} are not supported (allowed: Transformer, Pooling, "
            "optionally Normalize)"
        )
    model_path, pooling = (subfolder(path, name) for _, name in modules[:2])
    head = {"kind": "pooled", "pool": _pool(pooling), "normalise": kinds[-1] == "Normalize"}
    limits = [read_json(model_path, name, needed=False).get("max_seq_length") for name in LIMITS]
    return SentenceModules(model_path, head, next((int(limit) for limit in limits if isinstance(limit, int)), None))


def subfolder(path: Path, name: str) -> Path:
    """A direct subfolder of `path`, or `path` itself."""
    if name in ("", "."):
        return path
    found = path / name
    if "\0" in name or found.resolve().parent != path.resolve() or not found.is_dir():
        raise UserError(f"{path / MODULES}: {name!r} is not a folder in {path}")
    return found


def _pool(folder: Path) -> str:
    config = read_json(folder, "config.json")
    prefix = "pooling_mode_"
    chosen = [
        key.removeprefix(prefix).removesuffix("_tokens").removesuffix("_token")
        for key in config
        if key.startswith(prefix) and config[key] is True
    ]
    if isinstance(mode := config.get("pooling_mode"), str | list):
        chosen = [mode] if isinstance(mode, str) else mode
    if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in POOLS:
        named = " and ".join(map(str, chosen)) or "nothing"
        raise UserError(f"{folder / 'config.json'}: pooling by {named} is not supported (allowed: {', '.join(POOLS)})")
    if config.get("include_prompt") is False:
        raise UserError(f"{folder / 'config.json'}: include_prompt: false is not supported")
    return POOLS[chosen[0]]


def write(out: Path, head: Mapping[str, Any], width: int, max_tokens: int) -> None:
    """Write the files that turn a model folder into a sentence-transformers folder."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head["normalise"] else [])]
    theirs = {ours: mode for mode, ours in POOLS.items()}[head["pool"]]
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "sqrt"}
    modes |= {"weightedmean_tokens": "weighted", "lasttoken": "lasttoken"}
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    pooling |= {f"pooling_mode_{name}": mode == theirs for name, mode in modes.items()}
    folders = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": number, "name": str(number), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    for folder in folders[1:]:
        (out / folder).mkdir()
    for name, tree in (
        (MODULES, modules),
        (LIMITS[0], {"max_seq_length": max_tokens, "do_lower_case": False}),
        (f"{folders[1]}/config.json", pooling),
    ):
        (out / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
