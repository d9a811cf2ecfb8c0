"""Load the model of a command, or say which command fits its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allyouneed.cli.messages import show_status
from allyouneed.cli.options import ComputeOptions, DecodingOptions
from allyouneed.errors import UserError, shorten

DTYPES = ("float32", "bfloat16", "float16")


def load_predictor(folder: Path, compute: ComputeOptions, task: str | None = None) -> Any:
    import allyouneed
    from allyouneed.interop.load import resolve_device

    dtype = compute.dtype
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    changes = {name: value for name, value in (("dtype", dtype), ("task", task)) if value is not None}
    device = resolve_device(compute.device, folder)
    model = allyouneed.load(folder, device, **changes)
    if device == "cpu" and dtype is None:
        from allyouneed.nn.models.weights import widen_half_for_cpu

        widen_half_for_cpu(model.model)
    return model


def with_draft(
    decoding: DecodingOptions, compute: ComputeOptions, methods: str | tuple[str, ...], does: str
) -> dict[str, Any]:
    """The decoding options that were given, with the drafter of speculative decoding loaded if it is a model."""
    options = decoding.given()
    if decoding.draft not in (None, "lookup"):
        options["draft"] = predictor_with(Path(decoding.draft), compute, methods, does)
    return options


def predictor_with(
    folder: Path, compute: ComputeOptions, methods: str | tuple[str, ...], does: str, task: str | None = None
) -> Any:
    """The predictor of a folder, which has one of these methods. `does`: what the command needs, for the error.
    `task`: what a pretrained body is loaded for, if that gives it the method."""
    from allyouneed.folder import REWRITING
    from allyouneed.infer.predictors.registry import TASKS

    names = (methods,) if isinstance(methods, str) else methods

    def is_able(model: Any) -> bool:
        return any(callable(getattr(model, name, None)) for name in names)

    model = load_predictor(folder, compute)
    kind = model.folder.task.get("kind")
    plain = kind == "seq2seq" and task in REWRITING  # an imported BART or T5
    if not is_able(model) and task is not None and (TASKS[kind].pretrained or plain):
        model = load_predictor(folder, compute, task)
    if not is_able(model):
        raise UserError(f"{folder}: a model for {kind} cannot {does}; use `allyouneed {TASKS[kind].commands[0]}`")
    if model.folder.notes:
        show_status(shorten("\n".join(f"note: {folder}: {note}" for note in model.folder.notes)))
    return model
