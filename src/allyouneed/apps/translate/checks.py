"""Doubts about a translation: low confidence, numbers that differ from the source."""

from __future__ import annotations

from collections.abc import Sequence

from allyouneed.apps.translate.numbers.numbers import differing_numbers
from allyouneed.errors import quote
from allyouneed.infer.decoding.notes import Note
from allyouneed.tasks.translation.confidence import LOW

# mean log-probability per token (nats) below which an answer is noted, if the model folder has no calibration
LOW_SCORE = -0.65


def number_notes(source: str, target: str) -> list[str]:
    found = differing_numbers(source, target)
    return [Note(f"{quote(source)}: numbers differ from the source: {', '.join(found)}", "numbers")] * bool(found)


def confidence_notes(source: str, confidence: float) -> list[str]:
    return [Note(f"{quote(source)}: low confidence ({100 * confidence:.0f} %)", "confidence")] * (confidence < LOW)


def score_notes(source: str, log_probs: Sequence[float]) -> list[str]:
    """Notes on low scores, for models without a calibrated confidence. `log_probs`: of each generated token, end mark
    included."""
    mean = sum(log_probs) / max(1, len(log_probs))
    return [Note(f"{quote(source)}: low score ({mean:.1f} per token)", "score")] * (mean < LOW_SCORE)
