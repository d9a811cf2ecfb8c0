"""Multi-head latent attention: keys and values of all heads are projected from one cached low-rank latent."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Size, SoftmaxAttention, cache_cost
from allyouneed.nn.mixers.attention.scores import ScaledDot, Scores
from allyouneed.nn.norms import Norm, RMSNorm
from allyouneed.nn.patterns.core import Full, Pattern
from allyouneed.nn.positions.relative import Heads, NoRelative, Relative
from allyouneed.nn.positions.rotary import Rotary
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVState
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer


class LatentAttention(AttendsByPattern, Mixer):
    """MLA (DeepSeek-AI 2024, "DeepSeek-V2", 2.1.2-2.1.3). The latent c = W^DKV h of a token h (eq. 9) gives each head a
    key W^UK c (eq. 10) and a value W^UV c (eq. 11); a rotary key W^KR h, shared by all heads, is concatenated (eq.
    15-16). Queries come from their own latent (eq. 12-14) or, without `query_rank`, from h.

    `norm` normalises the latents (section 3.1.2 of the paper). `bias` applies to the projections into latents and to
    the output. Rotary positions apply to the `rope_width` features; the `nope_width` features carry no position.
    """

    kind: Literal["mla"] = "mla"
    heads: Size
    """Number of attention heads."""
    kv_rank: Size
    """Width of the cached latent of keys and values."""
    query_rank: Size | None = None
    """Width of the queries' latent; default: queries come from the hidden state."""
    nope_width: Size
    """Features of queries and keys per head without rotary positions."""
    rope_width: Size
    """Features with rotary positions."""
    value_width: Size
    """Features of values per head."""
    pattern: Pattern = Full()
    """Which keys each query may attend to, as text: `causal & window(256)`."""
    positions: Relative = Rotary(order="interleaved")
    """Rotary positions of the `rope_width` features."""
    scores: Scores = ScaledDot()
    """Score function of queries and keys."""
    norm: Norm | None = RMSNorm()
    """Norm of the latents (section 3.1.2)."""
    bias: bool = False
    """Whether the projections into latents and the output have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def score_heads(self) -> Heads:
        return Heads(self.heads, self.heads, self.nope_width + self.rope_width, self.pattern.causal)

    @property
    def rope_heads(self) -> Heads:
        return Heads(self.heads, 1, self.rope_width, self.pattern.causal)

    def build(self, common: Common) -> SubLayer:
        return LatentAttentionModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        linear, width, keys = common.linear, common.width, self.pattern.mean_keys(length)
        scored, values = self.score_heads.inner, self.heads * self.value_width
        total = linear.cost(self.query_rank or width, scored, False)
        total += linear.cost(width, self.kv_rank + self.rope_width, self.bias)
        total += linear.cost(self.kv_rank, self.heads * self.nope_width, False)
        total += linear.cost(self.kv_rank, values, False) + linear.cost(values, width, self.bias)
        total += self.scores.cost(self.score_heads, common, keys) + Cost(flops=2 * values * keys)
        total += self.positions.cost(self.rope_heads, common, keys)
        if self.query_rank is not None:
            total += linear.cost(width, self.query_rank, self.bias)
        if self.norm is not None:
            total += self.norm.cost(self.kv_rank)
            total += Cost() if self.query_rank is None else self.norm.cost(self.query_rank)
        return total + cache_cost(self.pattern, self.kv_rank + self.rope_width, length)

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        return self.positions.shared(self.rope_heads, common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = [(f"positions.{key}", text) for key, text in self.positions.problems(self.rope_heads, common)]
        found += [(f"scores.{key}", text) for key, text in self.scores.problems(self.score_heads, common)]
        if not isinstance(self.positions, Rotary | NoRelative):
            found.append(("positions", "must be rotary or none"))
        elif isinstance(self.positions, Rotary) and self.positions.values:
            found.append(("positions.values", "values come from the latent, which carries no position; remove it"))
        if not self.scores.bilinear:
            text = "absorbed decoding needs a bilinear score (q·k)"
            found.append(("scores", text))
        if self.norm is not None and not self.norm.tokenwise:
            found.append(("norm", "needs a norm over one token's features; this norm uses other tokens"))
        return found


class LatentAttentionModule(SoftmaxAttention):
    """`attend_expanded` is the definition: it materialises every key and value. `attend_absorbed` computes the same
    (2.1.2: W^UK absorbed into W^UQ, W^UV into W^O): queries are projected into the latent space, heads attend to the
    latents, and the result is projected to values. It is cheaper for few queries and many keys."""

    def __init__(self, config: LatentAttention, common: Common) -> None:
        sizes = config.score_heads
        scores, relative = config.scores.build(sizes, common), config.positions.build(config.rope_heads, common)
        super().__init__(config.pattern, scores, relative, False, config.dropout)
        self.config, build, norm = config, common.linear.build, config.norm
        self.widths = (config.nope_width, config.rope_width)
        rank, values = config.query_rank, config.heads * config.value_width
        self.q_latent = None if rank is None else build(common.width, rank, config.bias)  # W^DQ
        self.q_norm = None if rank is None or norm is None else norm.build(rank)
        self.q = build(rank or common.width, sizes.inner, False)  # per head: W^UQ, then W^QR
        self.latent = build(common.width, config.kv_rank + config.rope_width, config.bias)  # W^DKV, then W^KR
        self.latent_norm = None if norm is None else norm.build(config.kv_rank)
        self.k = build(config.kv_rank, config.heads * config.nope_width, False)  # W^UK
        self.v = build(config.kv_rank, values, False)  # W^UV
        self.out = build(values, common.width, config.bias)

    def prepare(self, context: Context, rows: int) -> None:
        self.prepare_attention(context, context.queries, rows)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, both = self.project(x, context)
        keys = context.queries
        if state is not None:
            assert isinstance(state, KVState)
            both, _, keys = state.append(both, both[..., :0], context)  # the cached latents hold the values too
        attend = (
            self.attend_absorbed
            if state is not None and self.should_absorb(q.shape[2], both.shape[2])
            else self.attend_expanded
        )
        return self.out(attend(q, both, context, keys).transpose(1, 2).flatten(2))

    def project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Queries (batch, heads, time, nope + rope); latent and rotary key concatenated (batch, 1, time, kv_rank +
        rope)."""
        h = x if self.q_latent is None else self.q_latent(x)
        h = h if self.q_norm is None else self.q_norm(h, context)
        q = self.scores.prepare(self.q(h).unflatten(-1, (self.config.heads, -1)).transpose(1, 2))
        latent, key = self.latent(x).split([self.config.kv_rank, self.config.rope_width], -1)
        latent = latent if self.latent_norm is None else self.latent_norm(latent, context)
        q_nope, q_rope = q.split(self.widths, -1)
        latent, key = latent[:, None], key[:, None]  # one head shared by all
        q_rope, key, _ = self.relative.apply_positions(q_rope, key, latent, context)
        return torch.cat((q_nope, q_rope), -1), torch.cat((latent, key), -1)

    def attend_expanded(self, q: Tensor, both: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        latent, key = both.split([self.config.kv_rank, self.config.rope_width], -1)
        heads = self.config.heads
        k = self.k(latent[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, heads, keys, nope)
        v = self.v(latent[:, 0]).unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, heads, keys, value)
        return self.attend(q, torch.cat((k, key.expand(-1, heads, -1, -1)), -1), v, context, keys)

    def attend_absorbed(self, q: Tensor, both: Tensor, context: Context, keys: TokenLayout) -> Tensor:
        heads, rank = self.config.heads, self.config.kv_rank
        assert isinstance(self.k, nn.Linear) and isinstance(self.v, nn.Linear)
        to_key = self.k.weight.unflatten(0, (heads, -1))  # (heads, nope, kv_rank)
        to_value = self.v.weight.unflatten(0, (heads, -1))  # (heads, value, kv_rank)
        q_nope, q_rope = q.split(self.widths, -1)
        q = torch.cat((q_nope @ to_key, q_rope), -1)  # (batch, heads, queries, kv_rank + rope)
        seen = self.attend(q, both, both[..., :rank], context, keys)  # (batch, heads, queries, kv_rank)
        return seen @ to_value.transpose(-1, -2)

    def should_absorb(self, queries: int, keys: int) -> bool:
        """Whether the absorbed form needs fewer multiplications; only plain linear maps can be absorbed."""
        c = self.config
        if type(self.k) is not nn.Linear or type(self.v) is not nn.Linear:
            return False
        maps = c.kv_rank * (c.nope_width + c.value_width)
        plain = keys * maps + queries * keys * (c.nope_width + c.rope_width + c.value_width)
        return queries * maps + queries * keys * (2 * c.kv_rank + c.rope_width) < plain
