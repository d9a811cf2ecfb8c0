"""Write a model folder: from a module trained in a loop of one's own, or from what was loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from allyouneed.config import tree_of
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder, check_vocabularies
from allyouneed.interop.load import vocabularies
from allyouneed.nn.models.base import Model
from allyouneed.tasks.task import Task

TokenizerLike = Tokenizer | Vocabularies | tuple[Tokenizer, Tokenizer] | Path | str | None
# the task of a model by its head; that of a vocabulary head depends on the kind of the model
BY_HEAD = {
    "classes": "classification",
    "tags": "tagging",
    "pooled": "similarity",
    "click": "click",
    "span": "question-answering",
}
BY_HEAD |= {"mask-predict": "mask-predict"}
BY_KIND = {"encoder-decoder": "translation", "encoder": "masked-lm", "two-towers": "image-text"}
BY_KIND |= {"interleaved": "interleaved"}
BY_MEDIUM = {
    "images": {"classes": "image-classification", "vocabulary": "captioning"},
    "audio": {"classes": "audio-classification", "vocabulary": "transcription"},
}
MAX_TOKENS = 256  # of a folder without another limit


def build_folder(
    module: nn.Module,
    tokenizer: TokenizerLike,
    task: str | None = None,
    labels: Sequence[str] = (),
    max_tokens: int | None = None,
    card: str = "",
) -> Folder:
    """The folder of a module that was not trained by a recipe. `task`: default: the usual one of such a model."""
    config: Any = getattr(module, "config", None)
    if not isinstance(config, Model):
        raise UserError(f"expected a module of allyouneed.build, not {type(module).__name__}; predictors have `save`")
    both, kind = _vocabularies(tokenizer), task or usual_task(config)
    if both is not None:
        check_vocabularies(Path("the tokenizer"), both, config)
    count = tree_of(config).get("head", {}).get("labels")
    if count is not None and len(labels) != count:
        raise UserError(f"labels: {len(labels)} names for {count} classes; give the name of each class, in order")
    limit = min(max_tokens or MAX_TOKENS, config.limit or max_tokens or MAX_TOKENS)
    return Folder(module, both, task_options(kind, config), max_tokens=limit, labels=list(labels), card=card)


def task_options(kind: str, config: Model) -> dict[str, Any]:
    """A task with all of its options, which its predictor reads."""
    task = Task.find(kind)
    return {"kind": kind} if task is None else tree_of(task().for_model(tree_of(config)))


def usual_task(config: Model) -> str:
    tree = tree_of(config)
    head = tree.get("head", {}).get("kind", "vocabulary")
    read = getattr(getattr(config, "source_embed", None) or getattr(config, "embed", None), "medium", "text")
    usual = BY_MEDIUM.get(read, {}).get(head)
    if usual is not None and tree["kind"] in Task.known()[usual].kinds:
        return usual
    return BY_HEAD.get(head) or BY_KIND.get(tree["kind"], "causal-lm")


def _vocabularies(tokenizer: TokenizerLike) -> Vocabularies | None:
    if isinstance(tokenizer, Path | str):
        return vocabularies(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return Vocabularies(tokenizer, tokenizer)
    return Vocabularies(*tokenizer) if isinstance(tokenizer, tuple) else tokenizer


def save_folder(folder: Folder, path: Path | str) -> Path:
    """Write it. An earlier model folder at this path is replaced, anything else is not."""
    path = Path(path)
    if path.exists() and not _is_ours(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists and is not a model folder of allyouneed; name another folder")
    folder.save(path)
    return path


def _is_ours(path: Path) -> bool:
    try:
        about = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and {"format", "model", "sha256"} <= set(about)
