"""Models bundled with the package: each a model folder next to this file."""

from __future__ import annotations

from pathlib import Path

from allyouneed.errors import UserError

HERE = Path(__file__).parent
TRANSLATOR = "translator"  # its name wherever a model folder or a preset is expected
NAMES = (TRANSLATOR,)


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


def is_bundled(model: Path | str, base: Path = Path()) -> bool:
    """Whether this is the name of a bundled model. A file or folder of that name in `base` takes precedence."""
    return str(model) in NAMES and not (base / model).exists()


def resolve(model: Path | str, base: Path = Path()) -> Path:
    """The path of a model: `translator` is the folder of the bundled one; a path is relative to `base`."""
    return shipped(str(model)) if is_bundled(model, base) else base / model
