"""Models that come with the package: each a model folder beside this file."""

from __future__ import annotations

from pathlib import Path

from allyouneed.errors import UserError

HERE = Path(__file__).parent
TRANSLATOR = "translator"


def find(name: str = TRANSLATOR) -> Path | None:
    """The folder of a model that came with the package, if it did."""
    folder = HERE / name
    return folder if (folder / "config.json").is_file() else None


def shipped(name: str = TRANSLATOR) -> Path:
    """The same, or a message that says what to do without it."""
    folder = find(name)
    if folder is None:
        raise UserError(
            f"no {name} comes with this copy of allyouneed; name a model with --model FOLDER, or train one "
            "(docs/translator.md says how)"
        )
    return folder
