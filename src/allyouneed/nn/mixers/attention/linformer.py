"""Linformer: keys and values are projected along the sequence to a fixed rank (Wang et al. 2020, "Linformer:
Self-Attention with Linear Complexity")."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
Sharing = Literal["none", "headwise", "key-value", "layerwise"]


class Linformer(Mixer):
    """head_i = softmax(Q_i (E_i K_i)ᵀ / √head_width) F_i V_i (eq. 7), E and F of shape (rank, length).

    `sharing` (section 4): `none`, E and F per head; `headwise`, one E and one F per layer; `key-value`, one E = F per
    layer; `layerwise`, one for the whole stack. A column of E belongs to a position, so shorter sentences use the first
    columns and `length` is the maximum. Every projected key mixes all tokens, so it cannot be causal.
    """

    kind: Literal["linformer"] = "linformer"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    length: Size
    """Longest sentence (n)."""
    rank: Size
    """Projected length (k)."""
    sharing: Sharing = "headwise"
    """Which projections along the sequence are one: none, of all heads, of keys and values too, or of all layers."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def causal(self) -> bool:
        return False

    def leak(self) -> str | None:
        return "every linformer key mixes all tokens"

    @property
    def attention(self) -> Attention:
        """The full attention it approximates."""
        return Attention(heads=self.heads, head_width=self.head_width, bias=self.bias, dropout=self.dropout)

    def sizes(self, common: Common) -> Heads:
        return self.attention.sizes(common)

    @property
    def projections(self) -> int:
        """Projections per layer, or per stack when layers share one."""
        return {"none": 2 * self.heads, "headwise": 2, "key-value": 1, "layerwise": 1}[self.sharing]

    @property
    def one_per_stack(self) -> Hashable:
        return ("linformer", self.length, self.rank) if self.sharing == "layerwise" else None

    @property
    def longest(self) -> int:
        return self.length

    def build(self, common: Common) -> SubLayer:
        return LinformerModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        inner, linear = self.sizes(common).inner, common.linear
        total = linear.cost(common.width, inner, self.bias) * 3 + linear.cost(inner, common.width, self.bias)
        total += Cost(flops=2 * 2 * inner * self.rank + 2 * 2 * inner * self.rank)  # projection and attention
        if self.one_per_stack is None:
            total += Cost(parameters=self.projections * self.rank * self.length)
        return total

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        key = self.one_per_stack
        return {} if key is None else {key: Cost(parameters=self.rank * self.length)}

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return self.attention.problems(common)


class Projections(nn.Module):
    """E and F, or one used as both: (1 or 2, 1 or heads, rank, length)."""

    def __init__(self, config: Linformer) -> None:
        super().__init__()
        self.one_per_stack = config.one_per_stack
        both = min(config.projections, 2)
        self.table = nn.Parameter(torch.empty(both, config.projections // both, config.rank, config.length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.table.shape[2] ** -0.5)  # theorem 2: variance 1/k

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, heads, time, head_width) to (batch, heads, rank, head_width); positions start at 0."""
        first, last = self.table[0, :, :, : k.shape[2]], self.table[-1, :, :, : k.shape[2]]
        return first.to(k.dtype) @ k, last.to(v.dtype) @ v


class LinformerModule(SubLayer):
    def __init__(self, config: Linformer, common: Common) -> None:
        super().__init__()
        sizes = config.sizes(common)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.length, self.dropout = sizes.head_width, config.length, config.dropout
        self.qkv = common.linear.build(common.width, [sizes.inner] * 3, config.bias)
        self.projections = Projections(config)
        self.out = common.linear.build(sizes.inner, common.width, config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        unpacked = unpack_rows(context)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (sentences, heads, time, head_width)
            for part in self.qkv(unpacked.gather(x)).chunk(3, -1)
        )
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        if unpacked.real is not None:
            k, v = k * unpacked.real[:, None, :, None], v * unpacked.real[:, None, :, None]
        k, v = self.projections(*(self.truncate_padding(part, unpacked.real) for part in (k, v)))
        y = observe(self, "heads", sdpa(q, k, v, dropout_p=self.dropout if self.training else 0.0))
        return self.out(unpacked.scatter(y.transpose(1, 2).flatten(2), x))

    def truncate_padding(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Drop padding beyond the last projected position."""
        if x.shape[2] <= self.length:
            return x
        longest = x.shape[2] if real is None else int(real.sum(1).max())
        if longest > self.length:
            text = f"sentence of {longest} tokens exceeds the linformer's length {self.length}"
            raise UserError(f"{text}; shorten it or increase the mixer's `length`")
        return x[:, :, : self.length]

    def new_state(self) -> State:
        raise ValueError("linformer cannot decode: every key mixes all tokens")
