"""A model folder of either kind: ours, or one of Hugging Face's. Whatever takes a folder from a person takes both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import WEIGHTS, Folder, as_dtype, read_about
from allyouneed.nn.models.weights import cast_weights


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    task: str | None = None,
    as_stored: bool = False,
    tokenizer: Path | str | None = None,
) -> Folder:
    """`dtype`: the precision of the weights; as they are stored if not given. `task`: another use than the folder's
    own, where its weights allow it (texts as vectors: similarity). `tokenizer`: that of a model that is one file."""
    from allyouneed.interop.hf import folder as hf
    from allyouneed.interop.single_file import detect as single_file

    path = Path(path)
    check_device(device)
    if hf.is_theirs(path):
        return hf.load(path, device, dtype, task, as_stored)
    if single_file.is_one(path):
        folder = single_file.read(path, tokenizer)
        cast_weights(folder.model, as_dtype(dtype))
        folder.model.to(device)
    else:
        folder = Folder.load(path, device, dtype, as_stored)
    if task is not None and task != folder.task.get("kind"):
        folder = hf.used_for(folder, task)
    return folder


def check_device(device: str | torch.device) -> None:
    try:
        where = torch.device(device)
    except RuntimeError:
        raise UserError(f"device {str(device)!r}: it may be cpu or cuda") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {str(device)!r}: torch finds no CUDA GPU here; use cpu")


def about(path: Path | str) -> dict[str, Any]:
    """What config.json of ours says: `model`, `task`, `labels`, …; of theirs, what it would say once imported."""
    from allyouneed.interop.hf import folder as hf

    path = Path(path)
    return hf.about(path) if hf.is_theirs(path) else read_about(path)


def vocabularies(path: Path | str) -> Vocabularies:
    """The tokenizers of a folder alone."""
    from allyouneed.interop.hf import folder as hf

    path = Path(path)
    found = hf.vocabularies(path) if hf.is_theirs(path) else Vocabularies.load(path)
    if found is None:
        raise UserError(f"{path}: has no tokenizer")
    return found


def weight_files(path: Path | str) -> list[Path]:
    """The files its weights are in."""
    from allyouneed.interop.hf import folder as hf

    path = Path(path)
    return hf.opened(path)[1].files if hf.is_theirs(path) else [path / WEIGHTS]
