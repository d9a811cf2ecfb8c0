"""From which language into which: told, or seen by the text itself, and through a third one where a model never learnt
to go straight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.data.language_detection import LanguageDetector
from allyouneed.errors import UserError


@dataclass(frozen=True)
class Route:
    """The languages a text goes through: `into[0]` first, the last one is wanted. Empty: it is in that one already."""

    here: str | None
    into: tuple[str | None, ...]

    @property
    def named(self) -> list[str]:
        """Of all its stations, those that are known by name."""
        return [name for name in (self.here, *self.into) if name is not None]


class Routes:
    """What a model of several languages can do: its directions, and a detector where it has one."""

    def __init__(self, directions: Sequence[tuple[str | None, str]], detector: LanguageDetector | None) -> None:
        self.directions, self.detector = list(directions), detector
        read = {here for here, _ in self.directions}
        into = Counter(there for here, there in self.directions if here is not None and there in read)
        # the language that most others go into, of those that are read, too: English in most collections
        self.hub = into.most_common(1)[0][0] if into else None

    def default(self, here: str | None) -> str | None:
        """The hub, for whatever is not in it; for what is, the first the training data names."""
        if here != self.hub or here is None:
            return self.hub
        return next((there for source, there in self.directions if source == here), None)

    def of(self, text: str, to: str | None, from_: str | None) -> Route:
        """The way of one text."""
        if self.detector is None:
            return Route(from_, (to,))
        here = from_ or self.detector.detect(
            text, confident=to is not None
        )  # a doubt must not change what was asked for
        there = to or self.default(here)
        sources = {source for source, target in self.directions if target == there}
        if here is None or here in sources or None in sources or there is None:
            return Route(here, (there,))
        if here == there:
            if from_ is not None:
                raise UserError(f"the text is said to be in {from_!r} already; leave out --from or name another --to")
            return Route(here, ())
        steps = [step for step in (self.hub, *sorted(sources - {None}, key=str)) if step in sources]
        between = [step for step in steps if (here, step) in self.directions]
        if not between and from_ is not None:
            raise UserError(f"this model has not learned to translate from {from_!r} into {there!r}; from: {steps}")
        return Route(here, (*between[:1], there))
