"""Pairs for a model that tells languages apart must say theirs: what is wrong with those of a recipe with `start:`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files, join_paths
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, near
from allyouneed.interop.load import about, vocabularies


def problems(start: Path, splits: Mapping[str, Iterable[Files]]) -> list[str]:
    """Of the entries of each split, a line each, by where it stands."""
    directions = about(start).get("directions") or []
    entries = [
        (f"data.{split}[{number}] ({join_paths(entry.path or entry.source)})", entry)
        for split, files in splits.items()
        for number, entry in enumerate(files)
        if isinstance(entry, PairFiles)
    ]
    if not directions and all(entry.to is None for _, entry in entries):
        return []
    tokenizer = vocabularies(start).source
    known = sorted(tokenizer.languages)
    sources = any(here is not None for here, _ in directions)  # it was trained on pairs that say what they come from
    found = []
    for where, entry in entries:
        lacks = [
            key
            for key, value, wanted in (("from", entry.from_, sources), ("to", entry.to, bool(directions)))
            if wanted and value is None
        ]
        if lacks:
            say = " and ".join(f"`{key}:`" for key in lacks)
            found.append(f"{where}: say {say}; {start} tells languages apart: {', '.join(known)}")
        elif entry.to is not None and not known:
            found.append(f"{where}: leave out `to: {entry.to}` (and `from:`); {start} knows no languages by name")
        elif entry.to is not None and not _knows(tokenizer, entry.to):
            found.append(
                f"{where}: `to: {entry.to}`{near(entry.to, known)} is no language that {start} can go into; it knows: "
                f"{', '.join(known)}. Name one of them, or train a model of your own (`model:` instead of `start:`)"
            )
    return found


def _knows(tokenizer: Tokenizer, tag: str) -> bool:
    try:
        tokenizer.language(tag)
    except UserError:
        return False
    return True
