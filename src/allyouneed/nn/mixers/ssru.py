"""SSRU, the simpler simple recurrent unit (Kim et al. 2019, "From Research to Production and Back: Ludicrously Fast
Neural Machine Translation", section 4.1): stands for self-attention in decoders that run on a CPU.

    f_t = σ(W_f x_t + b_f)        c_t = f_t ⊙ c_{t−1} + (1 − f_t) ⊙ W x_t        y_t = relu(c_t)

Forget gates depend on the token alone, so the matrices multiply whole sentences, and the cell is a linear recurrence,
evaluated by a parallel scan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.recurrence import RecurrentMixer
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.unpack import first_tokens
from allyouneed.nn.states.recurrent import Carry, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer


class SSRU(Mixer):
    """c_t = f_t ⊙ c_{t−1} + (1 − f_t) ⊙ W x_t, y_t = relu(c_t): SSRU (Kim et al. 2019, "From Research to Production and
    Back: Ludicrously Fast Neural Machine Translation", 4.1), which stands for self-attention in decoders on a CPU."""

    kind: Literal["ssru"] = "ssru"

    def build(self, common: Common) -> SubLayer:
        return SSRUModule(common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        width, linear = common.width, common.linear
        maps = linear.cost(width, width, False) + linear.cost(width, width, True)
        return maps + Cost(flops=4 * width) + recurrent_cost(width, width)


class SSRUModule(RecurrentMixer):
    """The carry is the cell."""

    traceable = unpacks = True

    def __init__(self, common: Common) -> None:
        super().__init__()
        self.value = common.linear.build(common.width, common.width, False)
        self.forget = common.linear.build(common.width, common.width, True)

    def run(self, x: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        value, forget = observe(self, "v", self.value(x)), observe(self, "k", self.forget(x).sigmoid())
        kept = forget if real is None else forget.where(real[..., None], 1.0)  # padding leaves the cell as it is
        added = (1 - kept) * value
        if starts is not None:
            kept = kept.masked_fill(first_tokens(starts)[..., None], 0.0)
        cells = observe(self, "heads", scan(kept, added, carry[0].to(x.dtype)))
        return cells.relu(), (cells[:, -1],)

    def begin(self, batch: int, like: Tensor) -> Carry:
        return (like.new_zeros(batch, like.shape[2]),)

    def half_life(self, x: Tensor) -> Tensor:
        rates: Tensor = -nn.functional.logsigmoid(self.forget(x).double()).flatten(0, -2).mean(0)
        return math.log(2) / rates

    def mixing_matrix(self, values: Mapping[str, Tensor], channels: Sequence[int]) -> Tensor:
        """(1 − f_j) f_{j+1} … f_i for j ≤ i"""
        forget = values["k"][0, :, list(channels)].T.double()  # (channels, time)
        reach = forget.log().cumsum(1)
        kept = (reach[:, :, None] - reach[:, None]).exp()  # f_{j+1} … f_i
        return (kept * (1 - forget)[:, None]).tril()


def scan(kept: Tensor, added: Tensor, cell: Tensor) -> Tensor:
    """c_t = kept_t ⊙ c_{t−1} + added_t for all tokens, from the cell before them: (batch, time, features).

    Spans of 1, 2, 4, … tokens are joined (Hillis, Steele 1986), each as the pair (Π kept, its own cell)."""
    added = torch.cat((added[:, :1] + kept[:, :1] * cell[:, None], added[:, 1:]), 1)
    span, time = 1, kept.shape[1]
    while span < time:
        added = torch.cat((added[:, :span], added[:, span:] + kept[:, span:] * added[:, :-span]), 1)
        kept = torch.cat((kept[:, :span], kept[:, span:] * kept[:, :-span]), 1)
        span *= 2
    return added
