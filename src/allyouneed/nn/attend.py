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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import Facts
from allyouneed.nn.patterns import Causal, Full, Pattern, Place, SameSegment

Plan = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # (q, k, v, dropout) -> (batch, heads, queries, head_width)


def plan(pattern: Pattern, queries: Facts, keys: Facts) -> Plan:
    """The cheapest way to attend by this pattern between these places that is equal to the dense mask."""
    if queries.packed != keys.packed:
        raise ValueError(
            "one side holds several sentences a row (segments), the other does not: they cannot be matched"
        )
    packed = queries.packed
    if packed and queries.device.type == "cpu":
        return grouped(pattern, queries, keys)
    if packed and queries.device.type == "cuda" and queries.time % 128 == 0 and keys.time % 128 == 0:
        return flex(pattern, queries, keys)
    # padding of the own sentence is never seen from within it; that of a source is
    aligned = queries.start is not None and keys.start == 0 and (keys.segments is None or keys is queries)
    if isinstance(pattern, Causal) and aligned:
        if queries.start == 0 and queries.time == keys.time:
            return causal
        if queries.time == 1 and queries.start == keys.time - 1:
            return whole  # the newest token sees all there is
    if isinstance(pattern, Full) and keys.segments is None:
        return whole
    return Dense(dense_mask(pattern, queries, keys))


def whole(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout)


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, is_causal=True)


@dataclass(frozen=True)
class Dense:
    mask: Tensor  # (batch or 1, 1, queries or 1, keys)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return sdpa(q, k, v, attn_mask=self.mask, dropout_p=dropout)


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


def grouped(pattern: Pattern, queries: Facts, keys: Facts) -> Plan:
    """Sentences of packed rows, regrouped by length into padded batches, each with a plan of its own."""
    query_spans, key_spans = _spans(queries), _spans(keys)
    both = sorted(set(query_spans) & set(key_spans), key=lambda s: (query_spans[s][1] + key_spans[s][1], s))
    groups: list[tuple[Regrouping, Regrouping, Plan]] = []
    for sentences in _alike(both, lambda s: query_spans[s][1] + key_spans[s][1]):
        query, query_facts = _regrouping([query_spans[s] for s in sentences])
        if queries is keys:
            key, key_facts = query, query_facts
        else:
            key, key_facts = _regrouping([key_spans[s] for s in sentences])
        groups.append((query, key, plan(pattern, query_facts, key_facts)))

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        batch, heads, time, head_width = q.shape
        out = q.new_zeros(batch * time, heads, head_width)
        with torch.autocast("cpu", enabled=False):  # bf16 attention of short sentences is slower on CPU than fp32
            for query, key, execute in groups:
                seen = execute(_wide(query.gather(q)), _wide(key.gather(k)), _wide(key.gather(v)), dropout)
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


def _regrouping(spans: list[Span]) -> tuple[Regrouping, Facts]:
    starts, lengths = (torch.tensor(column) for column in zip(*spans, strict=True))
    longest = int(lengths.max())
    steps = torch.arange(longest)[None]
    inside = steps < lengths[:, None]  # (sentences, longest)
    there = starts[:, None] + torch.where(inside, steps, 0)
    facts = Facts(steps, None if bool(inside.all()) else inside.long(), start=0)
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

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if dropout or q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):  # what the kernel cannot do
            fallback[:] = fallback or [Dense(dense_mask(pattern, queries, keys))]
            return fallback[0](q, k, v, dropout)
        out: Tensor = _compiled_flex()(q, k, v, block_mask=blocks)
        return out

    return attend
