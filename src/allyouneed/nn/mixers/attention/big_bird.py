"""BigBird as transformers computes it in evaluation mode, so that its checkpoints give the same numbers.

As a pattern, BigBird is `block-window(b, 2) | global-prefix(2b) | random-blocks(b, r, seed)`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, Biases, SelfAttention
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.attention.dense import offer_weights
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class BigBird(Mixer):
    """Zaheer et al. 2020, 2 and appendix D: a block attends to itself, its neighbours and the first and last block; the
    first and last block attend to everything.

    In evaluation, transformers draws the first block for each of the `random` blocks, so that it counts 1 + random
    times in the softmax of the inner blocks. Sentences of at most 5 + 2·random blocks use full attention. The length is
    that of the sentence (transformers uses the padded batch).
    """

    kind: Literal["big-bird"] = "big-bird"
    heads: Size
    """Number of attention heads."""
    block: Size = 64
    """Tokens of a block."""
    random: Size = 3
    """Random blocks per block."""
    bias: bool = True
    """Whether the projections of q, k and v have a bias; the output always has one."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def causal(self) -> bool:
        return False

    @property
    def attention(self) -> Attention:
        """Full attention with the same weights."""
        biases = Biases(q=self.bias, k=self.bias, v=self.bias)
        return Attention(heads=self.heads, bias=biases, dropout=self.dropout)

    @property
    def full_length(self) -> int:
        """Longest sentence with full attention."""
        return (5 + 2 * self.random) * self.block

    def build(self, common: Common) -> SubLayer:
        return BigBirdModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return self.attention.cost(common, length)  # all scores are computed

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


class BigBirdModule(SelfAttention):
    def __init__(self, config: BigBird, common: Common) -> None:
        super().__init__(config.attention, common)
        self.config = config

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        sizes = (self.config.block, self.config.random)
        seen, bias = context.memoize(BigBirdModule, sizes, lambda: self.mask_and_bias(keys))
        scores = (q @ k.transpose(-1, -2)) * self.scores.scale + bias
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) * seen  # (batch, heads, time, time), zeros for padding
        changed = offer_weights(self, lambda: scores, lambda: seen)
        weights = weights if changed is None else changed
        request = None if context.record is None else context.record.get(self)
        if request is not None:
            request.weights.append(weights if request.heads is None else weights[:, list(request.heads)])
        mixed: Tensor = torch.nn.functional.dropout(weights, self.dropout, self.training) @ v
        return cast(Tensor, observe(self, "heads", mixed))

    def mask_and_bias(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Allowed pairs and additive bias: (batch or 1, 1, time, time) both."""
        size, segments = self.config.block, layout.segments
        segments = torch.ones_like(layout.positions) if segments is None else segments
        same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
        length = same.sum(-1, keepdim=True)  # of the own sentence: (batch or 1, time, 1)
        query, key = layout.positions[:, :, None] // size, layout.positions[:, None, :] // size
        last = (length - 1) // size
        between = (query > 0) & (query < last) & (length > self.config.full_length)
        near = ((query - key).abs() <= 1) | (key == 0) | (key == last)
        bias = (between & (key == 0)) * math.log(1 + self.config.random)
        return (same & (near | ~between))[:, None], bias[:, None]

    def new_state(self) -> State:
        raise ValueError("big-bird cannot decode: it attends to later tokens")
