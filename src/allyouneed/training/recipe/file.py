"""Reading a recipe's file: paths, overrides of the command line, and checks that need the model or the start folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allyouneed.config import ConfigError, override, parse, read_tree
from allyouneed.errors import UserError
from allyouneed.models import resolve
from allyouneed.training.recipe.languages import language_problems, with_model_codes
from allyouneed.training.recipe.recipe import Recipe, model_named
from allyouneed.training.recipe.sections import SPLITS, as_tuple

PATH = re.compile(r"\w[\w.\[\]]*: ")  # a problem of one key begins with it


def load_recipe(path: Path | str, overrides: Iterable[str] = (), plugins: Iterable[str] = ()) -> Recipe:
    """Read a recipe. Paths in the file are relative to it, paths in overrides and plugins to the working directory."""
    path = Path(path)
    tree = read_tree(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping, this is {type(tree).__name__}")
    tree = _resolve_paths({"output": f"runs/{path.stem}"} | tree, path.resolve().parent)
    overrides = list(overrides)
    if any(text.startswith(("model.", "model[")) for text in overrides):
        # command-line overrides apply last, so expand the recipe's own changes to the model first
        known = model_named(tree["model"]) if isinstance(tree.get("model"), str) else tree.get("model") or {}
        tree["model"] = override(known, tree.pop("set", None) or [])
    named = [named] if isinstance(named := tree.get("plugins") or [], str) else named
    tree = _resolve_paths(override(tree, overrides) | {"plugins": [*named, *plugins]}, Path.cwd())
    recipe = parse(Recipe, tree, str(path))
    try:
        recipe.model_for(None)
    except ConfigError as error:
        problems = [f"model{'.' if PATH.match(text) else ': '}{text}" for text in error.problems]
        raise ConfigError(problems, str(path)) from None
    if recipe.start is not None and recipe.task.two_vocabularies:
        files = {split: with_model_codes(recipe.start, getattr(recipe.data, split)) for split in SPLITS}
        problems = language_problems(recipe.start, files)
        if problems:
            raise ConfigError(problems, str(path))
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=files)})
    return recipe


def _resolve_paths(tree: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same tree with absolute paths; bare paths of files get the key `path`."""

    def anchor(value: Any) -> Any:
        if isinstance(value, str | Path):
            return str(base / value)
        if isinstance(value, list):
            return [anchor(item) for item in value]
        if isinstance(value, dict):
            return {key: anchor(v) if key in ("path", "source", "target", "labels") else v for key, v in value.items()}
        return value

    tree = dict(tree)
    if isinstance(tree.get("model"), str) and tree["model"].endswith((".yaml", ".yml", ".json")):
        tree["model"] = anchor(tree["model"])
    if isinstance(tree.get("output"), str):
        tree["output"] = anchor(tree["output"])
    if isinstance(tree.get("start"), str):
        tree["start"] = str(resolve(tree["start"], base))
    task = tree.get("task")
    if isinstance(task, dict) and str(task.get("template")).endswith(".jinja"):
        tree["task"] = task | {"template": anchor(task["template"])}
    if isinstance(task, dict) and isinstance(task.get("reward"), str):
        tree["task"] = tree["task"] | {"reward": anchor(task["reward"])}
    if isinstance(listed := as_tuple(tree.get("plugins")), list | tuple):  # a module has no path
        tree["plugins"] = [anchor(name) if str(name).endswith(".py") else name for name in listed]
    if isinstance(found := tree.get("retrieval"), str | dict):
        found = {"index": found} if isinstance(found, str) else found
        tree["retrieval"] = {k: anchor(v) if k in ("index", "encoder") else v for k, v in found.items()}
    if isinstance(tree.get("data"), dict):
        data = dict(tree["data"])
        tree["data"] = data | {key: _with_path_key(anchor(data[key])) for key in SPLITS if key in data}
    return tree


def _with_path_key(files: Any) -> Any:
    """Makes `--set data.train.columns=…` work for bare paths."""
    if isinstance(files, list):
        return [_with_path_key(item) for item in files]
    return {"path": files} if isinstance(files, str) else files
