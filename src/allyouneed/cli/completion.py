"""What the shell proposes after <Tab> (`allyouneed --install-completion`). Nothing heavy is imported for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import allyouneed
from allyouneed.models import NAMES


def presets(incomplete: str) -> list[str]:
    """Names of presets."""
    folder = Path(allyouneed.__file__).parent / "presets"
    return sorted(path.stem for path in folder.glob(f"{_literal(incomplete)}*.yaml"))


def models(incomplete: str) -> list[str]:
    """Names of presets and bundled models, and what is in the current folder: folders and YAML files."""
    named = [name for name in NAMES if name.startswith(incomplete)]
    return [*presets(incomplete), *named, *_paths(incomplete, (".yaml", ".yml"))]


def folders(incomplete: str) -> list[str]:
    """Names of bundled models, and folders."""
    return [*(name for name in NAMES if name.startswith(incomplete)), *_paths(incomplete, ())]


def words(*allowed: str) -> Callable[[str], list[str]]:
    """One of a few words."""
    return lambda incomplete: [word for word in allowed if word.startswith(incomplete)]


def document_formats(incomplete: str) -> list[str]:
    """Formats of documents, and `auto`."""
    from allyouneed.apps.translate.documents.formats import READERS

    return [name for name in (*READERS, "auto") if name.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    parent, _, start = incomplete.rpartition("/")
    base = parent + "/" if "/" in incomplete else ""
    found = Path(base or ".").glob(f"{_literal(start)}*")
    return sorted(
        f"{base}{path.name}" + ("/" if path.is_dir() else "")
        for path in found
        if (path.is_dir() or path.suffix in suffixes) and (start or not path.name.startswith("."))
    )


def _literal(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
