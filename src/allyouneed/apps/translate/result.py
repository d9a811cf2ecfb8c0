"""What a translator returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from allyouneed.apps.translate.confidence import WordConfidence
from allyouneed.infer.speculative.stats import DraftStats


@dataclass(frozen=True)
class Candidate:
    """One translation; `score`: the mean over its chunks of log-probability over length penalty."""

    text: str
    score: float


@dataclass(frozen=True)
class AlignmentLink:
    """A target token and the source token it attends to most, as text and as character spans."""

    source: str
    target: str
    source_span: tuple[int, int]
    target_span: tuple[int, int]


@dataclass(frozen=True)
class Translation:
    """A translation with candidates, notes and alignment."""

    source: str
    candidates: list[Candidate]  # best first
    notes: list[str] = field(default_factory=list)  # e.g. splits, missing end tokens
    alignment: list[AlignmentLink] | None = None  # of the best candidate, if requested
    route: list[str] = field(default_factory=list)  # languages, source first; for models with a detector
    guesses: DraftStats | None = None  # acceptance of draft tokens, with speculative decoding
    skipped: bool = False  # returned unchanged: it is in the target language already
    # probability that the best candidate is acceptable; None: the model folder has no calibration
    confidence: float | None = None
    words: list[WordConfidence] | None = None  # of the best candidate, if requested

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def score(self) -> float:
        return self.candidates[0].score
