"""Rows for recurrences, which read one sentence after another.

Packed and left-padded rows are rearranged to one sentence per row, left-aligned, and put back afterwards; left-aligned
rows stay unchanged. Rearranging waits for the device, and its shapes differ from batch to batch. On a GPU, a recurrence
that can restart within a row (`restarts`) therefore reads packed rows as they are: its state is dropped at the first
token of each sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.nn.context import Context, TokenLayout


@dataclass(frozen=True, eq=False)
class UnpackedRows:
    """`real` (sentences, longest) bool: real tokens, left-aligned; None: all.

    `tokens` and `targets`: index of each real token in the flattened rows and in the flattened sentences; None: rows
    are not rearranged.
    `starts` (batch, time) int32: rows are still packed, and the sentence of each token begins at this index of its row.
    Padding is a sentence of its own, and nothing is read from it.
    """

    real: Tensor | None
    tokens: Tensor | None = None
    targets: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def of(cls, layout: TokenLayout) -> UnpackedRows:
        """Synchronizes with the device, unless rows are sentences already."""
        if layout.segments is None or (layout.start is not None and not layout.packed):
            return cls(layout.real)
        segments = layout.segments
        rows = torch.arange(len(segments), device=segments.device)[:, None]
        numbers = (rows * (segments.max() + 1) + segments).flatten()  # unique per sentence
        tokens = (segments > 0).flatten().nonzero().flatten()
        _, sentence, counts = numbers[tokens].unique(return_inverse=True, return_counts=True)
        order = sentence.argsort(stable=True)
        longest = int(counts.max()) if len(counts) else 0
        steps = torch.arange(len(tokens), device=tokens.device) - (counts.cumsum(0) - counts)[sentence[order]]
        real = torch.arange(longest, device=tokens.device) < counts[:, None]
        return cls(real, tokens[order], sentence[order] * longest + steps)

    def gather(self, x: Tensor) -> Tensor:
        """(batch, time, …) to (sentences, longest, …), padded with zeros."""
        if self.tokens is None or self.targets is None or self.real is None:
            return x
        padded = x.new_zeros(self.real.numel(), *x.shape[2:])
        return padded.index_copy(0, self.targets, x.flatten(0, 1)[self.tokens]).unflatten(0, self.real.shape)

    def scatter(self, y: Tensor, like: Tensor) -> Tensor:
        """Inverse of `gather`: back to the rows of `like` (batch, time, …), with zeros for padding."""
        if self.tokens is None or self.targets is None:
            return y
        batch, time = like.shape[:2]
        rows = y.new_zeros(batch * time, *y.shape[2:])
        return rows.index_copy(0, self.tokens, y.flatten(0, 1)[self.targets]).unflatten(0, (batch, time))


def unpack_rows(context: Context, restarts: bool = False) -> UnpackedRows:
    """Unpacked rows of this pass, shared by all layers; `restarts`: unless they can stay packed. New tokens of a
    decoding step are left-aligned already."""
    layout = context.queries
    if context.slots is not None:
        return context.memoize(UnpackedRows, "sentences", lambda: UnpackedRows(layout.real))
    if restarts and layout.packed and layout.order is None and stays_packed(layout):
        return context.memoize(UnpackedRows, "starts", lambda: UnpackedRows(None, starts=sentence_starts(layout)))
    return context.memoize(UnpackedRows, "sentences", lambda: UnpackedRows.of(layout))


def stays_packed(layout: TokenLayout) -> bool:
    """Whether rows stay packed; not on a CPU, where short sentences of similar length are less work than rows."""
    return layout.device.type == "cuda"


def window_mask(context: Context, reach: tuple[int, int]) -> Tensor | None:
    """(batch, time, size) bool: which positions of the window around each token, `reach` to the left and to the right,
    belong to its sentence, in packed rows that stay packed; None for others."""
    if not context.queries.packed or (starts := unpack_rows(context, restarts=True).starts) is None:
        return None

    def make() -> Tensor:
        time, (left, right) = starts.shape[1], reach
        at = torch.arange(time, device=starts.device)
        ends = time - 1 - flip_starts(starts).flip(1)
        there = at[:, None] + torch.arange(-left, right + 1, device=starts.device)  # (time, size)
        return (there >= starts[..., None]) & (there <= ends[..., None])

    return context.memoize(UnpackedRows, ("window", *reach), make)


def sentence_starts(layout: TokenLayout) -> Tensor:
    """Index of the first token of each token's sentence (batch, time), int32."""
    segments = layout.segments
    assert segments is not None
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    steps = torch.arange(segments.shape[1], device=segments.device)
    return torch.where(first, steps, 0).cummax(1).values.int()


def first_tokens(starts: Tensor) -> Tensor:
    """(batch, time) bool: tokens that begin a sentence."""
    return starts == torch.arange(starts.shape[1], device=starts.device)


def flip_starts(starts: Tensor) -> Tensor:
    """`starts` of the rows read from the end."""
    ends = nn.functional.pad(first_tokens(starts)[:, 1:], (0, 1), value=True).flip(1)
    steps = torch.arange(starts.shape[1], device=starts.device)
    return torch.where(ends, steps, 0).cummax(1).values.int()


def sentence_max(x: Tensor, starts: Tensor) -> Tensor:
    """x (batch, heads, time): the largest of each token's sentence."""
    slots = starts.long()[:, None].expand_as(x)
    return torch.full_like(x, -torch.inf).scatter_reduce(2, slots, x, "amax").gather(2, slots)


class Restarts(NamedTuple):
    """Which parts of a chunked recurrence belong to one sentence, of packed rows cut into chunks of `size` tokens. All
    bool."""

    pairs: Tensor  # (batch, chunks, size, size): token i may see token j, as far as j ≤ i
    reads: Tensor  # (batch, chunks, size): a token's sentence began before the chunk
    kept: Tensor  # (batch, chunks, size): a token belongs to the sentence that the chunk ends with
    passes: Tensor  # (batch, chunks): the chunk is within one sentence that began before it

    @classmethod
    def of(cls, starts: Tensor, size: int) -> Restarts:
        more = -starts.shape[1] % size
        cut = nn.functional.pad(starts, (0, more), value=starts.shape[1] if more else 0).unflatten(1, (-1, size))
        at = torch.arange(starts.shape[1] + more, device=starts.device).view(-1, size)  # (chunks, size)
        reads, last = cut < at[:, :1], cut[..., -1:]
        return cls(at[:, None] >= cut[..., None], reads, at >= last, reads[..., -1])

    @property
    def reaches(self) -> Tensor:
        """(batch, chunks, chunks) bool: all chunks between chunk i and an earlier chunk j are within one sentence."""
        ended = (~self.passes).cumsum(1)  # chunks up to each that a sentence does not pass through
        before = nn.functional.pad(ended, (1, -1))
        return (before[..., None] == ended[:, None]).tril(-1)
