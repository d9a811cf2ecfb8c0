"""A sound that is transcribed window by window, and its transcript."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.infer.speech.fallback import WindowResult
from allyouneed.infer.speech.words import Word

AROUND = 10  # frames around a place whose loudness counts


@dataclass(frozen=True)
class Segment:
    """The text from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """A transcript. `language`: given or detected; None for an English-only model."""

    text: str
    segments: list[Segment]
    seconds: float
    language: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SegmentDetail:
    """How a segment was decoded: in the window that begins at frame `seek`, as these tokens, timestamps included."""

    seek: int
    tokens: tuple[int, ...]
    result: WindowResult


@dataclass
class Track:
    """A sound in progress: frames before `at` are transcribed. `details`: of each segment."""

    number: int
    seconds: float
    frames: Tensor  # (mels, time), at least one window
    at: int = 0
    language: str | None = None
    segments: list[Segment] = field(default_factory=list)
    details: list[SegmentDetail] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all segments
    context: list[int] = field(default_factory=list)  # tokens that prompt the next window
    notes: list[str] = field(default_factory=list)

    words: list[Word] = field(default_factory=list)  # of a model that says when each token was spoken
    hop: int = HOP  # samples of a frame

    @property
    def total(self) -> int:
        return max(1, round(self.seconds * RATE) // self.hop)


def quietest(loudness: Tensor) -> int:
    """The quietest place of the second half."""
    half, around = len(loudness) // 2, AROUND
    smooth = torch.nn.functional.avg_pool1d(loudness[None, half:], 2 * around + 1, 1)[0]
    return half + around + int(smooth.argmin())


def join(texts: Iterable[str]) -> str:
    """Texts one after the other, with spaces where the script has them."""
    found = ""
    for text in texts:
        dense = not found or EAST_ASIAN_CHARACTER.match(found[-1]) or EAST_ASIAN_CHARACTER.match(text)
        found += text if dense else f" {text}"
    return found
