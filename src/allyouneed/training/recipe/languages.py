"""The languages of a recipe's pairs and of the multilingual model it starts from (`start:`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files, join_paths
from allyouneed.data.languages import find
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, near
from allyouneed.interop.load import about, vocabularies


def with_model_codes(start: Path, files: Sequence[Files]) -> tuple[Files, ...]:
    """The same files with the model's own codes for their languages: `to: German` is its `de`."""
    if not any(isinstance(entry, PairFiles) and (entry.to or entry.from_) for entry in files):
        return tuple(files)
    known = {*vocabularies(start).source.languages, *(here for here, _ in about(start).get("directions") or [] if here)}

    def code(name: str | None) -> str | None:
        found = [] if name is None else find(name, known)
        return found[0] if len(found) == 1 else name

    return tuple(
        entry.model_copy(update={"from_": code(entry.from_), "to": code(entry.to)})
        if isinstance(entry, PairFiles) and (entry.to or entry.from_)
        else entry
        for entry in files
    )


def language_problems(start: Path, splits: Mapping[str, Iterable[Files]]) -> list[str]:
    """One line per invalid entry, by its path in the recipe."""
    entries = [
        (f"data.{split}[{number}] ({join_paths(entry.path or entry.source)})", entry)
        for split, files in splits.items()
        for number, entry in enumerate(files)
        if isinstance(entry, PairFiles)
    ]
    if not entries:
        return []
    tokenizer = vocabularies(start).source
    known = sorted(tokenizer.languages)
    directions = (about(start).get("directions") or []) if known else []  # otherwise no token chooses one
    if not directions and all(entry.to is None for _, entry in entries):
        return []
    sources = any(here is not None for here, _ in directions)  # trained on pairs with a source language
    found = []
    for where, entry in entries:
        lacks = [
            key
            for key, value, wanted in (("from", entry.from_, sources), ("to", entry.to, bool(directions)))
            if wanted and value is None
        ]
        if lacks:
            keys = " and ".join(f"`{key}:`" for key in lacks)
            found.append(f"{where}: set {keys}; {start} is multilingual ({', '.join(known)})")
        elif entry.to is not None and not known:
            found.append(f"{where}: remove `to: {entry.to}` (and `from:`); {start} has no language tokens")
        elif entry.to is not None and not _knows(tokenizer, entry.to):
            found.append(
                f"{where}: `to: {entry.to}`{near(entry.to, known)}: {start} cannot translate into it (languages: "
                f"{', '.join(known)}). Choose one of them, or train a new model (`model:` instead of `start:`)"
            )
    return found


def _knows(tokenizer: Tokenizer, tag: str) -> bool:
    try:
        tokenizer.language(tag)
    except UserError:
        return False
    return True
