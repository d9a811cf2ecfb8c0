"""Source and target language of a text: given or detected, and via a pivot language where the model has no direct
direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.data.language_detection import LanguageDetector
from allyouneed.errors import UserError


@dataclass(frozen=True)
class Route:
    """The languages a text is translated into, in order; the last is the target. Empty: it is in the target
    language."""

    here: str | None
    into: tuple[str | None, ...]

    @property
    def named(self) -> list[str]:
        """All languages of the route that have a name, the source first."""
        return [name for name in (self.here, *self.into) if name is not None]


class Routes:
    """The directions of a multilingual model, and its language detector if it has one."""

    def __init__(self, directions: Sequence[tuple[str | None, str]], detector: LanguageDetector | None) -> None:
        self.directions, self.detector = list(directions), detector
        read = {here for here, _ in self.directions}
        into = Counter(there for here, there in self.directions if here is not None and there in read)
        # the pivot: the target of most directions that is also a source; English in most collections
        self.pivot = into.most_common(1)[0][0] if into else None

    def default(self, here: str | None) -> str | None:
        """The default target: the pivot; for a text in the pivot language, the first target of the training data."""
        if here != self.pivot or here is None:
            return self.pivot
        return next((there for source, there in self.directions if source == here), None)

    def of(self, text: str, to: str | None, from_: str | None) -> Route:
        """The route of one text."""
        if self.detector is None:
            return Route(from_, (to,))
        here = from_ or self.detector.detect(
            text, confident=to is not None
        )  # an uncertain detection must not override `to`
        there = to or self.default(here)
        sources = {source for source, target in self.directions if target == there}
        if here is None or here in sources or None in sources or there is None:
            return Route(here, (there,))
        if here == there:
            if from_ is not None:
                raise UserError(f"source and target language are both {from_!r}; remove --from or set another --to")
            return Route(here, ())
        steps = [step for step in (self.pivot, *sorted(sources - {None}, key=str)) if step in sources]
        pivots = [step for step in steps if (here, step) in self.directions]
        if not pivots and from_ is not None:
            raise UserError(f"this model was not trained to translate from {from_!r} into {there!r}; from: {steps}")
        return Route(here, (*pivots[:1], there))
