"""Split documents into pieces that fit a row. No token is lost, and a piece never spans two documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allyouneed.data.batches.packing import Ints
from allyouneed.data.batches.store import Column


@dataclass(frozen=True)
class DocumentPieces:
    """Piece n is `lengths[n]` tokens of document `documents[n]`, starting at index `begins[n]`."""

    documents: Ints
    begins: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def split(cls, lengths: Ints, max_length: int) -> DocumentPieces:
        """Split documents of these lengths every `max_length` tokens."""
        counts = -(-lengths // max_length)
        documents = np.repeat(np.arange(len(lengths)), counts)
        begins = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_length
        return cls(documents, begins, np.minimum(lengths[documents] - begins, max_length))

    def tokens(self, column: Column, number: int) -> Ints:
        """The values of a piece in a column of one value per token."""
        begin = self.begins[number]
        return column[int(self.documents[number])][begin : begin + self.lengths[number]].astype(np.int64)
