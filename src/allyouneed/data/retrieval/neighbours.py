"""Document pieces with the neighbours retrieved for their chunks (RETRO)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.batches.packing import FlatBatch, Ints, Items
from allyouneed.data.retrieval.corpus import ChunkIndex
from allyouneed.nn.batch import Neighbours


class NeighbourItems(Items):
    """`numbers` (chunks, count): for every full chunk of every item, concatenated, the nearest chunks of the index; −1
    where fewer were found."""

    one_per_row = True  # neighbours belong to the chunks of one text

    def __init__(self, items: Items, index: ChunkIndex, numbers: Ints) -> None:
        self.items, self.index, self.numbers, self.pads = items, index, numbers, items.pads
        self.counts = items.lengths(0)[0].astype(np.int64) // index.chunk
        self.begins = np.cumsum(self.counts) - self.counts

    def __len__(self) -> int:
        return len(self.items)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return self.items.lengths(epoch)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        return replace(self.items.collate(epoch, members), neighbours=self.neighbours(members))

    def show(self, number: int) -> dict[str, str]:
        return self.items.show(number)

    def neighbours(self, members: Ints) -> Neighbours:
        index, counts = self.index, self.counts[members]
        chunk = np.arange(int(counts.max(initial=0)))  # (chunks of the longest)
        there = chunk < counts[:, None]
        rows = np.where(there, self.begins[members][:, None] + chunk, 0)
        numbers = np.where(there[..., None], self.numbers[rows], -1) if len(chunk) else np.zeros((*rows.shape, 1), int)
        begins = index.begins[np.maximum(numbers, 0)]  # (items, chunks, count)
        ends = index.bounds[index.documents[np.maximum(numbers, 0)] + 1]
        lengths = np.where(numbers >= 0, np.minimum(2 * index.chunk, ends - begins), 0)
        step = np.arange(2 * index.chunk)
        real = step < lengths[..., None]
        tokens = np.where(real, index.tokens[np.where(real, begins[..., None] + step, 0)], index.tokenizer.pad)
        return Neighbours(torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(lengths.astype(np.int64)))


class PassageSet:
    """All windows of `size` tokens of a text, to test whether another text repeats one of them verbatim."""

    def __init__(self, text: Ints, size: int) -> None:
        dice = np.random.Generator(np.random.PCG64(size))
        self.weights = dice.integers(1, 1 << 63, size, dtype=np.uint64) | np.uint64(1)
        self.known = np.unique(self._numbers(text))

    def shares_passage(self, text: Ints) -> bool:
        """Whether a window of the text is one of these (the contamination check of RETRO)."""
        return bool(np.isin(self._numbers(text), self.known).any())

    def _numbers(self, text: Ints) -> NDArray[np.uint64]:
        """A hash of each window."""
        if len(text) < len(self.weights):
            return np.zeros(0, dtype=np.uint64)
        runs = np.lib.stride_tricks.sliding_window_view(np.asarray(text, dtype=np.uint64), len(self.weights))
        return runs @ self.weights
