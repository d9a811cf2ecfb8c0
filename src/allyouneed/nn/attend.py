"""How softmax attention is executed: the code picks the path, never the user.

    whole     nothing is hidden: SDPA without a mask
    causal    a plain causal sentence: SDPA's `is_causal` (padding on the right is never seen, so it needs no mask)
    grouped   rows packed with sentences, on CPU: sentences of similar length are regrouped into small batches, so
              the cost is the sum of their squares, not the square of the row
    flex      rows packed with sentences, on GPU: FlexAttention with the pattern's own block mask
    dense     everything else: SDPA with the pattern's boolean mask

`dense` is the truth; tests hold every other path to it, gradients included. A plan is made once per forward pass and
pattern, then called by all layers with q, k, v of shape (batch, heads, time, head_width).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import Facts
from allyouneed.nn.patterns import Causal, Full, Pattern, Place, SameSegment


@dataclass(frozen=True, eq=False)
class Manner:
    """How scores are made where it is not just q·k: softmax(cap(score + bias)) v + values.

    `score(q, k, query positions, key positions)` replaces q·k · scale; `bias(q, …, scale)` is added to it; `cap` c makes
    it c·tanh(score / c); `values(weights, …)` is added to the result. Positions are (batch or 1, time).
    `static`: a key under which a bias that does not depend on q is the same for all layers.
    """

    scale: float
    score: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    bias: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    cap: float | None = None
    values: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    static: Hashable = None

    @property
    def plain(self) -> bool:
        """softmax(q·k · scale) v: what every kernel computes."""
        return self.bias is None and self.fused

    @property
    def fused(self) -> bool:
        """SDPA computes it, with the bias as a mask."""
        return self.score is None and self.cap is None and self.values is None


# (q, k, v, dropout, manner) -> (batch, heads, queries, head_width); k and v may have fewer heads than q
Plan = Callable[[Tensor, Tensor, Tensor, float, Manner], Tensor]


def plan(pattern: Pattern, queries: Facts, keys: Facts, manner: Manner) -> Plan:
    """The cheapest way to attend by this pattern between these places that is equal to the dense mask.

    Of the manner it only matters whether it is plain, so layers that agree in that share a plan.
    """
    if queries.packed != keys.packed:
        raise ValueError(
            "one side holds several sentences a row (segments), the other does not: they cannot be matched"
        )
    packed = queries.packed
    if packed and queries.device.type == "cpu":
        return grouped(pattern, queries, keys, manner)
    if packed and manner.plain and flexible(queries, keys):
        return flex(pattern, queries, keys)
    # padding of the own sentence is never seen from within it; that of a source is
    aligned = queries.start is not None and keys.start == 0 and (keys.segments is None or keys is queries)
    if isinstance(pattern, Causal) and aligned and manner.plain:
        if queries.start == 0 and queries.time == keys.time:
            return causal
        if queries.time == 1 and queries.start == keys.time - 1:
            return whole  # the newest token sees all there is
    if isinstance(pattern, Full) and keys.segments is None and manner.plain:
        return whole
    return Dense(dense_mask(pattern, queries, keys), queries.positions, keys.positions)


def flexible(queries: Facts, keys: Facts) -> bool:
    return queries.device.type == "cuda" and queries.time % 128 == 0 and keys.time % 128 == 0


def whole(q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, scale=manner.scale, enable_gqa=q.shape[1] != k.shape[1])


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, is_causal=True, scale=manner.scale, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True, eq=False)
class Dense:
    """The pattern's mask, every score computed."""

    mask: Tensor  # (batch or 1, 1 or heads, queries or 1, keys)
    queries: Tensor  # positions (batch or 1, queries)
    keys: Tensor
    biases: dict[Hashable, Tensor] = field(default_factory=dict)  # of manners whose bias is the same for all layers

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
        if not manner.fused:
            seen = attention_weights(q, k, self.mask, self.queries, self.keys, manner)
            seen = torch.nn.functional.dropout(seen.to(v.dtype), dropout, dropout > 0)
            out = seen @ repeated(v, q.shape[1])
            return out if manner.values is None else out + manner.values(seen, self.queries, self.keys).to(out.dtype)
        mask = self.mask if manner.bias is None else self._biased(q, manner)
        out = sdpa(q, k, v, mask, dropout, scale=manner.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out if manner.bias is None else out * self.seeing

    @cached_property
    def seeing(self) -> Tensor:
        """Queries that see something: SDPA gives the others zeros for a boolean mask, but NaN for a bias of -inf."""
        return self.mask.any(-1, keepdim=True)

    def _biased(self, q: Tensor, manner: Manner) -> Tensor:
        """The bias where one may look, -inf where not."""
        if manner.static is not None and manner.static in self.biases:
            return self.biases[manner.static]
        assert manner.bias is not None
        bias = manner.bias(q, self.queries, self.keys, manner.scale).to(q.dtype)
        found = torch.where(self.mask | ~self.seeing, bias, float("-inf"))
        if manner.static is not None:
            self.biases[manner.static] = found
        return found


def attention_weights(q: Tensor, k: Tensor, mask: Tensor, queries: Tensor, keys: Tensor, manner: Manner) -> Tensor:
    """The definition, written out: softmax over the keys that may be seen, (batch, heads, queries, keys); zeros for a
    query that sees nothing."""
    k = repeated(k, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * manner.scale if manner.score is None else manner.score(q, k, queries, keys)
    if manner.bias is not None:
        scores = scores + manner.bias(q, queries, keys, manner.scale)
    if manner.cap is not None:
        scores = manner.cap * torch.tanh(scores / manner.cap)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) * mask


def repeated(x: Tensor, heads: int) -> Tensor:
    """Each of fewer key-value heads as often as queries share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def dense_mask(pattern: Pattern, queries: Facts, keys: Facts) -> Tensor:
    """The truth: (batch or 1, 1, queries or 1, keys) bool. SDPA answers a query that sees nothing with zeros."""
    query, key = queries.place(1), keys.place(2)
    if queries.packed and keys.packed:
        mask = (pattern & SameSegment()).allowed(query, key)
    elif isinstance(pattern, Full):
        mask = key.segment > 0
    else:
        mask = pattern.allowed(query, key) & (key.segment > 0)
    return mask[:, None]


# --- packed rows on CPU ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Regrouping:
    """Moves the tokens of some sentences from packed rows into a padded batch, and back.

    `there` (sentences, longest): index of each token in the flattened rows (padding repeats the first token).
    `back` (tokens of these sentences): their index in the flattened padded batch; `home`: in the flattened rows.
    """

    there: Tensor
    back: Tensor
    home: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """(batch, heads, time, head_width) -> (sentences, heads, longest, head_width)"""
        moved: Tensor = _Gather.apply(x.transpose(1, 2), self)
        return moved.transpose(1, 2)

    def scatter(self, out: Tensor, x: Tensor) -> Tensor:
        """Write (sentences, heads, longest, head_width) into `out` (tokens, heads, head_width) at home."""
        return out.index_copy(0, self.home, x.transpose(1, 2).flatten(0, 1).index_select(0, self.back))


class _Gather(torch.autograd.Function):
    """index_select whose backward is a copy, not an addition: no token goes to two places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, regrouping: Regrouping) -> Tensor:
        ctx.regrouping, ctx.shape = regrouping, x.shape
        flat = x.reshape(-1, *x.shape[2:])  # (batch * time, heads, head_width)
        return flat.index_select(0, regrouping.there.flatten()).unflatten(0, regrouping.there.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        shape: torch.Size = ctx.shape
        home = gradient.new_zeros(shape[0] * shape[1], *shape[2:])
        kept = gradient.flatten(0, 1).index_select(0, ctx.regrouping.back)
        home.index_copy_(0, ctx.regrouping.home, kept)
        return home.view(shape), None


def grouped(pattern: Pattern, queries: Facts, keys: Facts, manner: Manner) -> Plan:
    """Sentences of packed rows, regrouped by length into padded batches, each with a plan of its own."""
    query_spans, key_spans = _spans(queries), _spans(keys)
    both = sorted(set(query_spans) & set(key_spans), key=lambda s: (query_spans[s][1] + key_spans[s][1], s))
    groups: list[tuple[Regrouping, Regrouping, Plan]] = []
    for sentences in _alike(both, lambda s: query_spans[s][1] + key_spans[s][1]):
        query, query_facts = _regrouping([query_spans[s] for s in sentences], queries)
        if queries is keys:
            key, key_facts = query, query_facts
        else:
            key, key_facts = _regrouping([key_spans[s] for s in sentences], keys)
        groups.append((query, key, plan(pattern, query_facts, key_facts, manner)))

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
        batch, heads, time, head_width = q.shape
        out = q.new_zeros(batch * time, heads, head_width)
        with torch.autocast("cpu", enabled=False):  # bf16 attention of short sentences is slower on CPU than fp32
            for query, key, execute in groups:
                moved = _wide(query.gather(q)), _wide(key.gather(k)), _wide(key.gather(v))
                seen = execute(*moved, dropout, manner)
                out = query.scatter(out, seen.to(out.dtype))
        return out.view(batch, time, heads, head_width).transpose(1, 2)

    return attend


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


Span = tuple[int, int]  # (index of the first token in the flattened rows, number of tokens)


def _spans(facts: Facts) -> dict[tuple[int, int], Span]:
    """Every sentence of the rows: (row, segment) -> where it lies."""
    assert facts.segments is not None
    rows, time = facts.segments.shape
    flat = facts.segments.flatten()
    edges = torch.ones(rows * time, dtype=torch.bool)
    edges[1:] = flat[1:] != flat[:-1]
    edges[::time] = True
    starts = edges.nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([rows * time])])
    found = zip(starts.tolist(), (ends - starts).tolist(), flat[starts].tolist(), strict=True)
    return {(start // time, segment): (start, length) for start, length, segment in found if segment}


def _alike(ordered: list[Any], size: Callable[[Any], int], least: int = 16) -> list[list[Any]]:
    """Cut a list sorted by size where sizes have grown by half, in runs that are worth a call."""
    runs: list[list[Any]] = []
    for item in ordered:
        if runs and (len(runs[-1]) < least or size(item) <= 1.5 * size(runs[-1][0])):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _regrouping(spans: list[Span], home: Facts) -> tuple[Regrouping, Facts]:
    starts, lengths = (torch.tensor(column) for column in zip(*spans, strict=True))
    longest = int(lengths.max())
    steps = torch.arange(longest)[None]
    inside = steps < lengths[:, None]  # (sentences, longest)
    there = starts[:, None] + torch.where(inside, steps, 0)

    def moved(said: Tensor | None) -> Tensor | None:
        return None if said is None else said.flatten()[there]

    facts = Facts(
        steps,
        None if bool(inside.all()) else inside.long(),
        start=0,
        prompt=moved(home.prompt),
        chosen=moved(home.chosen),
        order=moved(home.order),
    )
    return Regrouping(there, inside.flatten().nonzero().flatten(), there[inside]), facts


# --- packed rows on GPU ---------------------------------------------------------------------------------------------


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def mask_mod(pattern: Pattern, queries: Facts, keys: Facts) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The pattern as FlexAttention asks for it: one place at a time. Padding sees padding, so no row is empty."""
    assert queries.segments is not None and keys.segments is not None
    query_segments, key_segments = queries.segments, keys.segments
    query_positions = queries.positions.expand_as(query_segments)
    key_positions = keys.positions.expand_as(key_segments)
    rule = pattern & SameSegment()

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule.allowed(
            Place(query_positions[batch, query], query_segments[batch, query]),
            Place(key_positions[batch, key], key_segments[batch, key]),
        )

    return allowed


def flex(pattern: Pattern, queries: Facts, keys: Facts) -> Plan:
    from torch.nn.attention.flex_attention import create_block_mask

    rule = mask_mod(pattern, queries, keys)
    batch = queries.positions.shape[0]
    blocks = create_block_mask(rule, batch, None, queries.time, keys.time, device=str(queries.device))
    fallback: list[Plan] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, manner: Manner) -> Tensor:
        if dropout or q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):  # what the kernel cannot do
            fallback[:] = fallback or [Dense(dense_mask(pattern, queries, keys), queries.positions, keys.positions)]
            return fallback[0](q, k, v, dropout, manner)
        gqa = q.shape[1] != k.shape[1]
        out: Tensor = _compiled_flex()(q, k, v, block_mask=blocks, scale=manner.scale, enable_gqa=gqa)
        return out

    return attend
