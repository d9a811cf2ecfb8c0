"""How softmax attention is executed: the code picks the path, never the user.

    whole     nothing is hidden: SDPA without a mask
    causal    a plain causal sentence: SDPA's `is_causal` (padding on the right is never seen, so it needs no mask)
    grouped   rows packed with sentences, on CPU: sentences of similar length are regrouped into small batches, so
              the cost is the sum of their squares, not the square of the row
    tiled     long rows of which a query sees little: only the tiles of the mask that hold something are computed
    flex      the same on GPU, and rows packed with sentences: FlexAttention with those tiles as its block mask
    dense     everything else: SDPA with the pattern's boolean mask

`dense` is the truth; tests hold every other path to it, gradients included. A plan is made once per forward pass and
pattern, then called by all layers with q, k, v of shape (batch, heads, time, head_width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.block_mask import Tiling, apart
from allyouneed.nn.ops.attention.block_sparse import Tiled
from allyouneed.nn.ops.attention.dense import Dense, Plan, ScoreMod, dense_mask
from allyouneed.nn.ops.attention.flex import FLEX_BLOCK, Flex
from allyouneed.nn.patterns.core import Causal, Full, Pattern


def plan(pattern: Pattern, queries: TokenLayout, keys: TokenLayout, score_mod: ScoreMod) -> Plan:
    """The cheapest way to attend by this pattern between these places that is equal to the dense mask.

    Of the manner it only matters whether it is plain, so layers that agree in that share a plan.
    """
    if queries.packed != keys.packed:
        raise ValueError(
            "one side holds several sentences a row (segments), the other does not: they cannot be matched"
        )
    packed, cuda = queries.packed, queries.device.type == "cuda"
    if packed and not cuda:
        return grouped(lambda q, k: plan(pattern, q, k, score_mod), queries, keys)
    # padding of the own sentence is never seen from within it; that of a source is
    aligned = queries.start is not None and keys.start == 0 and (keys.segments is None or keys is queries)
    if isinstance(pattern, Causal) and aligned and score_mod.plain:
        if queries.start == 0 and queries.time == keys.time:
            return causal
        if queries.time == 1 and queries.start == keys.time - 1:
            return whole  # the newest token sees all there is
    if isinstance(pattern, Full) and keys.segments is None and score_mod.plain:
        return whole
    long = queries.time * keys.time >= WORTH_TILES
    if cuda and score_mod.plain and (long or (packed and queries.time >= FLEX_BLOCK)):
        parts = parts_of(pattern, queries, keys, FLEX_BLOCK, rounded=True)
        return Flex(parts, lambda: tiled_or_dense(pattern, queries, keys))
    return tiled_or_dense(pattern, queries, keys) if long else dense(pattern, queries, keys)


def tiled_or_dense(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> Plan:
    if pattern.mean_keys(keys.time, 16) < 0.4 * keys.time:  # a guess that spares the search where there is much to see
        parts = parts_of(pattern, queries, keys, BLOCK)
        if sum(part.area for part in parts) < 0.6 * queries.time * keys.time:
            return Tiled(parts)
    return dense(pattern, queries, keys)


def dense(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> Plan:
    return Dense(dense_mask(pattern, queries, keys), queries.positions, keys.positions)


WORTH_TILES = 512 * 1024  # scores; below, one call over all of them is quicker than finding out which are needed
BLOCK = 64


def parts_of(
    pattern: Pattern, queries: TokenLayout, keys: TokenLayout, block: int, rounded: bool = False
) -> list[Tiling]:
    """The tiles of a pattern, in one order of the tokens or in several, whichever is less to compute."""
    whole = Tiling(pattern, queries, keys, block, rounded)
    alternatives = apart(pattern)
    if len(alternatives) == 1:
        return [whole]
    several = [Tiling(one, queries, keys, block, rounded) for one in alternatives]
    return several if 1.5 * sum(part.area for part in several) < whole.area else [whole]


def whole(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])


def causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
    return sdpa(q, k, v, dropout_p=dropout, is_causal=True, scale=score_mod.scale, enable_gqa=q.shape[1] != k.shape[1])


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
        flat = x.flatten(0, 1)  # (batch * time, heads, head_width, which may be 0)
        return flat.index_select(0, regrouping.there.flatten()).unflatten(0, regrouping.there.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        shape: torch.Size = ctx.shape
        home = gradient.new_zeros(shape[0] * shape[1], *shape[2:])
        kept = gradient.flatten(0, 1).index_select(0, ctx.regrouping.back)
        home.index_copy_(0, ctx.regrouping.home, kept)
        return home.view(shape), None


def grouped(make: Callable[[TokenLayout, TokenLayout], Plan], queries: TokenLayout, keys: TokenLayout) -> Plan:
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
        groups.append((query, key, make(query_facts, key_facts)))

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        batch, heads, time, _ = q.shape
        out = q.new_zeros(batch * time, heads, v.shape[-1])
        with torch.autocast("cpu", enabled=False):  # bf16 attention of short sentences is slower on CPU than fp32
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
    """Every sentence of the rows: (row, segment) -> where it lies."""
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


def _alike(ordered: list[Any], size: Callable[[Any], int], least: int = 16) -> list[list[Any]]:
    """Cut a list sorted by size where sizes have grown by half, in runs that are worth a call."""
    runs: list[list[Any]] = []
    for item in ordered:
        if runs and (len(runs[-1]) < least or size(item) <= 1.5 * size(runs[-1][0])):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _regrouping(spans: list[Span], home: TokenLayout) -> tuple[Regrouping, TokenLayout]:
    assert home.segments is not None
    starts, lengths = (torch.tensor(column) for column in zip(*spans, strict=True))
    longest = int(lengths.max())
    steps = torch.arange(longest)[None]
    inside = steps < lengths[:, None]  # (sentences, longest)
    there = starts[:, None] + torch.where(inside, steps, 0)

    def moved(said: Tensor | None) -> Tensor | None:
        return None if said is None else said.flatten()[there]

    positions = home.positions.expand_as(home.segments).flatten()[there]
    in_order = bool(((positions == steps) | ~inside).all())  # else the batch places tokens as it likes
    layout = TokenLayout(
        steps if in_order else positions,
        None if bool(inside.all()) else inside.long(),
        start=0 if in_order else None,
        prompt=moved(home.prompt),
        chosen=moved(home.chosen),
        order=moved(home.order),
    )
    return Regrouping(there, inside.flatten().nonzero().flatten(), there[inside]), layout
