"""White-box layers that compress and sparsify (Yu et al. 2023, "White-Box Transformers via Sparse Rate Reduction").

A CRATE layer is one descent step on the sparse rate reduction (eq. 1): attention with one projection for queries, keys
and values lowers the coding rate of tokens against subspaces U_k (2.3), then one ISTA step sparsifies them in a
dictionary D (2.4). ISTA returns the new token instead of a residual, so it has a layer of its own without a skip
connection:

    encoder: 12×(compress, sparsify)    compress: pre-norm, mssa    sparsify: no-skip, ista
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.linear.dense import Dense
from allyouneed.nn.mixers.attention.attention import SoftmaxAttention, cache_cost
from allyouneed.nn.mixers.attention.scores import ScaledDot
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.positions.relative import Heads, NoRelative
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVState
from allyouneed.nn.sublayer import AttendsByPattern, Channel, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class MSSA(AttendsByPattern, Mixer):
    """Multi-head subspace self-attention, eq. 11–12: MSSA(Z) = [U_1 … U_K] [SSA(Z|U_1); …; SSA(Z|U_K)], SSA(Z|U) = UᵀZ
    softmax((UᵀZ)ᵀ(UᵀZ)); decoding caches UᵀZ, half the size of a KV cache.

    `out: tied` is that equation, with the constant p/(nε²) absorbed by U. `linear` replaces [U_1 … U_K] by a separate
    map with bias, as in the authors' code. Scores are divided by √head_width, as there.
    """

    kind: Literal["mssa"] = "mssa"
    heads: Size
    """Number of subspaces (heads)."""
    head_width: Size | None = None
    """Dimensions of a subspace; default: width / heads."""
    pattern: Pattern = Full()
    """Which keys each query may attend to, as text: `causal & window(256)`."""
    out: Literal["linear", "tied"] = "linear"
    """Output map: separate with bias (the authors' code), or tied to the subspaces (eq. 11)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    def sizes(self, common: Common) -> Heads:
        width = self.head_width or max(1, common.width // self.heads)
        return Heads(self.heads, self.heads, width, self.pattern.causal)

    def build(self, common: Common) -> SubLayer:
        return MSSAModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        inner, linear = self.sizes(common).inner, common.linear
        total = linear.cost(common.width, inner, False) + cache_cost(self.pattern, inner, length)
        back = linear.cost(inner, common.width, True)
        total += back if self.out == "linear" else Cost(flops=back.flops)
        return total + Cost(flops=4 * inner * self.pattern.mean_keys(length))

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if self.out == "tied" and not isinstance(common.linear, Dense):
            found.append(("out", "tied output needs linear: dense; set out: linear"))
        return found


class MSSAModule(SoftmaxAttention):
    def __init__(self, config: MSSA, common: Common) -> None:
        sizes, plain = config.sizes(common), NoRelative()
        scores = ScaledDot().build(sizes, common)
        super().__init__(config.pattern, scores, plain.build(sizes, common), False, config.dropout)
        self.heads = sizes.heads
        self.subspaces = common.linear.build(common.width, sizes.inner, False)  # rows are U_1ᵀ, …, U_Kᵀ
        self.out = common.linear.build(sizes.inner, common.width, True) if config.out == "linear" else None
        self.exact = self.out is None  # tied weights are used in both directions, which packed weights cannot

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        z = self.subspaces(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, time, head_width)
        q, k, keys = self.scores.prepare(z), z, context.queries
        if state is not None:
            assert isinstance(state, KVState)
            k, _, keys = state.append(z, z[..., :0], context)  # keys equal values
        seen = self.attend(q, k, k, context, keys).transpose(1, 2).flatten(2)
        if self.out is not None:
            return self.out(seen)
        assert isinstance(self.subspaces, nn.Linear)
        return seen @ self.subspaces.weight


class ISTA(Channel):
    """Eq. 17: ReLU(z + η Dᵀ(z − Dz) − ηλ), one step of size η towards a non-negative sparse code of z in the dictionary
    D, with sparsity weight λ. Both are 0.1 in the authors' code."""

    kind: Literal["ista"] = "ista"
    step: Annotated[float, Field(gt=0)] = 0.1
    """Step size η."""
    sparsity: Annotated[float, Field(ge=0)] = 0.1
    """Sparsity weight λ."""

    def build(self, common: Common) -> SubLayer:
        return ISTAModule(self, common)

    def cost(self, common: Common) -> Cost:
        return Cost(parameters=common.width**2, flops=4 * common.width**2)


class ISTAModule(SubLayer):
    def __init__(self, config: ISTA, common: Common) -> None:
        super().__init__()
        self.step, self.sparsity = config.step, config.sparsity
        # not named `weight`: inits would draw it as a linear map
        self.dictionary = nn.Parameter(torch.empty(common.width, common.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        d = self.dictionary.to(x.dtype)
        gradient = (x - x @ d.T) @ d  # tokens are rows: Dᵀ(z − Dz)
        return (x + self.step * (gradient - self.sparsity)).relu()
