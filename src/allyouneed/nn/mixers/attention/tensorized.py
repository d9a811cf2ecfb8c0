"""Tensorised attention: a product of three tokens' features in place of the softmax (Ma et al. 2019, "A Tensorized
Transformer for Language Modeling").

The authors' language model does not apply its causal mask: a token's output depends on later tokens. Here the `pattern`
masks both tokens that a query is combined with.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVCache, KVState
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Tensorized(AttendsByPattern, Mixer):
    """Multi-linear attention (3.1-3.2): a block-term tensor decomposition of `blocks` single-block attentions,

        T_c[i, j, k] = Σ_r g_cr Q_ir K_jr V_kr                Q, K, V of `rank` features, shared by all blocks
        y_i = W^O vec(mean_c T_c[i])                           over positions j, k < `length`

    Each block has a diagonal core g_c. Since blocks share their factors, their mean is one block with the mean core,
    which is what is computed. W^O has `length`² inputs: one weight vector for each pair of positions.
    """

    kind: Literal["tensorized"] = "tensorized"
    rank: Size | None = None
    """Features of queries, keys and values (R); default: the model width."""
    blocks: Size = 2
    """Number of single-block attentions (h), each with a core of its own."""
    length: Size
    """Longest sentence (N); W^O has its square as inputs."""
    pattern: Pattern = Full()
    """Which tokens each query is combined with, as text: `causal`."""

    @property
    def longest(self) -> int:
        return self.length

    def build(self, common: Common) -> SubLayer:
        return TensorizedModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        rank, seen = self.rank or common.width, self.pattern.mean_keys(min(length, self.length))
        total = common.linear.cost(common.width, rank, False) * 3
        total += Cost(common.linear.cost(self.length**2, common.width, False).parameters)  # of which pairs are read
        flops = 2 * rank * seen + 2 * (rank + common.width) * seen**2
        return total + Cost(self.blocks * rank, flops, state_per_token=2 * rank)


class TensorizedModule(SubLayer):
    def __init__(self, config: Tensorized, common: Common) -> None:
        super().__init__()
        self.rank, self.length, self.pattern = config.rank or common.width, config.length, config.pattern
        self.heads, self.kv_heads, self.head_width = 1, 1, self.rank  # of `qkv`, for initialisation by role
        self.qkv = common.linear.build(common.width, (self.rank,) * 3, False)
        self.cores = nn.Parameter(torch.empty(config.blocks, self.rank))
        self.out = common.linear.build(config.length**2, common.width, False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Softmax of random numbers, as in the authors' code, times √rank: outputs have the size of the inputs."""
        with torch.no_grad():
            self.cores.copy_(torch.randn(self.cores.shape).softmax(-1) * self.rank**0.5)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if not context.static:
            self.check(context.queries)
        q, k, v = self.qkv(x).chunk(3, -1)  # each (batch, time, rank)
        if isinstance(state, KVState):
            k, v, keys = state.append(k[:, None], v[:, None], context)
            mask = context.memoize(
                TensorizedModule, str(self.pattern), lambda: dense_mask(self.pattern, context.queries, keys)[:, 0]
            )
            return self.combine(q, k[:, 0], v[:, 0], mask)
        unpacked = unpack_rows(context)  # one sentence per row: a position is an index
        q, k, v = (unpacked.gather(part) for part in (q, k, v))
        mask = context.memoize(
            TensorizedModule, str(self.pattern), lambda: self.sentence_mask(q.shape[1], unpacked.real)
        )
        return unpacked.scatter(self.combine(q, k, v, mask), x)

    def sentence_mask(self, time: int, real: Tensor | None) -> Tensor:
        device = self.cores.device
        layout = TokenLayout(torch.arange(time, device=device)[None], None if real is None else real.long(), start=0)
        return dense_mask(self.pattern, layout, layout)[:, 0]

    def combine(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q (batch, queries, rank), k and v (batch, keys, rank), mask (batch or 1, queries or 1, keys)."""
        k, v = k[:, : self.length], v[:, : self.length]  # what lies beyond is padding
        mask = mask[..., : self.length].to(q.dtype)
        core = self.cores.mean(0).to(q.dtype)
        pairs = (q * core)[:, :, None] * (k[:, None] * mask[..., None])  # (batch, queries, keys, rank)
        tensor = torch.einsum("bijr,bkr->bijk", pairs, v) * mask[:, :, None]
        return self.project(tensor)

    def project(self, tensor: Tensor) -> Tensor:
        """vec(T_i) W^O; only a plain linear map gives access to the weights of the pairs that occur."""
        keys = tensor.shape[-1]
        if type(self.out) is nn.Linear:
            weight = self.out.weight.unflatten(-1, (self.length, self.length))[:, :keys, :keys]
            return tensor.flatten(2) @ weight.flatten(1).to(tensor.dtype).T
        more = self.length - keys
        return self.out(pad(tensor, (0, more, 0, more)).flatten(2))

    def check(self, layout: TokenLayout) -> None:
        if (longest := layout.longer_than(self.length)) is not None:
            text = f"sentence of {longest} tokens exceeds tensorized attention's length {self.length}"
            raise UserError(f"{text}; shorten it or increase the mixer's `length`")

    @property
    def position_limit(self) -> int:  # type: ignore[override]  # per instance, not per class
        return self.length

    def new_state(self) -> State:
        if (why := self.pattern.leak()) is not None:
            raise ValueError(f"tensorized attention with pattern '{self.pattern}' cannot decode: {why}")
        return KVCache()
