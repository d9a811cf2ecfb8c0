"""Single-file models: OpenAI's Whisper (`tiny.en.pt`) and llama2.c (`stories15M.bin`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.hf.checkpoint import check_archive
from allyouneed.interop.single_file import llama2c, openai_whisper

PICKLES = (".pt", ".pth")


def read(path: Path | str, tokenizer: Path | str | None = None) -> Folder:
    """Read a model file as a folder of ours. `tokenizer`: its vocabulary file, where that is not beside it under its
    usual name."""
    path = Path(path)
    vocabulary = None if tokenizer is None else Path(tokenizer)
    if path.suffix in PICKLES:
        content = _load_pickle(path)
        if openai_whisper.is_whisper(content):
            return openai_whisper.read(content, path, vocabulary)
        raise UserError(
            f"{path}: not a Whisper model ('dims' and 'model_state_dict'); other .pt files are not supported"
        )
    if path.suffix == ".bin":
        return llama2c.read(path, vocabulary)
    raise UserError(
        f"{path}: not a model folder; of single files, only Whisper's .pt and llama2.c's .bin are supported"
    )


def _load_pickle(path: Path) -> Any:
    """Tensors, numbers and strings only: nothing in the file is executed."""
    import torch

    check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # torch raises many types for malformed files
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: cannot be read as weights ({reason[:200]})") from None
