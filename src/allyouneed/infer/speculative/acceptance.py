"""Which draft tokens are accepted, and what is sampled instead of the first rejected one, so that the output has the
distribution of the model alone (Leviathan et al. 2023, algorithm 1 and appendix A.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.rules import TokenRules, find_short
from allyouneed.infer.decoding.sampling import invert_cdf


class PositionRules:
    """The decoding rules of one spec at many positions at once, where `IndependentSearch` has one per row."""

    def __init__(self, spec: DecodingSpec, device: torch.device) -> None:
        self.options, self.rules = spec.decoding, TokenRules(spec, device)
        self.samples = spec.decoding.method == "sample"
        self.needs_history = spec.decoding.has_penalties

    def apply(self, logits: Tensor, lengths: Sequence[int], histories: Sequence[Sequence[int]] = ()) -> Tensor:
        """Penalise and ban tokens of logits (positions, vocab). `lengths`: tokens generated before each position;
        `histories`: all tokens before it, the prompt included, where penalties need them (`needs_history`)."""
        if self.needs_history:
            logits = Penalties(self.options, histories).apply(logits)
        short = find_short(lengths, self.rules.min_tokens)
        counts = torch.tensor(lengths, device=logits.device) if short == "some" else self.rules.eos_tokens
        return self.rules.ban_tokens(logits, counts, short)


def is_accepted(uniforms: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    """Accept a token of probability `draft` under the draft and `target` under the model with probability
    min(1, target / draft), decided by `uniforms` in [0, 1)."""
    return uniforms * draft < target


def resample(target: Tensor, draft: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from max(0, target − draft) in place of a rejected token, (positions, vocab) to (positions,). Without a
    draft token, `draft` is 0."""
    left = (target - draft).clamp(min=0)
    none = left.sum(-1, keepdim=True) <= 0  # both are equal to the last digit
    return invert_cdf(torch.where(none, target, left), uniforms)
