"""The model a command uses, or a message that says what the folder is for instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError

# task of a folder -> the command that puts it to use
COMMANDS = {
    "translation": "translate",
    "causal-lm": "generate",
    "prefix-lm": "generate",
    "masked-lm": "fill-mask",
    "permutation-lm": "fill-mask",
    "span-corruption": "fill-mask",
    "classification": "classify",
    "tagging": "tag",
    "similarity": "embed",
    "contrastive": "embed",
    "seq2seq": "seq2seq",
    "transcription": "transcribe",
    "image-classification": "classify-image",
    "image-text": "match-image",
}
DTYPES = ("float32", "bfloat16", "float16")


def loaded(folder: Path, device: str, dtype: str | None = None, task: str | None = None) -> Any:
    import allyouneed

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: it may be {', '.join(DTYPES)}")
    changes = {name: value for name, value in (("dtype", dtype), ("task", task)) if value is not None}
    model = allyouneed.load(folder, device, **changes)
    if device == "cpu" and dtype is None:
        from allyouneed.nn.models.weights import widen_half_for_cpu

        widen_half_for_cpu(model.model)
    return model


def drafted(draft: str | None, device: str, dtype: str | None, methods: str | tuple[str, ...], does: str) -> Any:
    """Who guesses: "lookup", or a model; None when nobody is named."""
    return draft if draft in (None, "lookup") else ready(Path(draft), device, dtype, methods, does)


BODIES = ("masked-lm", "permutation-lm", "causal-lm")  # pretrained: their vectors can be used without a head


def ready(
    folder: Path, device: str, dtype: str | None, methods: str | tuple[str, ...], does: str, task: str | None = None
) -> Any:
    """The model, which has one of these methods. `does`: what the command wants of it. `task`: what a pretrained model
    is taken for, to have it."""
    names = (methods,) if isinstance(methods, str) else methods

    def able(model: Any) -> bool:
        return any(callable(getattr(model, name, None)) for name in names)

    model = loaded(folder, device, dtype)
    kind = model.folder.task.get("kind")
    if not able(model) and task is not None and kind in BODIES:
        model = loaded(folder, device, dtype, task)
    if not able(model):
        fit = COMMANDS.get(kind)
        raise UserError(
            f"{folder}: it is for {kind} and does not {does}" + (f"; use `allyouneed {fit}`" if fit else "")
        )
    for note in model.folder.notes:
        print(f"note: {folder}: {note}", file=sys.stderr)
    return model
