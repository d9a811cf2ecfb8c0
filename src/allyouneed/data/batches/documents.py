"""Documents of any length as pieces that fit a row. No token is lost, and a piece never holds two documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allyouneed.data.batches.packing import Ints
from allyouneed.data.batches.store import Column


@dataclass(frozen=True)
class Pieces:
    """Piece n is `lengths[n]` places of document `documents[n]`, from place `begins[n]` of it on."""

    documents: Ints
    begins: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def of(cls, lengths: Ints, room: int) -> Pieces:
        """Every document of these lengths, cut every `room` places."""
        counts = -(-lengths // room)
        documents = np.repeat(np.arange(len(lengths)), counts)
        begins = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * room
        return cls(documents, begins, np.minimum(lengths[documents] - begins, room))

    def tokens(self, column: Column, number: int) -> Ints:
        """The numbers of a piece, where places are those of the column."""
        begin = self.begins[number]
        return column[int(self.documents[number])][begin : begin + self.lengths[number]].astype(np.int64)
