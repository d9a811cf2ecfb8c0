"""Models that are one file: Whisper as OpenAI gives it away (`tiny.en.pt`), and llama2.c's (`stories15M.bin`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.single_file import llama2c, openai_whisper

PICKLES = (".pt", ".pth")


def is_one(path: Path | str) -> bool:
    """A file, that is: whether it is a model is found out when it is read."""
    return Path(path).is_file()


def read(path: Path | str, tokenizer: Path | str | None = None) -> Folder:
    """The model in a file, as if it had been in a folder of ours. `tokenizer`: the file its vocabulary is in, where
    that does not lie beside it under its usual name."""
    path = Path(path)
    vocabulary = None if tokenizer is None else Path(tokenizer)
    if path.suffix in PICKLES:
        content = _unpickled(path)
        if openai_whisper.is_one(content):
            return openai_whisper.read(content, path, vocabulary)
        raise UserError(
            f"{path}: no Whisper model ('dims' and 'model_state_dict'), and no other .pt file is known here"
        )
    if path.suffix == ".bin":
        return llama2c.read(path, vocabulary)
    raise UserError(
        f"{path}: a file, not a model folder; single files that are read are Whisper's .pt and llama2.c's .bin"
    )


def _unpickled(path: Path) -> Any:
    """Tensors, numbers and texts only: nothing in the file is run."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # torch raises many kinds for files that are not what they say
        first = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: cannot be read as weights ({first[:200]})") from None
