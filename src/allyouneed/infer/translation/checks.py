"""Doubts about a translation: low confidence, numbers that differ from the source, bytes that form no character."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allyouneed.infer.translation.numbers import differing_numbers
from allyouneed.infer.translation.split import quote
from allyouneed.tasks.confidence import LOW

INVALID = "\ufffd"  # what bytes become that form no character
# mean log-probability per token (nats) below which an answer is noted, if the model folder has no calibration
LOW_SCORE = -0.65


class Note(str):
    """A note about one translation. `kind` ("numbers", "confidence", "score", "characters") groups notes that are too
    many to print."""

    kind: str

    def __new__(cls, text: str, kind: str = "") -> Note:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


def drop_invalid(text: str) -> str:
    """Without bytes that form no character (a model over bytes can generate any)."""
    return re.sub(f" ?{INVALID}+", "", text) if INVALID in text else text


def invalid_notes(source: str, decoded: str) -> list[str]:
    """`decoded`: what the model generated, before `drop_invalid`."""
    return [Note(f"{quote(source)}: bytes that form no character were left out", "characters")] * (INVALID in decoded)


def number_notes(source: str, target: str) -> list[str]:
    found = differing_numbers(source, target)
    return [Note(f"{quote(source)}: numbers differ from the source: {', '.join(found)}", "numbers")] * bool(found)


def confidence_notes(source: str, confidence: float) -> list[str]:
    return [Note(f"{quote(source)}: low confidence ({100 * confidence:.0f} %)", "confidence")] * (confidence < LOW)


def score_notes(source: str, log_probs: Sequence[float]) -> list[str]:
    """For models without a calibrated confidence. `log_probs`: of each generated token, end mark included."""
    mean = sum(log_probs) / max(1, len(log_probs))
    return [Note(f"{quote(source)}: low score ({mean:.1f} per token)", "score")] * (mean < LOW_SCORE)
