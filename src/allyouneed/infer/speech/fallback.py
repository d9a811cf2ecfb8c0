"""How a window of sound is decoded, and when an answer is good enough (Radford et al. 2022, 4.5)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from allyouneed.config import Config
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding

Temperatures = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)]
WARM = 0.5  # what was found at a higher temperature tells the next window nothing


class Listening(Config):
    """A text that repeats itself (it packs well) or that the model does not believe in is looked for again at the next
    of the `temperatures`; a window without speech has no text."""

    beam: Annotated[int, Field(gt=0)] = 5  # at temperature 0; 1 is greedy
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    packs: Annotated[float, Field(gt=0)] | None = 2.4  # bytes of a text over those of the same text compressed: at most
    belief: float | None = -1.0  # mean log-probability of a token: at least
    silence: Annotated[float, Field(ge=0, le=1)] | None = 0.6  # chance that nobody speaks: at most
    previous: bool = True  # a window is told what was said before it
    seed: Annotated[int, Field(ge=0)] = 0

    def decoding(self, temperature: float, most: int) -> Decoding:
        """All hypotheses of a beam come back, for `best` to choose from."""
        # what repeats itself is doubted here, by the authors' own rule
        told: dict[str, Any] = {"max_length": most, "length_penalty": 1.0, "penalty": "power", "loops": None}
        if temperature:
            return Decoding(method="sample", temperature=temperature, seed=self.seed, **told)
        return Decoding(method="greedy", **told) if self.beam == 1 else Decoding(beam=self.beam, best=self.beam, **told)

    @staticmethod
    def best(found: Sequence[Hypothesis]) -> Hypothesis:
        """By the log-probability of all over the number of tokens, in which the authors' code does not count the end
        mark."""
        return max(found, key=lambda hypothesis: hypothesis.log_prob / max(1, len(hypothesis.tokens)))

    def nobody(self, answer: Answer) -> bool:
        """Nobody speaks in this window."""
        quiet = self.silence is not None and answer.silence > self.silence
        return quiet and (self.belief is None or answer.belief < self.belief)

    def doubtful(self, answer: Answer) -> bool:
        """It is looked for again, at a higher temperature."""
        if self.nobody(answer):
            return False
        raw = answer.text.encode()
        repeats = self.packs is not None and bool(raw) and len(raw) / len(zlib.compress(raw)) > self.packs
        return repeats or (self.belief is not None and answer.belief < self.belief)

    def goes_on(self, answer: Answer) -> bool:
        """The next window is told what was said in this one."""
        return self.previous and answer.temperature <= WARM


@dataclass(frozen=True)
class Answer:
    """What was found for a window: `belief` is the mean log-probability, `silence` the chance that nobody speaks."""

    tokens: list[int]
    text: str
    belief: float
    silence: float
    temperature: float
