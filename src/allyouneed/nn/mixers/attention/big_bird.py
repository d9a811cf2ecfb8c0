"""BigBird as transformers computes it when it does not train, so that its checkpoints give the same numbers here.

A BigBird of one's own is a pattern: `block-window(b, 2) | global-prefix(2b) | random-blocks(b, r, seed)`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, Biases, SelfAttention
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class BigBird(Mixer):
    """Zaheer et al. 2020, 2 and appendix D: a block of tokens sees itself, its neighbours, and the first and the last
    block of the sentence, which see everything.

    In evaluation their code draws the first block for every one of the `random` blocks, so that it counts 1 + random
    times in the softmax of all blocks between the first and the last. A sentence of no more than 5 + 2·random blocks is
    attended to as a whole. The length is the sentence's own (theirs is that of the padded batch).
    """

    kind: Literal["big-bird"] = "big-bird"
    heads: Size
    block: Size = 64
    random: Size = 3
    bias: bool = True  # of queries, keys and values; the output always has one
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def causal(self) -> bool:
        return False

    @property
    def attention(self) -> Attention:
        """Whole attention with the same weights."""
        biases = Biases(q=self.bias, k=self.bias, v=self.bias)
        return Attention(heads=self.heads, bias=biases, dropout=self.dropout)

    @property
    def whole(self) -> int:
        """The longest sentence of which all is seen."""
        return (5 + 2 * self.random) * self.block

    def build(self, common: Common) -> SubLayer:
        return BigBirdModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return self.attention.cost(common, length)  # every score is computed

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


class BigBirdModule(SelfAttention):
    def __init__(self, config: BigBird, common: Common) -> None:
        super().__init__(config.attention, common)
        self.config = config

    def look(self, q: Tensor, k: Tensor, v: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        seen, bias = context.plan(("big-bird", self.config.block, self.config.random), lambda: self.sight(keys))
        scores = (q @ k.transpose(-1, -2)) * self.scores.scale + bias
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) * seen  # (batch, heads, time, time), zeros for padding
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            wanted.found.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])
        return torch.nn.functional.dropout(weights, self.dropout, self.training) @ v

    def sight(self, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        """Who sees whom, and what is added to the scores: (batch or 1, 1, time, time) both."""
        size, segments = self.config.block, layout.segments
        segments = torch.ones_like(layout.positions) if segments is None else segments
        same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
        length = same.sum(-1, keepdim=True)  # of the own sentence: (batch or 1, time, 1)
        query, key = layout.positions[:, :, None] // size, layout.positions[:, None, :] // size
        last = (length - 1) // size
        between = (query > 0) & (query < last) & (length > self.config.whole)
        near = ((query - key).abs() <= 1) | (key == 0) | (key == last)
        bias = (between & (key == 0)) * math.log(1 + self.config.random)
        return (same & (near | ~between))[:, None], bias[:, None]

    def new_state(self) -> State:
        raise ValueError("big-bird sees later tokens: it cannot decode")
