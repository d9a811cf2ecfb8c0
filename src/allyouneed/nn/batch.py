"""What a model is given: tokens and the facts about them.

Nobody passes masks. Padding is `lengths`, packed rows are `segments`; everything a layer needs to know
(who may look at whom, who stands where) follows from these facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

IGNORE = -100  # a label that takes no part in the loss (the value torch.nn.functional.cross_entropy ignores)


@dataclass(frozen=True)
class Rows:
    """One side of a batch: `tokens` (batch, time), and either `lengths` or `segments` or neither.

    `lengths` (batch,): each row is one sentence, the rest of the row is padding, on the right or on the left.
    `segments` (batch, time): each row holds several sentences, numbered 1, 2, … in it; 0 is padding.
    Neither: every row is one sentence that fills it.
    `positions` (batch, time): a token's place in its own sentence, from 0; derived when not given.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    segments: Tensor | None = None
    positions: Tensor | None = None
    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        if self.lengths is not None and self.segments is not None:
            raise ValueError("a batch has either lengths (one sentence a row) or segments (several), not both")

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], pad: int = 0, side: Literal["right", "left"] = "right") -> Rows:
        """Pad a list of token lists of any lengths."""
        lengths = [len(sentence) for sentence in sentences]
        longest = max(lengths, default=0)
        rows = [
            list(sentence) + [pad] * (longest - len(sentence))
            if side == "right"
            else [pad] * (longest - len(sentence)) + list(sentence)
            for sentence in sentences
        ]
        tokens = torch.tensor(rows, dtype=torch.long).reshape(len(rows), longest)
        if all(length == longest for length in lengths):
            return cls(tokens)
        return cls(tokens, lengths=torch.tensor(lengths), side=side)

    def to(self, device: torch.device | str) -> Rows:
        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device, non_blocking=True)

        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            lengths=move(self.lengths),
            segments=move(self.segments),
            positions=move(self.positions),
        )


@dataclass(frozen=True)
class Batch:
    """Training rows: what goes in on each side, and the labels of the target side (`IGNORE` where there is none)."""

    target: Rows
    source: Rows | None = None
    labels: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            target=self.target.to(device),
            source=None if self.source is None else self.source.to(device),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
        )
