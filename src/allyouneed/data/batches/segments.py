"""Long texts read on from batch to batch: what a model with a memory learns from (Dai et al. 2019, 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Self

import numpy as np
import torch

from allyouneed.data.batches.packing import Ints, Items, generator
from allyouneed.data.batches.shares import WHOLE, Share
from allyouneed.nn.batch import IGNORE, Batch, Rows


class SegmentBatches:
    """All documents end to end, cut into `rows` texts of one length, each read `row` tokens at a time: a row of a batch
    goes on where the same row of the batch before ended. Every token comes once in an epoch; at its end rows that have
    no more are filled with padding, which nobody reads after.

    `documents`: of each item, the one it is a piece of. With a `seed`, they come in a new order each epoch; a document
    stays whole. What is remembered at its beginning is of another one: the begin mark tells.
    """

    def __init__(self, items: Items, documents: Ints, rows: int, row: int, seed: int | None = None) -> None:
        self.items, self.documents, self.rows, self.row, self.seed = items, documents, rows, row, seed
        self.share = WHOLE
        self._streamed: tuple[int, Ints, Ints] | None = None

    def shared(self, share: Share) -> Self:
        """A reader's rows are the same in every batch, so that what it remembers of them goes on."""
        found = copy(self)
        found.share = share
        return found

    def stream(self, epoch: int) -> tuple[Ints, Ints]:
        """Items in the order of an epoch, and where each ends."""
        if self._streamed is None or self._streamed[0] != epoch:
            order = np.arange(len(self.items))
            if self.seed is not None:
                place = generator(self.seed, epoch).permutation(int(self.documents.max()) + 1)
                order = np.argsort(place[self.documents], kind="stable")
            self._streamed = epoch, order, np.cumsum(self.items.lengths(epoch)[0][order].astype(np.int64))
        return self._streamed[1:]

    def text(self, epoch: int) -> int:
        """Tokens of each of the texts; the last has fewer."""
        return -(-int(self.stream(epoch)[1][-1]) // self.rows)

    def steps_per_epoch(self, epoch: int) -> int:
        return -(-self.text(epoch) // self.row)

    def describe(self, epoch: int, step: int) -> list[int]:
        return [int(n) for begin, end in self._spans(epoch, step) for n in self._members(epoch, begin, end)[0]]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        own = self.share.rows(self.rows)
        for step in range(start_step, self.steps_per_epoch(epoch)):
            tokens = np.full((len(own), self.row), self.items.pads[-1], dtype=np.int64)
            labels = np.full((len(own), self.row), IGNORE, dtype=np.int64)
            spans = list(self._spans(epoch, step))
            for row, (begin, end) in enumerate(spans[own.start : own.stop]):
                if begin < end:
                    members, before = self._members(epoch, begin, end)
                    filled = self.items.fill(epoch, members)
                    assert filled.labels is not None
                    tokens[row, : end - begin] = filled.sides[-1].tokens[before : before + end - begin]
                    labels[row, : end - begin] = filled.labels[before : before + end - begin]
            yield Batch(Rows(torch.from_numpy(tokens)), labels=torch.from_numpy(labels), begins=step == 0)

    def _spans(self, epoch: int, step: int) -> Iterator[tuple[int, int]]:
        """Begin and end of what each row reads, counted in all documents end to end."""
        if not 0 <= step < self.steps_per_epoch(epoch):
            raise IndexError(f"step {step} of {self.steps_per_epoch(epoch)}")
        text, total = self.text(epoch), int(self.stream(epoch)[1][-1])
        for row in range(self.rows):
            begin = row * text + step * self.row
            yield begin, max(begin, min(begin + self.row, (row + 1) * text, total))

    def _members(self, epoch: int, begin: int, end: int) -> tuple[Ints, int]:
        """The items that cover a span, and how many tokens of them come before it."""
        order, ends = self.stream(epoch)
        if begin == end:
            return order[:0], 0
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
        return order[first : last + 1], begin - (int(ends[first - 1]) if first else 0)
