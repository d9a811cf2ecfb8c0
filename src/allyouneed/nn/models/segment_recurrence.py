"""Segment-level recurrence (Transformer-XL: Dai et al. 2019, 3.2), for any model that decodes.

A segment attends to the cached states of earlier segments, through which no gradient flows: h̃ = [SG(h_τ) ∘ h_{τ+1}].
The pattern sets how far back it reaches, in positions, independent of the segment length. If segments are as long as
the blocks, `causal & block-window(n, 1 + m)` is the authors' mask: all earlier tokens of the segment, and the m
segments before it. `causal & window(n)` is their evaluation mask (`same_length`): the same number of keys for every
token. Attention with `cache: hidden` reproduces their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


def run_segments(model: Any, tokens: Tensor, length: int, states: States) -> Iterator[tuple[slice, Tensor]]:
    """Yields (span, hidden states) of consecutive segments of `length` tokens (rows, time), updating `states`.

    To train, call backward before requesting the next segment: `states` are detached after each.
    """
    for begin in range(0, tokens.shape[1], length):
        span = slice(begin, min(begin + length, tokens.shape[1]))
        yield span, model.advance(Rows(tokens[:, span]), states)
        states.detach()
