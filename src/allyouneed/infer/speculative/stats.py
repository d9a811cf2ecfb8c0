"""How well a draft did, and which options allow one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding


@dataclass(frozen=True)
class DraftStats:
    """`passes` of the model, draft tokens (`guessed`), and how many of them were accepted (`right`)."""

    passes: int = 0
    guessed: int = 0
    right: int = 0

    def __str__(self) -> str:
        rate = (self.passes + self.right) / max(1, self.passes)
        return f"{self.right} of {self.guessed} draft tokens accepted, {rate:.1f} tokens per pass"

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(self.passes + other.passes, self.guessed + other.guessed, self.right + other.right)


@dataclass(frozen=True, slots=True)
class SpeculativeHypothesis(Hypothesis):
    stats: DraftStats = DraftStats()


def total_stats(answers: Sequence[Sequence[Hypothesis]]) -> DraftStats | None:
    """The sum over all answers; None: decoded without a draft."""
    found = [one.stats for answer in answers for one in answer if isinstance(one, SpeculativeHypothesis)]
    return sum(found, DraftStats()) if found else None


def check_draft_options(decoding: Decoding) -> None:
    if decoding.method == "beam" and decoding.beam > 1:
        raise UserError(f"draft: not supported with a beam of {decoding.beam}; use method 'greedy' or 'sample'")
