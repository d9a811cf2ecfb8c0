"""Several readers of one run: each makes its own rows of every batch and no others, and all of them are the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from allyouneed.nn.batch import IGNORE, Batch, Rows


class Share(NamedTuple):
    """That of reader `number` of so many. Rows are a function of their place in the batch alone, so it does not matter
    how many read."""

    number: int = 0
    of: int = 1

    def rows(self, count: int) -> range:
        """Which of so many rows: neighbours."""
        return range(self.number * count // self.of, (self.number + 1) * count // self.of)


WHOLE = Share()


def blank(batch: Batch) -> Batch:
    """As many rows in which nothing stands and nothing is asked: something to compute that counts for nothing, for a
    reader that has no sentence while others wait for it in every layer."""

    def side(rows: Any) -> Any:
        if isinstance(rows, Rows) and rows.segments is not None:
            return replace(rows, segments=torch.zeros_like(rows.segments))
        return rows

    labels = batch.labels
    if labels is not None:
        of_sentences = labels.ndim == 1 and isinstance(batch.target, Rows) and batch.target.segments is not None
        labels = labels[:0] if of_sentences else torch.full_like(labels, IGNORE)
    return Batch(side(batch.target), None if batch.source is None else side(batch.source), labels, batch.begins)
