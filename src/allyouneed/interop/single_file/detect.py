"""Single-file models: OpenAI's Whisper (`tiny.en.pt`), llama2.c (`stories15M.bin`), Marian (`model.npz`, `model.bin`)
and fairseq (`checkpoint_best.pt`); and folders that hold such a file beside its vocabularies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file
from allyouneed.folder import Folder
from allyouneed.interop.hf.checkpoint import check_archive
from allyouneed.interop.single_file import fairseq, llama2c, marian, marian_archive, openai_whisper

PICKLES = (".pt", ".pth")
BEST = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files of torch before 1.6 begin
SUPPORTED = "Whisper's .pt, llama2.c's .bin, Marian's .npz and .bin, and fairseq's .pt"


def find(folder: Path) -> Path | None:
    """The model file of a folder of Marian or fairseq; None if it is neither."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    archives = sorted(folder.glob("*.npz"))
    pickles = sorted(file for end in PICKLES for file in folder.glob(f"*{end}")) if any(folder.glob("dict.*")) else []
    binaries = [file for file in sorted(folder.glob("*.bin")) if has_file(folder, file.name) and _is_binary(file)]
    for files, preferred in ((archives, ("model.npz",)), (binaries, ("model.bin",)), (pickles, BEST)):
        best = next((file for name in preferred for file in files if file.name == name), None)
        if best is not None or len(files) == 1:
            file_in(folder, (best or files[0]).name)
            return best or files[0]
        if files:
            listed = ", ".join(file.name for file in files[:5])
            raise UserError(f"{folder}: several models ({listed}); name one of these files instead of the folder")
    return None


def _is_binary(file: Path) -> bool:
    return marian_archive.is_binary(file_in(file.parent, file.name))


def read(path: Path | str, tokenizer: Path | str | None = None) -> Folder:
    """Read a model file as a folder of ours. `tokenizer`: its vocabulary or subword file, where that is not beside it
    under its usual name."""
    path = Path(path)
    vocabulary = None if tokenizer is None else Path(tokenizer)
    if path.suffix in PICKLES:
        content = _load_pickle(path)
        if openai_whisper.is_whisper(content):
            return openai_whisper.read(content, path, vocabulary)
        if fairseq.is_fairseq(content):
            return fairseq.read(content, path, vocabulary)
        raise UserError(
            f"{path}: not a Whisper model ('dims' and 'model_state_dict') or one of fairseq ('args' or 'cfg', and "
            "'model'); other .pt files are not supported"
        )
    if path.suffix == ".npz" or (path.suffix == ".bin" and marian_archive.is_binary(path)):
        return marian.read(path, vocabulary)
    if path.suffix == ".bin":
        return llama2c.read(path, vocabulary)
    raise UserError(f"{path}: not a model folder; of single files, only {SUPPORTED} are supported")


def _load_pickle(path: Path) -> Any:
    """Tensors, numbers, strings and fairseq's options (a Namespace): nothing in the file is executed."""
    import torch

    with path.open("rb") as file:
        old = file.read(len(BEFORE_ZIP)) == BEFORE_ZIP
    if not old:
        check_archive(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # torch raises many types for malformed files
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: cannot be read as weights ({reason[:200]})") from None
