"""Load the model of a command, or say which command fits its folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def load_predictor(folder: Path, device: str, dtype: str | None = None, task: str | None = None) -> Any:
    import allyouneed

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    changes = {name: value for name, value in (("dtype", dtype), ("task", task)) if value is not None}
    model = allyouneed.load(folder, device, **changes)
    if device == "cpu" and dtype is None:
        from allyouneed.nn.models.weights import widen_half_for_cpu

        widen_half_for_cpu(model.model)
    return model


def load_draft(draft: str | None, device: str, dtype: str | None, methods: str | tuple[str, ...], does: str) -> Any:
    """The drafter of speculative decoding: "lookup", a model, or None."""
    return draft if draft in (None, "lookup") else predictor_with(Path(draft), device, dtype, methods, does)


def predictor_with(
    folder: Path, device: str, dtype: str | None, methods: str | tuple[str, ...], does: str, task: str | None = None
) -> Any:
    """The predictor of a folder, which has one of these methods. `does`: what the command needs, for the error.
    `task`: what a pretrained body is loaded for, if that gives it the method."""
    from allyouneed.infer.predictors.registry import TASKS

    names = (methods,) if isinstance(methods, str) else methods

    def is_able(model: Any) -> bool:
        return any(callable(getattr(model, name, None)) for name in names)

    model = load_predictor(folder, device, dtype)
    kind = model.folder.task.get("kind")
    if not is_able(model) and task is not None and TASKS[kind].pretrained:
        model = load_predictor(folder, device, dtype, task)
    if not is_able(model):
        raise UserError(f"{folder}: a model for {kind} cannot {does}; use `allyouneed {TASKS[kind].commands[0]}`")
    for note in model.folder.notes:
        print(f"note: {folder}: {note}", file=sys.stderr)
    return model
