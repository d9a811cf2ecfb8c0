"""Batches for models with a segment memory: a row continues where it ended in the previous batch (Dai et al. 2019,
3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Self

import numpy as np
import torch

from allyouneed.data.batches.packing import Ints, Items, generator
from allyouneed.data.batches.sharding import ALL_ROWS, DataShard
from allyouneed.nn.batch import IGNORE, Batch, Rows


class SegmentBatches:
    """All documents concatenated and split into `rows` streams of equal length, each read `row` tokens at a time: a row
    of a batch continues the same row of the previous batch. Every token occurs once per epoch; streams that end early
    are padded.

    `documents`: for each item, the document it is a piece of. With a `seed`, documents are shuffled each epoch and stay
    whole. The memory at the start of a document belongs to another one; BOS marks the boundary.
    """

    def __init__(self, items: Items, documents: Ints, rows: int, row: int, seed: int | None = None) -> None:
        self.items, self.documents, self.rows, self.row, self.seed = items, documents, rows, row, seed
        self.shard = ALL_ROWS
        self._streamed: tuple[int, Ints, Ints] | None = None

    def for_shard(self, shard: DataShard) -> Self:
        """A shard has the same rows in every batch, so its memory stays aligned."""
        restricted = copy(self)
        restricted.shard = shard
        return restricted

    def stream(self, epoch: int) -> tuple[Ints, Ints]:
        """Items in the order of an epoch, and the cumulative end of each."""
        if self._streamed is None or self._streamed[0] != epoch:
            order = np.arange(len(self.items))
            if self.seed is not None:
                rank = generator(self.seed, epoch).permutation(int(self.documents.max()) + 1)
                order = np.argsort(rank[self.documents], kind="stable")
            self._streamed = epoch, order, np.cumsum(self.items.lengths(epoch)[0][order].astype(np.int64))
        return self._streamed[1:]

    def stream_length(self, epoch: int) -> int:
        """Tokens of each stream; the last may have fewer."""
        return -(-int(self.stream(epoch)[1][-1]) // self.rows)

    def steps_per_epoch(self, epoch: int) -> int:
        return -(-self.stream_length(epoch) // self.row)

    def describe(self, epoch: int, step: int) -> list[int]:
        return [int(n) for begin, end in self._spans(epoch, step) for n in self._members(epoch, begin, end)[0]]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        own = self.shard.rows(self.rows)
        for step in range(start_step, self.steps_per_epoch(epoch)):
            tokens = np.full((len(own), self.row), self.items.pads[-1], dtype=np.int64)
            labels = np.full((len(own), self.row), IGNORE, dtype=np.int64)
            spans = list(self._spans(epoch, step))
            for row, (begin, end) in enumerate(spans[own.start : own.stop]):
                if begin < end:
                    members, before = self._members(epoch, begin, end)
                    flat = self.items.collate(epoch, members)
                    assert flat.labels is not None
                    tokens[row, : end - begin] = flat.sides[-1].tokens[before : before + end - begin]
                    labels[row, : end - begin] = flat.labels[before : before + end - begin]
            yield Batch(Rows(torch.from_numpy(tokens)), labels=torch.from_numpy(labels), begins=step == 0)

    def _spans(self, epoch: int, step: int) -> Iterator[tuple[int, int]]:
        """Start and end of each row's tokens, as offsets into all documents concatenated."""
        if not 0 <= step < self.steps_per_epoch(epoch):
            raise IndexError(f"step {step} of {self.steps_per_epoch(epoch)}")
        length, total = self.stream_length(epoch), int(self.stream(epoch)[1][-1])
        for row in range(self.rows):
            begin = row * length + step * self.row
            yield begin, max(begin, min(begin + self.row, (row + 1) * length, total))

    def _members(self, epoch: int, begin: int, end: int) -> tuple[Ints, int]:
        """The items that cover a span, and how many of their tokens precede it."""
        order, ends = self.stream(epoch)
        if begin == end:
            return order[:0], 0
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
        return order[first : last + 1], begin - (int(ends[first - 1]) if first else 0)
