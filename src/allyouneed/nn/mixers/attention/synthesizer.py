"""Synthesizer: attention weights without query-key products (Tay et al. 2020, "Synthesizer: Rethinking Self-Attention
in Transformer Models").

Scores over positions are computed from the token alone (dense) or are the same for all sentences (random).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, SoftmaxAttention, cache_cost
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.positions.relative import Heads, RelativeModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVState
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Synthesizer(AttendsByPattern, Mixer):
    """Y = softmax(B) G(X), G a linear map to values (eq. 2-6); B_ij, for query i and position j < `length`, is

        dense              (W_2 σ(W_1 x_i))_j with σ = ReLU
        random             R_ij, learned, or constant if `fixed`
        factorised-dense   (A x_i)_{j div b} · (B x_i)_{j mod b}, A and B maps as in `dense`; b is `columns`
        factorised-random  (R_1 R_2ᵀ)_ij, R_1 and R_2 of shape (length, rank)

    per head. W_1 gives head_width features per head and is shared by A and B, as counted in table 1. `dot` mixes in
    dot-product scores: α B + (1 − α) Q Kᵀ/√head_width, α learned (table 2: "R+V", "D+V").
    """

    kind: Literal["synthesizer"] = "synthesizer"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    length: Size
    """Longest sentence."""
    synthesis: Literal["dense", "random", "factorised-dense", "factorised-random"] = "dense"
    """How the scores B are computed."""
    fixed: bool = False
    """`random` scores are constant instead of learned."""
    dot: bool = False
    """Mix in dot-product scores with a learned weight."""
    rank: Size = 8
    """Rank of `factorised-random`."""
    columns: Size | None = None
    """b of `factorised-dense`; default: about √length."""
    pattern: Pattern = Full()
    """Which keys each query may attend to, as text: `causal & window(256)`."""
    bias: bool = True
    """Whether the linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def dense(self) -> bool:
        return self.synthesis in ("dense", "factorised-dense")

    @property
    def factors(self) -> tuple[int, int]:
        """a and b of factorised-dense: a·b ≥ `length`."""
        b = self.columns or max(1, round(self.length**0.5))
        return -(-self.length // b), b

    @property
    def attention(self) -> Attention:
        """The attention it repositions."""
        return Attention(heads=self.heads, head_width=self.head_width, pattern=self.pattern, bias=self.bias)

    def sizes(self, common: Common) -> Heads:
        return self.attention.sizes(common)

    @property
    def longest(self) -> int:
        return self.length

    def build(self, common: Common) -> SubLayer:
        return SynthesizerModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        sizes, linear, seen = self.sizes(common), common.linear, self.pattern.mean_keys(length)
        inner = sizes.inner
        total = linear.cost(common.width, inner, self.bias) + linear.cost(inner, common.width, self.bias)
        total += Cost(flops=2 * inner * seen) + cache_cost(self.pattern, inner * (2 if self.dot else 1), length)
        if self.dot:
            total += linear.cost(common.width, inner, self.bias) * 2 + Cost(parameters=2, flops=2 * inner * seen)
        if self.dense:
            outputs = self.length if self.synthesis == "dense" else sum(self.factors)
            flops = 2 * inner * (seen if self.synthesis == "dense" else outputs)
            biases = self.heads * outputs if self.bias else 0
            return total + linear.cost(common.width, inner, self.bias) + Cost(inner * outputs + biases, flops)
        if self.synthesis == "random":
            return total + Cost(0 if self.fixed else self.heads * self.length**2)
        size = 2 * self.heads * self.length * self.rank
        return total + Cost(0 if self.fixed else size, 2 * self.heads * self.rank * seen)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = self.attention.problems(common)
        if self.fixed and self.dense:
            found.append(("fixed", f"only random scores can be fixed, not {self.synthesis}"))
        return found


class Synthesis(nn.Module):
    """Scores over positions, from hidden (batch, heads, queries, head_width) and positions (batch or 1, time)."""

    def scores_at(self, hidden: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """(batch or 1, heads, queries, keys)"""
        raise NotImplementedError


class DenseSynthesis(Synthesis):
    """One map to `length` scores, or two maps to factors of them."""

    def __init__(self, heads: Heads, outputs: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        shapes = [(heads.heads, heads.head_width, size) for size in outputs]
        self.maps = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])
        self.shifts = nn.ParameterList([nn.Parameter(torch.empty(shape[0], 1, shape[2])) for shape in shapes if bias])
        self.outputs = outputs
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.maps:
            for head in table:
                nn.init.xavier_uniform_(head)
        for shift in self.shifts:
            nn.init.zeros_(shift)

    def scores_at(self, hidden: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        if len(self.outputs) == 1:
            return self.scores(hidden, 0, keys)
        columns = self.outputs[1]
        return self.scores(hidden, 0, keys // columns) * self.scores(hidden, 1, keys % columns)

    def scores(self, hidden: Tensor, number: int, positions: Tensor) -> Tensor:
        table = self.maps[number].to(hidden.dtype)
        shift = self.shifts[number].to(hidden.dtype) if len(self.shifts) else None
        # compute only the needed columns when all rows agree
        subset = len(positions) == 1 and positions.shape[1] < table.shape[2]
        if subset:
            table, shift = table[:, :, positions[0]], None if shift is None else shift[:, :, positions[0]]
        found = hidden @ table if shift is None else hidden @ table + shift
        return found if subset else found.gather(-1, positions[:, None, None].expand(len(found), *found.shape[1:3], -1))


class RandomSynthesis(Synthesis):
    left: Tensor  # (heads, length, rank)
    right: Tensor
    table: Tensor  # (heads, length, length)

    def __init__(self, shape: tuple[int, ...], fixed: bool, factorised: bool) -> None:
        super().__init__()
        names = ("left", "right") if factorised else ("table",)
        self.factorised = factorised
        for name in names:
            empty = torch.empty(shape)
            if fixed:
                self.register_buffer(name, empty)
            else:
                self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial scores have variance 1."""
        for table in [*self.parameters(), *self.buffers()]:
            nn.init.normal_(table, std=table.shape[-1] ** -0.25 if self.factorised else 1.0)

    def scores_at(self, hidden: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        if self.factorised:
            left, right = self.left[:, queries], self.right[:, keys]  # (heads, batch or 1, time, rank)
            return (left @ right.transpose(-1, -2)).transpose(0, 1)
        return self.table[:, queries[:, :, None], keys[:, None, :]].transpose(0, 1)


class SynthesizerModule(SoftmaxAttention):
    def __init__(self, config: Synthesizer, common: Common) -> None:
        sizes, build, bias = config.sizes(common), common.linear.build, config.bias
        super().__init__(config.pattern, SynthesizedScores(config, sizes), RelativeModule(), True, config.dropout)
        self.heads = self.kv_heads = sizes.heads
        self.head_width, self.length = sizes.head_width, config.length
        self.hidden = build(common.width, sizes.inner, bias) if config.dense else None
        self.q = build(common.width, sizes.inner, bias) if config.dot else None
        self.k = build(common.width, sizes.inner, bias) if config.dot else None
        self.v = build(common.width, sizes.inner, bias)
        self.out = build(sizes.inner, common.width, bias)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, time, head_width)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        keys = context.queries
        if not context.static:
            self.check(keys)
        v = self.split(self.v(x))
        parts = [] if self.hidden is None else [self.split(self.hidden(x)).relu()]
        parts += [] if self.q is None else [self.split(self.q(x))]
        q = torch.cat(parts, -1) if parts else v[..., :0]
        k = v[..., :0] if self.k is None else self.split(self.k(x))
        if state is not None:
            assert isinstance(state, KVState)
            k, v, keys = state.append(k, v, context)
        return self.out(self.attend(q, k, v, context, keys).transpose(1, 2).flatten(2))

    @property
    def position_limit(self) -> int:  # type: ignore[override]  # per instance, not per class
        return self.length

    def check(self, layout: TokenLayout) -> None:
        if (longest := layout.longer_than(self.length)) is not None:
            text = f"sentence of {longest} tokens exceeds the synthesizer's length {self.length}"
            raise UserError(f"{text}; shorten it or increase the mixer's `length`")


class SynthesizedScores(ScoresModule):
    """q concatenates the features for synthesized scores and for dot-product scores, where present."""

    def __init__(self, config: Synthesizer, heads: Heads) -> None:
        super().__init__()
        self.length, self.width = config.length, heads.head_width
        self.synthesis: Synthesis
        if config.dense:
            outputs = (config.length,) if config.synthesis == "dense" else config.factors
            self.synthesis = DenseSynthesis(heads, outputs, config.bias)
        else:
            factorised = config.synthesis == "factorised-random"
            shape = (heads.heads, config.length, config.rank if factorised else config.length)
            self.synthesis = RandomSynthesis(shape, config.fixed, factorised)
        self.mixture = nn.Parameter(torch.zeros(2)) if config.dot else None  # softmax of these: α and 1 − α

    def reset_parameters(self) -> None:
        if self.mixture is not None:
            nn.init.zeros_(self.mixture)

    def score(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        last = self.length - 1  # positions beyond it are padding
        found = self.synthesis.scores_at(q[..., : self.width], queries.clamp(max=last), keys.clamp(max=last))
        found = found.to(q.dtype).expand(len(q), -1, -1, -1)
        if self.mixture is None:
            return found
        alpha, rest = self.mixture.softmax(0).to(q.dtype)
        return alpha * found + rest * self.width**-0.5 * (q[..., -self.width :] @ k.transpose(-1, -2))
