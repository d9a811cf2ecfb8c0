"""Model inputs: tokens and their layout.

Masks are never passed. Padding is `lengths`, packed rows are `segments`; masks and positions are derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor

IGNORE = -100  # label excluded from the loss, as in torch.nn.functional.cross_entropy


class Tensors:
    """A record of tensors, which are moved together."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor, also of records in this one."""
        found = dict[str, Any]()
        for field in fields(self):  # type: ignore[arg-type]  # of a dataclass
            one = getattr(self, field.name)
            known = change(one) if isinstance(one, Tensor) else one
            found[field.name] = one.each(change) if isinstance(one, Tensors) else known
        return type(self)(**found)

    def to(self, device: torch.device | str) -> Self:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Rows(Tensors):
    """One side of a batch: `tokens` (batch, time), and either `lengths` or `segments` or neither.

    `lengths` (batch,): one sentence per row, padded on the right or on the left.
    `segments` (batch, time): several sentences per row, numbered 1, 2, …; 0 is padding.
    Neither: every row is one sentence without padding.
    `positions` (batch, time): position in the sentence, from 0; derived by default.
    `types` (batch, time): token type (BERT's segments A and B).
    `prompt` (batch, time) bool: tokens that are given, not predicted; a prefix language model attends to all of them.
    `chosen` (batch, time) bool: global tokens (Longformer).
    `order` (batch, time): factorisation order of a permutation language model, from 0; −1 − n for a query-stream token
    that predicts token number n (models/two_stream.py).
    `ages` (batch, time): time from each item of a sequence to its end (embed/behavior.py).
    `details` (batch, time, n): further ids of each token: side information of an item, then, of the last token, the
    features of the whole sequence (heads/click.py).
    `mirrored`: row i + batch / 2 is a target of the same source as row i, written from right to left
    (mixers/attention/synchronous.py).
    `slots` (batch, time): 0 for tokens; 1 for slots of images, 2 for those of sounds (`MEDIA`), whose embedding is in
    `vectors` (batch, time, width), before positions are added (models/interleaved.py).
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
    mirrored: bool = False
    slots: Tensor | None = None
    vectors: Tensor | None = None
    ages: Tensor | None = None
    details: Tensor | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and self.segments is not None:
            raise ValueError("lengths and segments are exclusive; set one")

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], pad: int = 0, side: Literal["right", "left"] = "right") -> Rows:
        """Pad token lists to a batch."""
        lengths = [len(sentence) for sentence in sentences]
        longest = max(lengths, default=0)
        rows = [
            list(sentence) + [pad] * (longest - len(sentence))
            if side == "right"
            else [pad] * (longest - len(sentence)) + list(sentence)
            for sentence in sentences
        ]
        tokens = torch.tensor(rows, dtype=torch.long).reshape(len(rows), longest)
        if lengths.count(longest) == len(lengths):
            return cls(tokens)
        return cls(tokens, lengths=torch.tensor(lengths), side=side)

    def to(self, device: torch.device | str) -> Rows:
        return self.each(lambda tensor: to_device(tensor, device))


@dataclass(frozen=True)
class Signal(Tensors):
    """Image or audio input: pixels (batch, channels, height, width), log-mel frames (batch, mels, time) or samples
    (batch, 1, time). `lengths` (batch,): the time of each sound, which is padded with zeros; default: all of it."""

    values: Tensor
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Neighbours(Tensors):
    """Neighbours retrieved for the chunks of a text (RETRO): `tokens` (batch, chunks, neighbours, length) and `lengths`
    (batch, chunks, neighbours), 0 for missing neighbours."""

    tokens: Tensor
    lengths: Tensor

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[Sequence[Sequence[int]]]], count: int, length: int, pad: int = 0
    ) -> Neighbours:
        """Build from the neighbours of each chunk of each text: `count` per chunk, each truncated to `length`
        tokens."""
        chunks = max((len(text) for text in texts), default=0)
        tokens = torch.full((len(texts), chunks, count, length), pad, dtype=torch.long)
        lengths = torch.zeros(len(texts), chunks, count, dtype=torch.long)
        for row, text in enumerate(texts):
            for chunk, found in enumerate(text):
                for index, ids in enumerate(found[:count]):
                    kept = torch.tensor(list(ids[:length]), dtype=torch.long)
                    tokens[row, chunk, index, : len(kept)] = kept
                    lengths[row, chunk, index] = len(kept)
        return cls(tokens, lengths)


MEDIA = ("image", "audio")  # kinds of media in a text; `Rows.slots` numbers them from 1


@dataclass(frozen=True)
class Media(Tensors):
    """Images (count, channels, height, width) and sounds as log-mel frames (count, mels, time) of all rows of a batch,
    in the order of their slots."""

    image: Tensor | None = None
    audio: Tensor | None = None


Input = Rows | Signal | Neighbours | Media


@dataclass(frozen=True)
class Batch(Tensors):
    """Inputs of both sides, and labels of the target (`IGNORE` where there is none).

    Single-stack models have only a target. Two-tower models (CLIP) take one input each. The source of a retrieval model
    is its neighbours, that of a model of interleaved texts their images and sounds; that of an XLNet segment is the
    query stream.
    """

    target: Input
    source: Input | None = None
    labels: Tensor | None = None
    # rows start new texts (True) or continue the previous batch (False); None: independent batches
    begins: bool | None = None

    @property
    def rows(self) -> Rows:
        """The target as text."""
        assert isinstance(self.target, Rows), "this model needs text input"
        return self.target


def count_labels(labels: Tensor) -> Tensor:
    """How many labels there are: numbers above `IGNORE`, or rows with a number for each class."""
    if labels.ndim == 2 and labels.is_floating_point():
        return (labels != IGNORE).any(-1).sum()
    return (labels > IGNORE).sum()


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy to a GPU begins after what the GPU is computing, and only from pinned memory the host does not wait for
    that."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
