"""Long texts, a segment at a time: Transformer-XL's recurrence (Dai et al. 2019, 3.2), for any model that decodes.

A segment sees what the model remembers of those before it, through which no gradient flows: h̃ = [SG(h_τ) ∘ h_{τ+1}].
How far back that reaches is said by the pattern, in places, not by the way a text is cut. Where all segments are as
long as the blocks, `causal & block-window(n, 1 + m)` is the authors' mask: everything of the own segment that came
before, and the m segments before it as a whole. `causal & window(n)` is the one they evaluate with (`same_length`):
every token sees as many. Attention that keeps its `hidden` states is theirs to the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


def segment_by_segment(model: Any, tokens: Tensor, length: int, states: States) -> Iterator[tuple[slice, Tensor]]:
    """The hidden states of `length` tokens (rows, time) after another, and which these are; `states` go on.

    Whoever trains does so before asking for the next segment: the loss of one is what there is to go backward through.
    """
    for begin in range(0, tokens.shape[1], length):
        span = slice(begin, min(begin + length, tokens.shape[1]))
        yield span, model.advance(Rows(tokens[:, span]), states)
        states.detach()
