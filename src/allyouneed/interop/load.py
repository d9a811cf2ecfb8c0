"""Open a model: a folder of ours, of Hugging Face or CTranslate2, or a single file. Every command that takes a model
uses this.

The importers load when needed: opening a folder of ours imports no Hugging Face family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allyouneed.config import preset_names, tree_of
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError, near
from allyouneed.folder import WEIGHTS, Folder, as_dtype, check_finite, check_vocabularies, read_about
from allyouneed.interop.hf.checkpoint import is_hf_folder
from allyouneed.models import NAMES, resolve
from allyouneed.nn.models.weights import cast_weights
from allyouneed.runtime.process import refuse_after_fork


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    task: str | None = None,
    as_stored: bool = False,
    tokenizer: Path | str | None = None,
) -> Folder:
    """`path`: a folder, a single file, or `translator`. `dtype`: the precision of the weights, by default as stored.
    `task`: another task than the folder's own, where its weights allow it (similarity: text embeddings). `tokenizer`:
    that of a single-file model."""
    refuse_after_fork()
    path = find_model(path)
    check_device(device)
    if torch.device(device).type == "cuda":
        from allyouneed.kernels.preload import preload_libraries

        preload_libraries(device)
    if is_hf_folder(path):
        from allyouneed.interop.hf import folder as hf

        return hf.load(path, device, dtype, task, as_stored)
    if is_ctranslate2(path):
        from allyouneed.interop.ctranslate2 import folder as ctranslate2

        folder = ctranslate2.load(path, device, dtype, as_stored, None if tokenizer is None else Path(tokenizer))
    elif (file := single_file(path)) is not None:
        from allyouneed.interop.single_file import detect

        folder = detect.read(file, tokenizer)
        check_finite(str(path), folder.model)
        if folder.vocabularies is not None:
            check_vocabularies(path, folder.vocabularies, folder.model.config)  # type: ignore[arg-type]
        cast_weights(folder.model, as_dtype(dtype))
        folder.model.to(device)
    else:
        folder = Folder.load(path, device, dtype, as_stored)
    if task is not None and task != folder.task.get("kind"):
        from allyouneed.interop.heads import for_task

        folder = for_task(folder, task)
    return folder


def is_ctranslate2(path: Path) -> bool:
    """Whether a folder was written for CTranslate2."""
    return (path / "model.bin").is_file() and any(path.glob("*vocabulary*")) and not is_hf_folder(path)


def single_file(path: Path) -> Path | None:
    """The file itself, or the model file of a folder of Marian or fairseq."""
    if path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    from allyouneed.interop.single_file import detect

    return detect.find(path)


def find_model(path: Path | str) -> Path:
    """The path of an existing model, or of a bundled one by its name. An error explains that names of presets, and of
    models elsewhere, are not folders."""
    found = resolve(path)
    if found.exists():
        return found
    if (name := str(path)) in preset_names():
        raise UserError(
            f"{name}: no such model folder. {name} is a preset: the shape of a model, without weights, and nothing is "
            f"downloaded. Train it with `model: {name}` in a recipe (docs/training.md), or build it with new weights "
            f"in Python: allyouneed.build({name!r})"
        )
    raise UserError(f"{path}: no such model folder{near(name, NAMES)}; nothing is downloaded, so give a local path")


def resolve_device(device: str, path: Path | str) -> str:
    """`auto`: a GPU if there is one, else the CPU. Int8 models, which are made for a CPU's integer instructions, stay
    there. Any other name is checked."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() and about(path).get("stored") != "int8" else "cpu"
    check_device(device)
    return device


def check_device(device: str | torch.device) -> None:
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise UserError(f"unknown device {str(device)!r} (allowed: auto, cpu, cuda)") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {str(device)!r}: torch finds no CUDA GPU; use cpu")


def about(path: Path | str) -> dict[str, Any]:
    """The content of our config.json: `model`, `task`, `labels`, …; for a Hugging Face folder, what importing gives."""
    path = find_model(path)
    if is_hf_folder(path):
        from allyouneed.interop.hf import folder as hf

        return hf.about(path)
    if is_ctranslate2(path):
        from allyouneed.interop.ctranslate2 import folder as ctranslate2

        return ctranslate2.about(path)
    if single_file(path) is not None:
        return _about_loaded(load(path))
    return read_about(path)


def _about_loaded(folder: Folder) -> dict[str, Any]:
    """What our config.json would contain, of a file whose config only its weights tell."""
    model: Any = folder.model.config
    found = {"model": tree_of(model), "task": folder.task, "labels": folder.labels, "origin": folder.origin}
    return found | {"directions": folder.directions, "max_tokens": folder.max_tokens}


def vocabularies(path: Path | str) -> Vocabularies:
    """The tokenizers of a folder, without its model."""
    path = find_model(path)
    if is_hf_folder(path):
        from allyouneed.interop.hf import folder as hf

        found = hf.vocabularies(path)
    elif is_ctranslate2(path):
        from allyouneed.interop.ctranslate2 import folder as ctranslate2

        found = ctranslate2.vocabularies(path)
    elif single_file(path) is not None:
        found = load(path).vocabularies
    else:
        found = Vocabularies.load(path)
    if found is None:
        raise UserError(f"{path}: no tokenizer")
    return found


def weight_files(path: Path | str) -> list[Path]:
    """The files that hold the weights."""
    path = find_model(path)
    if is_hf_folder(path):
        from allyouneed.interop.hf import folder as hf

        return hf.open_checkpoint(path)[1].files
    return [path / "model.bin" if is_ctranslate2(path) else single_file(path) or path / WEIGHTS]
