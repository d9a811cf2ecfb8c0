"""Models bundled with the package: each a model folder next to this file."""

from __future__ import annotations

from pathlib import Path

from allyouneed.errors import UserError

HERE = Path(__file__).parent
TRANSLATOR = "translator"


def find(name: str = TRANSLATOR) -> Path | None:
    """The folder of a bundled model, if this installation has it."""
    folder = HERE / name
    return folder if (folder / "config.json").is_file() else None


def shipped(name: str = TRANSLATOR) -> Path:
    """The same, or an error."""
    folder = find(name)
    if folder is None:
        raise UserError(
            f"this installation has no bundled {name}; set --model FOLDER, or train one (docs/translator.md)"
        )
    return folder
