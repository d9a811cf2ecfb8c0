"""Whether a task can train a model, said before anything is built, and what fits instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from allyouneed.config import ConfigError, parse, preset_names, preset_tree, tree_of
from allyouneed.data.files.readers import Files
from allyouneed.errors import UserError
from allyouneed.nn.embed.tokens import Embed
from allyouneed.nn.heads.pooling import Pool
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.sight import blind_pool, readable, seeing_pool, tokens_seen
from allyouneed.nn.models.two_towers import TwoTowers
from allyouneed.tasks.task import Task

LISTED = 8  # presets named in an error


def fitted(
    task: Task, tree: Mapping[str, Any], labels: Sequence[str] | None, files: Sequence[Files], longest: int
) -> Model:
    """The model of this tree with the head of the task and the sizes of its data, for texts of up to `longest` tokens.
    Where the task cannot train it, the error names what fits."""
    check_input(task, tree)
    try:
        return _seeing(_completed(task, tree, labels, files), tree, longest)
    except UserError as error:
        if labels is not None or not _is_valid(tree):  # the data does not fit, or the model is none
            raise
        problems = error.problems if isinstance(error, ConfigError) else [str(error).removeprefix("model.")]
        raise ConfigError([*problems[:-1], problems[-1] + _instead(task, tree)], "model") from None


def check_input(task: Task, tree: Mapping[str, Any]) -> None:
    """Refuse a model of another kind or input. Kinds that do not exist are left to the parser."""
    if (reason := _misfit(task, tree)) is not None:
        raise ConfigError([reason + _instead(task, tree)], "model")


def _misfit(task: Task, tree: Mapping[str, Any]) -> str | None:
    name, kind = tree_of(task)["kind"], tree.get("kind")
    if Model.find(kind) is None:
        return None
    if kind not in task.kinds:
        return f"kind: {name} trains a model of kind {' or '.join(task.kinds)}, this is {kind}"
    for slot in ("embed", "source_embed"):
        given = tree.get(slot)
        given = (given.get("kind") if isinstance(given, Mapping) else given) or Embed.default_kind
        embed = Embed.find(given)
        wanted = task.reads_of(str(kind)).get(slot, "text")
        if embed is not None and embed.medium != wanted:
            return f"{slot}: {name} trains a model that reads {wanted}, this one reads {given}"
    return None


def _completed(task: Task, tree: Mapping[str, Any], labels: Sequence[str] | None, files: Sequence[Files]) -> Model:
    head = task.head(dict(tree), labels)
    completed = task.complete(tree if head is None else {**tree, "head": head}, files)
    return parse(Model, completed, "model")  # type: ignore[type-abstract]


def _seeing(model: Model, tree: Mapping[str, Any], longest: int) -> Model:
    """The model with a head that pools what has seen the whole text. A pooling that was set is refused if it is
    blind."""
    if (reason := blind_pool(model, longest)) is None:
        return model
    head = tree_of(model)["head"]
    if sets_pool(tree) or isinstance(model, TwoTowers):
        raise ConfigError([reason], "model")
    pool = seeing_pool(model, ("last", "first"), readable(model, longest))
    return parse(Model, tree_of(model) | {"head": head | {"pool": pool}}, "model")  # type: ignore[type-abstract]


def sets_pool(tree: Mapping[str, Any]) -> bool:
    """Whether a model, as it was written, sets the pooling of its head."""
    head = tree.get("head")
    return isinstance(head, Mapping) and "pool" in head


def pool_note(tree: Mapping[str, Any], model: Any, longest: int) -> str | None:
    """What to say where the pooling is not the usual one of its head, which would be blind."""
    pool = getattr(getattr(model, "head", None), "pool", None)
    if pool is None or sets_pool(tree):
        return None
    usual: Pool = type(model.head).model_fields["pool"].default
    length = readable(model, longest)
    seen = tokens_seen(model, usual, length)
    return f"head.pool: {pool}, as the {usual} token sees {seen:,} of {length:,} tokens" if seen < length else None


def _instead(task: Task, tree: Mapping[str, Any]) -> str:
    """The presets that the task can train, and the tasks that can train the model."""
    presets = _presets(task)
    more = f" and {len(presets) - LISTED} more" if len(presets) > LISTED else ""
    others = [kind for kind, other in sorted(Task.known().items()) if not other.needs_start and _fits(other(), tree)]
    return (
        f"\n    presets for {tree_of(task)['kind']}: {', '.join(presets[:LISTED]) or 'none'}{more}"
        f"\n    tasks for this model: {', '.join(others) or 'none that is trained here'}"
    )


@cache
def _presets(task: Task) -> list[str]:
    return [name for name in preset_names() if _fits(task, preset_tree(name))]


def _fits(task: Task, tree: Mapping[str, Any]) -> bool:
    if _misfit(task, tree) is not None:
        return False
    try:
        _completed(task.for_model(tree), task.with_vocabulary(tree, 1), None, ())
    except (UserError, ValueError):  # `for_model` raises the latter
        return False
    return True


def _is_valid(tree: Mapping[str, Any]) -> bool:
    """Whether it is a model without any task."""
    try:
        parse(Model, tree)  # type: ignore[type-abstract]
    except UserError:
        return False
    return True
