"""Attention of one new token per row over a KV cache (Kwon et al. 2023, "PagedAttention", arXiv:2309.06180, 4.3).

Storage is (blocks, kv_heads, slots, head_width). A row's token at position p lies in a block named by its block table:

    size = 0    blocks (rows, 1): all tokens of a row in one block, at slot p
    size = 1    blocks (rows, capacity): each token in a block of its own, at slot p (beams, which share their past)
    size = n    blocks (rows, capacity / n): n tokens per block, at slot p % n (a paged cache)

`decode_attention` runs kernels/triton/decode_attention.py on a GPU and `define_decode_attention` elsewhere;
`copy_blocks` moves rows from a paged cache to one of the first kind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.kernels import usable


class BlockTable(NamedTuple):
    """`rows_per_block`: row r uses block r // rows_per_block, so that the definition need not gather; None: look it
    up. `ring` (first, recent), with size 0: positions from `first` on take turns in `recent` slots behind the first
    ones; what lies in the slots after them is not seen."""

    blocks: Tensor
    size: int
    rows_per_block: int | None = None
    ring: tuple[int, int] | None = None

    def locate(self, positions: Tensor, storage: Tensor) -> tuple[Tensor, Tensor]:
        """Block and slot (rows,) of each row's token at its position (rows,)."""
        entries = positions // self.size if self.size else torch.zeros_like(positions)
        if self.ring is not None:
            first, recent = self.ring
            positions = torch.where(positions < first, positions, first + (positions - first) % recent)
        return self.blocks.gather(1, entries[:, None])[:, 0].long(), positions % storage.shape[2]

    def distances(self, positions: Tensor, slots: Tensor) -> Tensor:
        """(rows, slots): how far the token in each slot is behind a row's newest, at its position (rows,)."""
        away = positions[:, None] - slots
        return away if self.ring is None else torch.where(slots < self.ring[0], away, away % self.ring[1])

    def gather(self, storage: Tensor) -> Tensor:
        """(blocks, kv_heads, slots, head_width) to (rows, kv_heads, capacity, head_width), in order of positions."""
        if self.size == 0:
            return storage[self.blocks[:, 0].long()]
        if self.size == 1:
            slots = torch.arange(self.blocks.shape[1], device=storage.device) % storage.shape[2]
            return storage[self.blocks.long(), :, slots].transpose(1, 2)
        return storage[self.blocks].transpose(1, 2).flatten(2, 3)


class RelativeTables(NamedTuple):
    """Vectors by the distance of a key from the query; a larger distance has the last. With r and s of a key's
    distance, its score is (q + u)·k + (q + v)·r, scaled, and its value is that of its token plus s (Shaw et al. 2018,
    eq. 3 and 4; Dai et al. 2019, 3.3)."""

    keys: Tensor  # r: (heads or 1, distances, head_width)
    values: Tensor | None  # s: (distances, head_width); None: zeros
    content: Tensor | None  # u: (heads, head_width); None: zeros
    position: Tensor | None  # v: (heads, head_width)


class DilatedBranches(NamedTuple):
    """The keys that heads attend to, of dilated segments (LongNet, Ding et al. 2023): a branch has the positions of the
    query's segment that are as far from its begin as `first` or a multiple of the dilation more, if the query is one of
    them. A key counts once for each branch that has it."""

    sizes: Tensor  # (heads, branches, 3) int32: segment, dilation, first; `first` is less than the dilation
    most: int  # keys of a branch

    def log_counts(self, queries: Tensor, keys: Tensor) -> Tensor:
        """(rows, heads, slots), what is added to scores: the logarithm of how many branches of a query at its position
        (rows,) have the keys at these positions (rows, slots); -inf hides a key."""
        segment, dilation, first = self.sizes.long().unbind(-1)  # (heads, branches)

        def segments(positions: Tensor) -> Tensor:
            """Segments of the positions (rows, n), -1 where a branch leaves them out: (rows, heads, branches, n)."""
            x = positions[:, None, None]
            taken = x % segment[..., None] % dilation[..., None] == first[..., None]
            return torch.where(taken, x // segment[..., None], -1)

        own, others = segments(queries[:, None]), segments(keys)
        return ((own == others) & (own >= 0)).sum(2).double().log()


def copy_blocks(storage: Tensor, table: BlockTable, target: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Copy the first `counts` (n,) tokens of each row of a paged cache into the rows `rows` (n,) of `target` (rows,
    kv_heads, capacity, head_width). What is behind them there is not defined afterwards."""
    if usable(storage) and storage.is_contiguous() and target.is_contiguous():
        from allyouneed.kernels.triton.copy_blocks import copy_blocks as kernel

        kernel(storage, table.blocks.contiguous(), target, rows.contiguous(), counts.contiguous())
        return
    past = table.gather(storage)[:, :, : target.shape[2]]
    target[rows, :, : past.shape[2]] = past.to(target.dtype)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, table: BlockTable,
    new: tuple[Tensor, Tensor] | None = None, rotation: Tensor | None = None, counters: Tensor | None = None,
    bias: Tensor | None = None, relative: RelativeTables | None = None, branches: DilatedBranches | None = None,
) -> Tensor:  # fmt: skip
    """q (rows, heads, head_width) to (rows, heads, head_width): softmax(q·k · scale) v over the first `lengths` (rows,)
    positions, and over `new`: key and value (rows, kv_heads, head_width) of one more token, stored behind them.

    `rotation` (rows, head_width): cosines beside sines that rotate q and the new key by halves. `counters`: zeros for
    each row and key-value head, for the kernel to count with. `bias` (rows or 1, heads or 1, positions, or slots of a
    ring) is added to the scores; -inf hides a key. `branches`, without both: of the keys that are attended to. On a
    GPU, q and `new` may be partial sums (parts, rows, heads, head_width).
    """
    assert branches is None or (bias is None and relative is None)
    if usable(q) and branches is not None:
        from allyouneed.kernels.triton.mixer_steps.dilated_attention import dilated_attention

        return dilated_attention(
            q, keys, values, table.blocks, lengths, scale, table.size, branches.sizes, branches.most, new, rotation,
            counters, None, table.ring or (0, 0),
        )  # fmt: skip
    if usable(q):
        from allyouneed.kernels.triton.decode_attention import decode_attention as kernel

        return kernel(
            q, keys, values, table.blocks, lengths, scale, table.size, new, rotation, counters, None, bias,
            table.ring or (0, 0), relative,
        )  # fmt: skip
    return define_decode_attention(q, keys, values, lengths, scale, table, new, rotation, bias, relative, branches)


def define_decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, table: BlockTable,
    new: tuple[Tensor, Tensor] | None = None, rotation: Tensor | None = None, bias: Tensor | None = None,
    relative: RelativeTables | None = None, branches: DilatedBranches | None = None,
) -> Tensor:  # fmt: skip
    """The definition."""
    if rotation is not None:
        cos, sin = rotation[:, None].chunk(2, -1)  # (rows, 1, head_width / 2) each
        q = rotate_halves(q, cos, sin)
        new = None if new is None else (rotate_halves(new[0], cos, sin), new[1])
    count = lengths
    if new is not None:
        block, slot = table.locate(lengths, keys)
        for storage, one in zip((keys, values), new, strict=True):
            storage[block, :, slot] = one.to(storage.dtype)
        count = lengths + 1
    group = table.rows_per_block
    if group is None:
        keys, values = table.gather(keys), table.gather(values)
        group = 1
    slots = torch.arange(keys.shape[2], device=q.device)
    kept = count if table.ring is None else count.clamp(max=sum(table.ring))
    visible = slots < kept[:, None]  # (rows, capacity)
    unused = ~visible.unflatten(0, (-1, group)).any(1)[:, None, :, None]  # what was left there may not be finite
    keys, values = keys.masked_fill(unused, 0), values.masked_fill(unused, 0)
    if branches is not None:
        query = count - 1
        bias = branches.log_counts(query, query[:, None] - table.distances(query, slots))
    if relative is not None:
        away = table.distances(count - 1, slots).clamp(0, relative.keys.shape[1] - 1)  # (rows, capacity)
        scored = q if relative.position is None else q + relative.position
        by_distance = (scored.transpose(0, 1) @ relative.keys.mT).transpose(0, 1) * scale  # (rows, heads, distances)
        found = by_distance.gather(2, away[:, None].expand(-1, q.shape[1], -1))
        bias = found if bias is None else found + bias[..., : keys.shape[2]]
        q = q if relative.content is None else q + relative.content
        if relative.values is not None:
            keys, values, group = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), 1
            values = values + relative.values[away][:, None]
    # (rows / group, heads, group, head_width): rows that share a block are its queries
    queries = q.unflatten(0, (-1, group)).transpose(1, 2)
    mask, gqa = visible.unflatten(0, (-1, group))[:, None], q.shape[1] != keys.shape[1]
    if bias is None:
        found = sdpa(queries, keys, values, mask, scale=scale, enable_gqa=gqa)
        return found.transpose(1, 2).reshape(q.shape)
    missing = max(0, keys.shape[2] - bias.shape[2])
    bias = torch.nn.functional.pad(bias[..., : keys.shape[2]], (0, missing), value=float("-inf"))
    added = bias.expand(len(q), q.shape[1], -1).unflatten(0, (-1, group)).transpose(1, 2)  # as the queries
    added = added.to(q.dtype).where(mask, float("-inf"))
    some = (added > float("-inf")).any(-1, keepdim=True)
    found = sdpa(queries, keys, values, added.where(some, 0.0), scale=scale, enable_gqa=gqa) * some
    return found.transpose(1, 2).reshape(q.shape)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
