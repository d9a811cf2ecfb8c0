"""Use a model for another task than its own by replacing its head, where its weights allow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from allyouneed.config import parse, tree_of
from allyouneed.errors import UserError
from allyouneed.folder import REWRITING, Folder
from allyouneed.nn.heads.pooling import Pool
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.sight import readable, seeing_pool
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

SAME_MODEL = ({"translation", *REWRITING}, set(REWRITING), {"causal-lm", "chat", "dpo"})  # tasks that share one model
TEXT = 128  # tokens of a text that is pooled
POOLABLE = ("encoder", "decoder")  # models whose token vectors can be pooled into one vector per text


def for_task(folder: Folder, task: str) -> Folder:
    """The same folder for another task."""
    config = config_of(folder.model)
    kind = check_task(folder.path or Path("the model"), config, folder.task["kind"], task)
    model = with_head(folder.model, pooling_head(config)) if kind == "similarity" else folder.model
    return replace(folder, model=model, task={"kind": kind})


def check_task(path: Path, model: Model, own: str, wanted: str) -> str:
    """`wanted`, if the model has the weights for it."""
    same_model = SAME_MODEL[1:] if tree_of(model)["kind"] == "decoder" else SAME_MODEL  # translators have an encoder
    poolable = wanted == "similarity" and tree_of(model)["kind"] in POOLABLE
    if wanted == own or poolable or any({wanted, own} <= same for same in same_model):
        return wanted
    raise UserError(f"{path}: a model for {own} has no weights for {wanted}; train it for that task (start: {path})")


def pooling_head(model: Model) -> dict[str, Any]:
    """Mean pooling, or in a decoder the last token, if it sees the whole text."""
    wanted: tuple[Pool, ...] = ("last",) if tree_of(model)["kind"] == "decoder" else ("mean",)
    return {"kind": "pooled", "pool": seeing_pool(model, wanted, readable(model, TEXT))}


def with_head(model: nn.Module, head: Mapping[str, Any]) -> nn.Module:
    """The same body under another head that needs no weights."""
    config: Model = parse(Model, tree_of(config_of(model)) | {"head": dict(head)}, "head")  # type: ignore[type-abstract]
    made, before = meta_model(config), named_tensors(model)
    assign_weights(made, {name: before[name].detach() for name in named_tensors(made)})
    return made.eval()


def config_of(model: nn.Module) -> Model:
    return model.config  # type: ignore[return-value]
