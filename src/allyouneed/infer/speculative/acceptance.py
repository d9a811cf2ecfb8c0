"""Which guesses are taken, and what is said instead of the first that is not: so that what is said has the very chances
it has without anybody guessing (Leviathan et al. 2023, algorithm 1 and appendix A.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.options import inverted, keep_likely
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.topk import best_place


class Odds:
    """What may be said at many places at once, by scores (places, vocab), as `IndependentSearch` has it for one place a row."""

    def __init__(self, way: DecodingSpec, device: torch.device) -> None:
        self.way, self.decoding = way, way.decoding
        ends = sorted({way.eos, *way.ends})
        never = [token for token in way.forbidden if token not in ends]
        self.ends = torch.tensor(ends, device=device)
        self.never = torch.tensor(never, dtype=torch.long, device=device)
        self.least = way.decoding.min_length - way.counted
        self.draws = way.decoding.method == "sample"
        self.minds_past = way.decoding.repetition_penalty != 1 or way.decoding.no_repeat is not None

    def shaped(self, scores: Tensor, ages: Sequence[int], pasts: Sequence[Sequence[int]] = ()) -> Tensor:
        """After so many tokens each (`ages`); `pasts`: all that stands before, where that matters (`minds_past`)."""
        if self.minds_past:
            scores = Penalties(self.decoding, pasts).changed(scores)
        if len(self.never):
            scores = scores.index_fill(-1, self.never, -torch.inf)
        if any(age < self.least for age in ages):
            early = torch.tensor([age < self.least for age in ages], device=scores.device)[:, None]
            scores = torch.where(early, scores.index_fill(-1, self.ends, -torch.inf), scores)
        return scores

    def best(self, shaped: Tensor) -> Tensor:
        return best_place(shaped)

    def chances(self, shaped: Tensor) -> Tensor:
        """(places, vocab), of which each place has one in all."""
        asked = self.decoding
        likely = keep_likely(shaped / asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        return likely.double().softmax(-1)


def taken(chance: Tensor, theirs: Tensor, ours: Tensor) -> Tensor:
    """Whether a guess is taken that its maker says with probability `theirs` and the model with `ours`: with
    probability min(1, ours / theirs), decided by `chance`, uniform in [0, 1)."""
    return chance * theirs < ours


def instead(ours: Tensor, theirs: Tensor, chance: Tensor) -> Tensor:
    """What the model says where a guess was not taken, (places, vocab) to (places,): drawn from max(0, ours − theirs).
    Where nobody guessed, `theirs` is 0 throughout."""
    left = (ours - theirs).clamp(min=0)
    none = left.sum(-1, keepdim=True) <= 0  # both agree to the last digit
    return inverted(torch.where(none, ours, left), chance)
