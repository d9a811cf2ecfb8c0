"""The direction of a file of sentence pairs, detected from its texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from allyouneed.apps.translate.routes import Routes
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.languages import find
from allyouneed.errors import UserError

SAMPLED = 1000  # pairs to detect languages from


@dataclass(frozen=True)
class Direction:
    """`note`: how it was detected; empty if it was given."""

    to: str | None
    from_: str | None
    note: str = ""


def find_direction(
    routes: Routes,
    sources: Sequence[str],
    references: Sequence[str],
    to: str | None = None,
    from_: str | None = None,
    options: str = "--from and --to",
) -> Direction:
    """The given direction if `to` is set or there is only one target language; else the language of most references,
    from that of most sources. `options`: how the user sets it, for errors."""
    targets = list(dict.fromkeys(there for _, there in routes.directions))
    to = _code(to, targets)
    from_ = _code(from_, [here for here, _ in routes.directions if here is not None])
    if to is not None or len(targets) < 2:
        return Direction(to, from_)
    known = ", ".join(f"{here or 'any'} → {there}" for here, there in routes.directions)
    problem = f"this model has several directions ({known}), and {{}}; set one with {options}"
    if routes.detector is None:
        raise UserError(problem.format("no language detector"))
    there = _most_frequent(routes.detector, references, [name for name in targets if name != from_])
    if there is None:
        raise UserError(problem.format("the references are in none of its languages"))
    known_sources = [here for here, _ in routes.directions if here is not None and here != there]
    here = from_ or _most_frequent(routes.detector, sources, known_sources)
    route = " → ".join(routes.of("", there, here).named)
    return Direction(there, here, f"detected direction {route}; {options} override it")


def _code(name: str | None, known: Sequence[str]) -> str | None:
    """The model's code for a language name; the name itself where the model has no such language."""
    found = [] if name is None else find(name, known)
    return found[0] if len(found) == 1 else name


def _most_frequent(detector: LanguageDetector, texts: Sequence[str], names: Collection[str]) -> str | None:
    """The most frequent of these languages among the texts."""
    step = max(1, len(texts) // SAMPLED)
    votes = Counter(found for text in texts[::step] if (found := detector.detect(text)) in names)
    return votes.most_common(1)[0][0] if votes else None
