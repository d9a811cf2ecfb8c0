"""From which language into which a file of pairs goes, where nobody says it: by what its texts are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from allyouneed.data.language_detection import LanguageDetector
from allyouneed.errors import UserError
from allyouneed.infer.translation.routes import Routes

READ = 1000  # pairs that are looked at: enough to be sure


@dataclass(frozen=True)
class Direction:
    """`note`: what a reader should know of how it was found; empty where it was told."""

    to: str | None
    from_: str | None
    note: str = ""


def direction(
    routes: Routes,
    sources: Sequence[str],
    references: Sequence[str],
    to: str | None = None,
    from_: str | None = None,
    options: str = "--from and --to",
) -> Direction:
    """What was said, if `to` was or there is only one language to go into; else what most references are in, from what
    most sources are in. `options`: what a user may say it by."""
    targets = list(dict.fromkeys(there for _, there in routes.directions))
    if to is not None or len(targets) < 2:
        return Direction(to, from_)
    known = ", ".join(f"{here or 'any'} → {there}" for here, there in routes.directions)
    say = f"this model has several directions ({known}), and {{}}; say which one with {options}"
    if routes.detector is None:
        raise UserError(say.format("nothing to tell languages apart by"))
    there = _most(routes.detector, references, [name for name in targets if name != from_])
    if there is None:
        raise UserError(say.format("the references are in none of its languages"))
    heard = [here for here, _ in routes.directions if here is not None and here != there]
    here = from_ or _most(routes.detector, sources, heard)
    way = " → ".join(routes.of("", there, here).named)
    return Direction(there, here, f"taken for {way}, by what the texts are written in ({options} say otherwise)")


def _most(detector: LanguageDetector, texts: Sequence[str], names: Collection[str]) -> str | None:
    """Which of these languages most of the texts are in."""
    step = max(1, len(texts) // READ)
    votes = Counter(found for text in texts[::step] if (found := detector.detect(text)) in names)
    return votes.most_common(1)[0][0] if votes else None
