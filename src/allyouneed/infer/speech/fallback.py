"""Decoding options of a window of sound, and temperature fallback (Radford et al. 2022, 4.5)."""

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
MAX_CONTEXT_TEMPERATURE = 0.5  # text decoded at a higher temperature is not a prompt for the next window


class TranscriptionOptions(Config):
    """A text that repeats itself (compresses well) or has a low probability is decoded again at the next of the
    `temperatures`; a window without speech has no text."""

    beam: Annotated[int, Field(gt=0)] = 5  # at temperature 0; 1 is greedy
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    packs: Annotated[float, Field(gt=0)] | None = 2.4  # maximum compression ratio of a text
    belief: float | None = -1.0  # minimum mean log-probability per token
    silence: Annotated[float, Field(ge=0, le=1)] | None = 0.6  # maximum no-speech probability
    previous: bool = True  # prompt a window with the text before it
    seed: Annotated[int, Field(ge=0)] = 0

    def decoding(self, temperature: float, most: int) -> Decoding:
        """Decoding options at this temperature; a beam returns all hypotheses, for `best`."""
        # no loop detection: repetition is detected by the compression ratio, as in the authors' code
        shared: dict[str, Any] = {"max_length": most, "length_penalty": 1.0, "penalty": "power", "loops": None}
        if temperature:
            return Decoding(method="sample", temperature=temperature, seed=self.seed, **shared)
        return (
            Decoding(method="greedy", **shared)
            if self.beam == 1
            else Decoding(beam=self.beam, best=self.beam, **shared)
        )

    @staticmethod
    def best(found: Sequence[Hypothesis]) -> Hypothesis:
        """The highest log-probability per token, the end token not counted, as in the authors' code."""
        return max(found, key=lambda hypothesis: hypothesis.log_prob / max(1, len(hypothesis.tokens)))

    def is_silence(self, result: WindowResult) -> bool:
        """Whether the window has no speech."""
        quiet = self.silence is not None and result.no_speech > self.silence
        return quiet and (self.belief is None or result.mean_log_prob < self.belief)

    def needs_fallback(self, result: WindowResult) -> bool:
        """Whether the window is decoded again at the next temperature."""
        if self.is_silence(result):
            return False
        raw = result.text.encode()
        repeats = self.packs is not None and bool(raw) and len(raw) / len(zlib.compress(raw)) > self.packs
        return repeats or (self.belief is not None and result.mean_log_prob < self.belief)

    def is_context(self, result: WindowResult) -> bool:
        """Whether the text of this window prompts the next one."""
        return self.previous and result.temperature <= MAX_CONTEXT_TEMPERATURE


@dataclass(frozen=True)
class WindowResult:
    """The text of a window. `mean_log_prob`: per token; `no_speech`: probability that there is no speech."""

    tokens: list[int]
    text: str
    mean_log_prob: float
    no_speech: float
    temperature: float
