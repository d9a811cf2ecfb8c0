"""Unpack rows to one sentence per row, left-aligned, as recurrences need them.

Packed and left-padded rows are rearranged and put back afterwards; left-aligned rows stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout


@dataclass(frozen=True, eq=False)
class UnpackedRows:
    """`real` (sentences, longest) bool: real tokens, left-aligned; None: all.

    `tokens` and `targets`: index of each real token in the flattened rows and in the flattened sentences; None: rows
    are sentences.
    """

    real: Tensor | None
    tokens: Tensor | None = None
    targets: Tensor | None = None

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


def unpack_rows(context: Context) -> UnpackedRows:
    """Unpacked rows of this pass, shared by all layers. New tokens of a decoding step are left-aligned already."""
    layout = context.queries
    if context.slots is not None:
        return context.memoize("sentences", lambda: UnpackedRows(layout.real))
    return context.memoize("sentences", lambda: UnpackedRows.of(layout))
