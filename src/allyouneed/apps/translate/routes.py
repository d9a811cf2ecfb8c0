"""Source and target language of a text: given or detected, and via a pivot language where the model has no direct
direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.data.language_detection import SURE, LanguageDetector
from allyouneed.errors import UserError

CLEAR = 10.0  # nats of the detector: how clearly a text must be in the target language to be returned unchanged
CERTAIN = 40.0  # where most texts of a list are in another; no sentence of 28,000 was taken for another by as much


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

    def of_all(self, texts: Sequence[str], to: str | None, from_: str | None) -> list[Route]:
        """The route of each text of a list. A text is taken to be in the target language already if it is not short
        and clearly is; where most others are in another language, only if that is certain."""
        if self.detector is None or to is None or from_ is not None:
            return [self.of(text, to, from_) for text in texts]
        found = [self.detector.detect_odds(text) for text in texts]
        votes = Counter(name for name, nats in found if name is not None and nats >= SURE)
        usual = next((name for name, count in votes.items() if 2 * count > votes.total()), None)
        routes = []
        for text, (here, nats) in zip(texts, found, strict=True):
            known = here if nats >= SURE else None  # an uncertain detection must not override `to`
            if known == to and not self._is_in(text, to, nats, CLEAR if usual in (to, None) else CERTAIN):
                known = None if usual == to else usual
            routes.append(self._between(known, to, None))
        return routes

    def _is_in(self, text: str, language: str, nats: float, least: float) -> bool:
        assert self.detector is not None
        return nats >= least and not self.detector.is_short(text) and self.detector.can_be(text, language)

    def of(self, text: str, to: str | None, from_: str | None) -> Route:
        """The route of one text."""
        if self.detector is None:
            return Route(from_, (to,))
        if to is not None and from_ is None:
            return self.of_all([text], to, None)[0]
        return self._between(from_ or self.detector.detect(text), to, from_)

    def _between(self, here: str | None, to: str | None, from_: str | None) -> Route:
        """The route from a language, detected or given (`from_`)."""
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
