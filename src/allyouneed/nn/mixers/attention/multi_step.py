"""Multi-step attention (Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", 3.3)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import SoftmaxAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.patterns.core import Full
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer


class MultiStep(Mixer):
    """Eq. 1–2: d_i = W h_i + b + g_i, a_ij = softmax_j(d_i · z_j), c_i = Σ_j a_ij (z_j + e_j); the output is √m c_i.

    z is the encoder output and e its embeddings; g are the target embeddings and m is the source length (3.4: m
    √(1/m)). Only the query is projected, so nothing is cached.
    """

    supports_cross: ClassVar[bool] = True
    supports_self: ClassVar[bool] = False

    kind: Literal["multi-step"] = "multi-step"

    def build(self, common: Common) -> SubLayer:
        raise TypeError("multi-step attention needs an encoder; use it as a cross")

    def build_cross(self, common: Common) -> SubLayer:
        return MultiStepModule(common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return common.linear.cost(common.width, common.width, True) + Cost(flops=4 * common.width * length)


class MultiStepModule(SoftmaxAttention):
    def __init__(self, common: Common) -> None:
        super().__init__(Full(), ScoresModule(), RelativeModule(), False, 0.0)
        self.query = common.linear.build(common.width, common.width, True)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory, inputs = context.memory, context.inputs
        assert memory is not None and memory.inputs is not None and inputs is not None, (
            "multi-step attention needs source and target embeddings"
        )
        z, values, layout, root = context.memoize(
            MultiStepModule, len(x), lambda: _source_tensors(memory, context, len(x))
        )
        q = self.query(x) + inputs
        attended = self.attend(q[:, None], z[:, None], values[:, None], context, layout)  # (batch, 1, time, width)
        return attended[:, 0] * root

    def new_state(self) -> None:
        return None


def _source_tensors(memory: Memory, context: Context, rows: int) -> tuple[Tensor, Tensor, TokenLayout, Tensor]:
    """Shared by all layers, repeated for each beam: z, z + e, their layout, and √m per token (rows, time or 1, 1)."""
    if (beams := rows // max(1, len(memory.hidden))) > 1:
        memory = memory.select(torch.arange(len(memory.hidden), device=memory.hidden.device).repeat_interleave(beams))
    z, layout, queries = memory.hidden, memory.layout, context.queries
    assert memory.inputs is not None
    if layout.segments is None:
        count = torch.full((1, 1), layout.time, device=z.device)
    elif layout.packed and queries.segments is not None:
        count = (queries.segments[:, :, None] == layout.segments[:, None]).sum(-1)
    else:
        count = (layout.segments > 0).sum(-1, keepdim=True)
    return z, z + memory.inputs, layout, count[..., None].to(z.dtype).sqrt()
