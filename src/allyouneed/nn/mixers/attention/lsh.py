"""Attention among tokens that hash alike (Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", 2).

A key is the query of the same token at length 1 (2, "shared-QK"). A token's bucket is argmax([xR; −xR]) for a random R
(2, "Locality sensitive hashing"), and it attends to those that share its bucket in at least one of several rounds, each
of them once (eq. 4–5 and appendix A); not to itself, unless there is nobody else.

`mask` is that definition, over all pairs. Long rows are sorted by bucket and cut into chunks instead (ops/lsh.py); a
chunk looks at as many chunks beside it as the largest bucket needs, so the numbers are the same. The paper looks back
one chunk and lets the rest of a larger bucket go (eq. 6), and which part that is depends on tokens to come: `chunk`
does this in training only, where nothing is decoded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.lsh import Hashed, by_chunks, needed
from allyouneed.nn.patterns.core import Causal, Full
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
EXACT_CHUNK = 64  # of sorted tokens, where no chunk is asked for
WORTH_SORTING = 1024  # tokens; of fewer, all pairs are quicker than finding out which are needed


class LSH(Mixer):
    """`buckets`: an even number; 1 is the paper's shared-QK attention without hashing. `rounds`: more find more of the
    tokens that are near. `chunk`: train as the paper does, on what lies in a chunk of this many sorted tokens and the
    one before it. `whole`: the first so many tokens of a text look at all before them (transformers hashes only texts
    that are longer than a chunk). `seed` draws R, the same for every pass and every layer.
    """

    kind: Literal["lsh"] = "lsh"
    heads: Size
    head_width: Size | None = None  # width / heads when not given
    buckets: Size
    rounds: Size = 2
    chunk: Size | None = None
    whole: Annotated[int, Field(ge=0)] = 0
    sees: Literal["past", "around"] = "past"
    seed: int = 0
    bias: bool = False  # of the projections; the authors have none
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "tokens that hash alike see each other: say sees: past"

    def each(self, common: Common) -> int:
        return self.head_width or max(1, common.width // self.heads)

    def build(self, common: Common) -> SubLayer:
        return LSHAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """As if buckets filled evenly: a key is met with probability 1 − (1 − 1/buckets)^rounds."""
        inner, linear = self.heads * self.each(common), common.linear
        total = linear.cost(common.width, 2 * inner, self.bias) + linear.cost(inner, common.width, self.bias)
        met = 1 - (1 - 1 / self.buckets) ** self.rounds
        seen = met * (Causal() if self.causal else Full()).mean_keys(length)
        hashing = 2 * inner * self.rounds * (self.buckets // 2)
        kept = 2 * inner + self.heads * self.rounds
        return total + Cost(flops=hashing + 4 * inner * seen, state_per_token=kept)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if self.buckets > 1 and self.buckets % 2:
            found.append(("buckets", "half of them lie opposite the other half: an even number, or 1"))
        if self.whole and not self.causal:
            found.append(("whole", "goes with sees: past; among tokens that see later ones there are no first"))
        return found


@lru_cache(maxsize=16)
def rotations(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(heads, head_width, rounds, buckets / 2); no buffer, so that no precision but that of the draw rounds it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class LSHAttention(SubLayer):
    def __init__(self, config: LSH, common: Common) -> None:
        super().__init__()
        self.config, self.heads, self.head_width = config, config.heads, config.each(common)
        inner = self.heads * self.head_width
        self.qk = common.linear.build(common.width, inner, config.bias)
        self.v = common.linear.build(common.width, inner, config.bias)
        self.out = common.linear.build(inner, common.width, config.bias)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.qk(x), self.v(x)))
        # (batch, heads, time, head_width); a key has length 1, which is the usual 1/√head_width after an RMS norm
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * self.head_width**-0.5
        buckets = context.decide(lambda: self.hashed(k.detach()))
        keys, seen_buckets = context.queries, buckets
        if isinstance(state, Hashed):
            k, v, seen_buckets, keys = state.take(k, v, buckets, context)
        dropout = self.config.dropout if self.training else 0.0
        limited = self.training and self.config.chunk is not None
        chunk = self.config.chunk or EXACT_CHUNK
        asked = context.record is not None and self in context.record
        beside = None
        sortable = state is None and not asked and (not self.config.whole or context.queries.start == 0)
        if sortable and (limited or x.shape[1] >= WORTH_SORTING):
            ids = self.apart(buckets, context.queries)
            beside = 1 if limited else self.beside(ids, chunk, context)
        if beside is not None:
            look = by_chunks(q, k, v, ids, chunk, beside, self.config.causal, limited, dropout)
            look = self.begun(q, k, v, look, dropout) if self.config.whole else look
        else:
            mask = self.mask(buckets, seen_buckets, context.queries, keys)
            self.show(q, k, mask, context)
            look = sdpa(q, k, v, mask, dropout, scale=1.0)
        mixed: Tensor = self.out(look.transpose(1, 2).flatten(2))
        return mixed

    def begun(self, q: Tensor, k: Tensor, v: Tensor, look: Tensor, dropout: float) -> Tensor:
        """What the first tokens of texts that begin in the first column see, before what the others do."""
        count = min(self.config.whole, q.shape[2])
        mask = torch.ones(count, count, dtype=torch.bool, device=q.device).tril(-1)
        mask[0, 0] = True
        first = sdpa(q[:, :, :count], k[:, :, :count], v[:, :, :count], mask, dropout, scale=1.0)
        return torch.cat((first, look[:, :, count:]), 2)

    def beside(self, ids: Tensor, chunk: int, context: Context) -> int | None:
        """Chunks to look at beside the own one; None where some bucket is so large that all pairs are no more work."""
        found = context.decide(lambda: needed(ids, chunk, context.queries.real))
        seen = (1 + found * (1 if self.config.causal else 2)) * chunk
        return found if seen * self.config.rounds < ids.shape[2] else None

    @torch.no_grad()
    def hashed(self, x: Tensor) -> Tensor:
        """The bucket of every token in every round: (batch, heads, time, rounds), int32."""
        half = self.config.buckets // 2
        if not half:
            return x.new_zeros(*x.shape[:3], self.config.rounds, dtype=torch.int32)
        r = rotations(self.config.seed, (self.heads, self.head_width, self.config.rounds, half), x.device)
        wide = x if x.dtype == torch.float64 else x.float()
        turned = torch.einsum("bhtd,hdrn->bhtrn", wide, r.to(wide.dtype))
        return torch.cat((turned, -turned), -1).argmax(-1).int()

    def apart(self, buckets: Tensor, layout: TokenLayout) -> Tensor:
        """The same for row-wise sorting: sentences of a row, and its padding, have buckets of their own."""
        if layout.segments is None:
            return buckets
        return buckets + layout.segments[:, None, :, None].int() * self.config.buckets

    def mask(self, buckets: Tensor, others: Tensor, queries: TokenLayout, keys: TokenLayout) -> Tensor:
        """The definition: (batch, heads, queries, keys) bool."""
        seen = dense_mask(Causal() if self.config.causal else Full(), queries, keys)  # (batch or 1, 1, queries, keys)
        itself = (queries.positions[:, :, None] == keys.positions[:, None])[:, None] & seen
        alike = (queries.positions < self.config.whole)[:, None, :, None]
        for own, its in zip(buckets.unbind(-1), others.unbind(-1), strict=True):
            alike = alike | (own[..., :, None] == its[..., None, :])
        met = alike & seen & ~itself
        return met | (itself & ~met.any(-1, keepdim=True))

    def show(self, q: Tensor, k: Tensor, mask: Tensor, context: Context) -> None:
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, torch.finfo(q.dtype).min)
            weights = scores.softmax(-1) * mask
            wanted.found.append(weights if wanted.heads is None else weights[:, list(wanted.heads)])

    def new_state(self) -> State:
        if not self.config.causal:
            raise ValueError("lsh attention that sees later tokens cannot decode; say sees: past")
        return Hashed()
