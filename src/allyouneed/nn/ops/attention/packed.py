"""Attention over packed rows on CPU: each sentence attends to itself only.

Sentences of similar length are regrouped into padded batches, so the cost is the sum of squared sentence lengths
instead of the squared row length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.dense import AttentionFn, ScoreMod


@dataclass(frozen=True, eq=False)
class PaddedGroup:
    """Moves the tokens of some sentences from packed rows into a padded batch, and back.

    `source` (sentences, longest): index of each token in the flattened rows (padding repeats the first token). `padded`
    (tokens): index of each token in the flattened padded batch; `target` (tokens): in the flattened rows.
    """

    source: Tensor
    padded: Tensor
    target: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """(batch, heads, time, head_width) -> (sentences, heads, longest, head_width)"""
        moved: Tensor = _Gather.apply(x.transpose(1, 2), self)
        return moved.transpose(1, 2)

    def scatter(self, out: Tensor, x: Tensor) -> Tensor:
        """Write (sentences, heads, longest, head_width) into `out` (tokens, heads, head_width)."""
        return out.index_copy(0, self.target, x.transpose(1, 2).flatten(0, 1).index_select(0, self.padded))


class _Gather(torch.autograd.Function):
    """index_select whose backward is a copy instead of an addition: indices are unique."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: PaddedGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        flat = x.flatten(0, 1)  # (batch * time, heads, head_width, which may be 0)
        return flat.index_select(0, group.source.flatten()).unflatten(0, group.source.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        shape: torch.Size = ctx.shape
        out = gradient.new_zeros(shape[0] * shape[1], *shape[2:])
        kept = gradient.flatten(0, 1).index_select(0, ctx.group.padded)
        out.index_copy_(0, ctx.group.target, kept)
        return out.view(shape), None


def attend_packed(
    make: Callable[[TokenLayout, TokenLayout], AttentionFn], queries: TokenLayout, keys: TokenLayout
) -> AttentionFn:
    """Attention over the sentences of packed rows, regrouped by length into padded batches."""
    query_spans, key_spans = _spans(queries), _spans(keys)
    both = sorted(set(query_spans) & set(key_spans), key=lambda s: (query_spans[s][1] + key_spans[s][1], s))
    groups: list[tuple[PaddedGroup, PaddedGroup, AttentionFn]] = []
    for sentences in _group_by_length(both, lambda s: query_spans[s][1] + key_spans[s][1]):
        query, query_layout = _padded_group([query_spans[s] for s in sentences], queries)
        if queries is keys:
            key, key_layout = query, query_layout
        else:
            key, key_layout = _padded_group([key_spans[s] for s in sentences], keys)
        groups.append((query, key, make(query_layout, key_layout)))

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        batch, heads, time, _ = q.shape
        out = q.new_zeros(batch * time, heads, v.shape[-1])
        if not groups:  # nothing to attend to: a gradient of zeros, as padded rows have
            out = out + sum(x[..., :0].sum() for x in (q, k, v))
        with torch.autocast("cpu", enabled=False):  # on CPU, bf16 attention of short sentences is slower than fp32
            for query, key, execute in groups:
                moved = _wide(query.gather(q)), _wide(key.gather(k)), _wide(key.gather(v))
                seen = execute(*moved, dropout, score_mod)
                out = query.scatter(out, seen.to(out.dtype))
        return out.view(batch, time, heads, -1).transpose(1, 2)

    return attend


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


Span = tuple[int, int]  # (index of the first token in the flattened rows, number of tokens)


def _spans(layout: TokenLayout) -> dict[tuple[int, int], Span]:
    """Span of every sentence: (row, segment) -> span."""
    assert layout.segments is not None
    rows, time = layout.segments.shape
    flat = layout.segments.flatten()
    edges = torch.ones(rows * time, dtype=torch.bool)
    edges[1:] = flat[1:] != flat[:-1]
    edges[::time] = True
    starts = edges.nonzero().flatten()
    ends = torch.cat([starts[1:], torch.tensor([rows * time])])
    found = zip(starts.tolist(), (ends - starts).tolist(), flat[starts].tolist(), strict=True)
    return {(start // time, segment): (start, length) for start, length, segment in found if segment}


def _group_by_length(ordered: list[Any], size: Callable[[Any], int], least: int = 16) -> list[list[Any]]:
    """Split a list sorted by size into groups of at least `least`, a new one when the size has grown by half."""
    runs: list[list[Any]] = []
    for item in ordered:
        if runs and (len(runs[-1]) < least or size(item) <= 1.5 * size(runs[-1][0])):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _padded_group(spans: list[Span], rows: TokenLayout) -> tuple[PaddedGroup, TokenLayout]:
    assert rows.segments is not None
    starts, lengths = (torch.tensor(column) for column in zip(*spans, strict=True))
    longest = int(lengths.max())
    steps = torch.arange(longest)[None]
    real = steps < lengths[:, None]  # (sentences, longest)
    source = starts[:, None] + torch.where(real, steps, 0)

    def gathered(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.flatten()[source]

    positions = rows.positions.expand_as(rows.segments).flatten()[source]
    in_order = bool(((positions == steps) | ~real).all())  # otherwise the batch sets its own positions
    layout = TokenLayout(
        steps if in_order else positions,
        None if bool(real.all()) else real.long(),
        start=0 if in_order else None,
        prompt=gathered(rows.prompt),
        chosen=gathered(rows.chosen),
        order=gathered(rows.order),
    )
    return PaddedGroup(source, real.flatten().nonzero().flatten(), source[real]), layout
