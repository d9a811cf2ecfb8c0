"""What a model is given: tokens and the facts about them.

Nobody passes masks. Padding is `lengths`, packed rows are `segments`; everything a layer needs to know
(who may look at whom, who stands where) follows from these facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

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
    `types` (batch, time): which of several kinds of text a token belongs to (BERT's segments A and B).
    `prompt` (batch, time) bool: tokens that are given, not predicted; a prefix language model sees all of them.
    `chosen` (batch, time) bool: tokens picked to be global (Longformer).
    `order` (batch, time): the order in which a permutation language model says the tokens, from 0 on; −1 − n for one
    that only asks for the token said as number n (models/two_stream.py).
    """

    tokens: Tensor
    lengths: Tensor | None = None
    segments: Tensor | None = None
    positions: Tensor | None = None
    side: Literal["right", "left"] = "right"
    types: Tensor | None = None
    prompt: Tensor | None = None
    chosen: Tensor | None = None
    order: Tensor | None = None

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
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The same rows with this done to every tensor."""
        return _each(self, change)


@dataclass(frozen=True)
class Signal:
    """Input that is no text: pixels (batch, channels, height, width) or log-mel frames (batch, mels, time)."""

    values: Tensor

    def to(self, device: torch.device | str) -> Signal:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> Signal:
        return _each(self, change)


@dataclass(frozen=True)
class Neighbours:
    """What was retrieved for the chunks of a text (RETRO): `tokens` (batch, chunks, neighbours, length), and how
    many of them are real, `lengths` (batch, chunks, neighbours); 0 where fewer neighbours were found."""

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[Sequence[Sequence[int]]]], count: int, length: int, pad: int = 0
    ) -> Neighbours:
        """Of each text's chunks' neighbours, `count` each at most, each cut at `length` tokens."""
        chunks = max((len(text) for text in texts), default=0)
        tokens = torch.full((len(texts), chunks, count, length), pad, dtype=torch.long)
        lengths = torch.zeros(len(texts), chunks, count, dtype=torch.long)
        for row, text in enumerate(texts):
            for chunk, found in enumerate(text):
                for place, ids in enumerate(found[:count]):
                    kept = torch.tensor(list(ids[:length]), dtype=torch.long)
                    tokens[row, chunk, place, : len(kept)] = kept
                    lengths[row, chunk, place] = len(kept)
        return cls(tokens, lengths)

    def to(self, device: torch.device | str) -> Neighbours:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> Neighbours:
        return _each(self, change)


Input = Rows | Signal | Neighbours


@dataclass(frozen=True)
class Batch:
    """What goes in on each side, and the labels of the target side (`IGNORE` where there is none).

    A model of one stack has only a target. Two towers (CLIP) take one input each. The source of a model that retrieves
    is what was found; that of a segment of XLNet's are those who ask.
    """

    target: Input
    source: Input | None = None
    labels: Tensor | None = None
    begins: bool | None = None  # rows begin new texts, or go on with those of the batch before; None: it stands alone

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            target=self.target.each(change),
            source=None if self.source is None else self.source.each(change),
            labels=None if self.labels is None else change(self.labels),
            begins=self.begins,
        )

    @property
    def rows(self) -> Rows:
        """The target, where it must be text."""
        assert isinstance(self.target, Rows), "this model reads text"
        return self.target


D = TypeVar("D", Rows, Signal, Neighbours)


def _each(value: D, change: Callable[[Tensor], Tensor]) -> D:
    found: dict[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    tensors = {name: change(tensor) for name, tensor in found.items() if isinstance(tensor, Tensor)}
    return type(value)(**(found | tensors))
