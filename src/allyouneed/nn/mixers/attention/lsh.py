"""LSH attention: tokens attend within their hash bucket (Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient
Transformer", 2).

A key is the query of the same token, normalised to length 1 (2, "shared-QK"). The bucket of a token is argmax([xR;
−xR]) for a random R (2, "Locality sensitive hashing"). A token attends once to every token that shares its bucket in at
least one of several rounds (eq. 4–5 and appendix A), and to itself only when there is no other.

`mask` is that definition over all pairs. Long rows are sorted by bucket and cut into chunks (ops/lsh.py); a chunk
attends to as many neighbouring chunks as the largest bucket spans, so the result is equal. The paper attends to one
previous chunk and drops the rest of a larger bucket (eq. 6); which part is dropped depends on later tokens, so `chunk`
applies in training only.
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
from allyouneed.nn.observe import observe, show
from allyouneed.nn.ops.attention.by_distance import WIDEST, Sentences, attend_within
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.lsh import chunked_lsh_attention, chunks_needed
from allyouneed.nn.patterns.core import Causal, Full
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]
EXACT_CHUNK = 64  # sorted tokens per chunk when `chunk` is not set
WORTH_SORTING = 1024  # tokens; below this, the dense mask is faster than sorting


class LSH(Mixer):
    """`buckets`: even, or 1 for shared-QK attention without hashing. `rounds`: more rounds find more near neighbours.
    `chunk`: train as in the paper, within a chunk of this many sorted tokens and the previous one. `whole`: the
    first `whole` tokens of a text attend to all earlier tokens (transformers hashes only texts longer than a chunk).
    `seed` draws R, the same for every pass and layer."""

    kind: Literal["lsh"] = "lsh"
    heads: Size
    """Number of attention heads."""
    head_width: Size | None = None
    """Features of each head (d_k); default: width / heads, which must then be an integer."""
    buckets: Size
    """Hash buckets: even, or 1 for shared-QK attention without hashing."""
    rounds: Size = 2
    """Hash rounds; more find more near neighbours."""
    chunk: Size | None = None
    """Train as in the paper, within a chunk of this many sorted tokens and the previous one; default: exact."""
    whole: Annotated[int, Field(ge=0)] = 0
    """The first tokens of a text, this many, attend to all earlier ones."""
    sees: Literal["past", "around"] = "past"
    """`past`: causal; `around`: bidirectional."""
    seed: int = 0
    """Draws the hash directions, the same for every pass and layer."""
    bias: bool = False
    """Whether the projections have a bias; none in the paper."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the attention weights."""

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "tokens of a bucket attend to later ones; set sees: past"

    def head_size(self, common: Common) -> int:
        return self.head_width or max(1, common.width // self.heads)

    def build(self, common: Common) -> SubLayer:
        return LSHAttention(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """Assumes equally filled buckets: a key is attended to with probability 1 − (1 − 1/buckets)^rounds."""
        inner, linear = self.heads * self.head_size(common), common.linear
        total = linear.cost(common.width, 2 * inner, self.bias) + linear.cost(inner, common.width, self.bias)
        met = 1 - (1 - 1 / self.buckets) ** self.rounds
        seen = met * (Causal() if self.causal else Full()).mean_keys(length)
        hashing = 2 * inner * self.rounds * (self.buckets // 2)
        hashes = self.heads * self.rounds
        kept = Cost(state_per_token=2 * inner + hashes, wide_per_token=hashes)
        return total + Cost(flops=hashing + 4 * inner * seen) + kept

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        if self.buckets > 1 and self.buckets % 2:
            found.append(("buckets", "must be even, or 1"))
        if self.whole and not self.causal:
            found.append(("whole", "requires sees: past"))
        return found


@lru_cache(maxsize=16)
def rotations(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(heads, head_width, rounds, buckets / 2); not a buffer, so that casting the model does not round it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class LSHAttention(SubLayer):
    traceable = True

    def __init__(self, config: LSH, common: Common) -> None:
        super().__init__()
        self.config, self.heads, self.head_width = config, config.heads, config.head_size(common)
        inner = self.heads * self.head_width
        self.qk = common.linear.build(common.width, inner, config.bias)
        self.v = common.linear.build(common.width, inner, config.bias)
        self.out = common.linear.build(inner, common.width, config.bias)

    def prepare(self, context: Context, rows: int) -> None:
        self.directions(context)
        Sentences.of(context)

    def directions(self, context: Context) -> Tensor:
        """The hash directions on the device, one tensor for all layers."""
        key = (self.config.seed, self.heads, self.head_width, self.config.rounds, self.config.buckets)
        return context.memoize(LSHAttention, key, lambda: self.draw(context.queries.device))

    def draw(self, device: torch.device) -> Tensor:
        shape = (self.heads, self.head_width, self.config.rounds, self.config.buckets // 2)
        return rotations(self.config.seed, shape, device)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.qk(x), self.v(x)))
        # (batch, heads, time, head_width); a key has length 1, which is the usual 1/√head_width after an RMS norm
        k = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * self.head_width**-0.5
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        buckets = context.decide(lambda: self.hash_tokens(k.detach(), self.directions(context)))
        keys, seen_buckets = context.queries, buckets
        if isinstance(state, HashedKeyValues):
            k, v, seen_buckets, keys = state.append_hashed(k, v, buckets, context)
        show(self, "mask", lambda: self.mask(buckets, seen_buckets, context.queries, keys))
        show(self, "weights", lambda: self.weights(q, k, self.mask(buckets, seen_buckets, context.queries, keys)))
        dropout = self.config.dropout if self.training else 0.0
        limited = self.training and self.config.chunk is not None
        chunk = self.config.chunk or EXACT_CHUNK
        recorded = context.record is not None and self in context.record
        beside = None
        by_kernel = state is None and not (recorded or limited or self.config.whole or dropout)
        sentences = Sentences.of(context) if by_kernel and self.head_width <= WIDEST else None
        sortable = state is None and not recorded and (not self.config.whole or context.queries.start == 0)
        if sentences is not None:
            seen, _, sums = attend_within(q, k, v, sentences, self.config.causal, 1.0, codes=buckets)
            attended = torch.where(sums.isinf()[..., None], v.to(seen.dtype), seen)  # those that meet no other token
            return self.merge(attended)
        if sortable and (limited or x.shape[1] >= WORTH_SORTING):
            ids = self.separate_segments(buckets, context.queries)
            beside = 1 if limited else self.neighbour_chunks(ids, chunk, context)
        if beside is not None:
            attended = chunked_lsh_attention(q, k, v, ids, chunk, beside, self.config.causal, limited, dropout)
            attended = self.attend_prefix(q, k, v, attended, dropout) if self.config.whole else attended
        else:
            mask = self.mask(buckets, seen_buckets, context.queries, keys)
            self.record_weights(q, k, mask, context)
            attended = sdpa(q, k, v, mask, dropout, scale=1.0)
        return self.merge(attended)

    def merge(self, attended: Tensor) -> Tensor:
        return self.out(observe(self, "heads", attended).transpose(1, 2).flatten(2))

    def attend_prefix(self, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, dropout: float) -> Tensor:
        """Replace the first `whole` outputs by full causal attention, for texts that begin in the first column."""
        count = min(self.config.whole, q.shape[2])
        mask = torch.ones(count, count, dtype=torch.bool, device=q.device).tril(-1)
        mask[0, 0] = True
        first = sdpa(q[:, :, :count], k[:, :, :count], v[:, :, :count], mask, dropout, scale=1.0)
        return torch.cat((first, attended[:, :, count:]), 2)

    def neighbour_chunks(self, ids: Tensor, chunk: int, context: Context) -> int | None:
        """Neighbouring chunks to attend to; None when the largest bucket makes the dense mask cheaper."""
        found = context.decide(lambda: chunks_needed(ids, chunk, context.queries.real))
        seen = (1 + found * (1 if self.config.causal else 2)) * chunk
        return found if seen * self.config.rounds < ids.shape[2] else None

    @torch.no_grad()
    def hash_tokens(self, x: Tensor, directions: Tensor | None = None) -> Tensor:
        """Bucket of every token in every round: (batch, heads, time, rounds), int32."""
        if not self.config.buckets // 2:
            return x.new_zeros(*x.shape[:3], self.config.rounds, dtype=torch.int32)
        if directions is None:
            directions = self.draw(x.device)
        wide = x if x.dtype == torch.float64 else x.float()
        turned = torch.einsum("bhtd,hdrn->bhtrn", wide, directions.to(wide.dtype))
        return torch.cat((turned, -turned), -1).argmax(-1).int()

    def separate_segments(self, buckets: Tensor, layout: TokenLayout) -> Tensor:
        """Distinct bucket ids per sentence and for padding, so that rows can be sorted as a whole."""
        if layout.segments is None:
            return buckets
        return buckets + layout.segments[:, None, :, None].int() * self.config.buckets

    def mask(self, buckets: Tensor, key_buckets: Tensor, queries: TokenLayout, keys: TokenLayout) -> Tensor:
        """The definition: (batch, heads, queries, keys) bool."""
        seen = dense_mask(Causal() if self.config.causal else Full(), queries, keys)  # (batch or 1, 1, queries, keys)
        itself = (queries.positions[:, :, None] == keys.positions[:, None])[:, None] & seen
        same_bucket = (queries.positions < self.config.whole)[:, None, :, None]
        for own, its in zip(buckets.unbind(-1), key_buckets.unbind(-1), strict=True):
            same_bucket = same_bucket | (own[..., :, None] == its[..., None, :])
        met = same_bucket & seen & ~itself
        return met | (itself & ~met.any(-1, keepdim=True))

    def record_weights(self, q: Tensor, k: Tensor, mask: Tensor, context: Context) -> None:
        request = None if context.record is None else context.record.get(self)
        if request is not None:
            weights = self.weights(q, k, mask)
            request.weights.append(weights if request.heads is None else weights[:, list(request.heads)])

    def weights(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) * mask

    def new_state(self) -> State:
        if not self.config.causal:
            raise ValueError("lsh attention that sees later tokens cannot decode; set sees: past")
        return HashedKeyValues()


class HashedKeyValues(KVCache):
    """A growing KV cache that also stores buckets (batch, heads, capacity, rounds)."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: Tensor | None = None

    def append_hashed(
        self, k: Tensor, v: Tensor, buckets: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, TokenLayout]:
        keys, values, slots = self.append(k, v, context)
        self.buckets = self._store(self.buckets, buckets, context.queries)
        return keys, values, self.buckets[:, :, : self.end], slots

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.buckets = None if self.buckets is None else self.buckets.index_select(0, rows)

    @property
    def bytes(self) -> int:
        kept = 0 if self.buckets is None else self.buckets[:, :, : self.end].numel() * self.buckets.itemsize
        return super().bytes + kept
