"""Optional packages: which extra installs them, what they are for, and how to install one here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from allyouneed.errors import UserError

# extra -> (the module it installs, what is lost without it)
EXTRAS = {
    "look": ("matplotlib", "`look` draws only in the terminal"),
    "tensorboard": ("tensorboard", "`tensorboard: true` of a recipe is refused"),
    "retrieval": ("faiss", "`index` and RETRO models are refused"),
    "sound": ("soundfile", "only .wav files can be transcribed"),
    "parquet": ("pyarrow", ".parquet, .arrow and .feather files are refused"),
    "xlsx": ("openpyxl", ".xlsx files are refused"),
    "pdf": ("pdfminer", "`translate` refuses .pdf files"),
    "image": ("PIL", "image files cannot be opened; pixels given as arrays work"),
    "serve": ("fastapi", "`serve` is refused"),
    "ctranslate2": ("ctranslate2", "`export --to ctranslate2` and `bench --against ctranslate2` are refused"),
}
CLONE = Path(__file__).resolve().parents[3]  # of the repository, if this is one


def install_hint(extra: str) -> str:
    """The command that installs an extra: into a clone of the repository, or next to an installed package."""
    if not (CLONE / "pyproject.toml").is_file():
        return f"pip install 'allyouneed[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == CLONE else CLONE}[{extra}]'"


def is_installed(extra: str) -> bool:
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def missing(extra: str, purpose: str) -> UserError:
    """The error for a package that cannot be imported. `purpose`: what needs it."""
    return UserError(f"{purpose} needs {EXTRAS[extra][0]}: {install_hint(extra)}")


def require(extra: str, purpose: str) -> None:
    """Refuse before any work begins if a package is missing."""
    if not is_installed(extra):
        raise missing(extra, purpose)
