"""Data-parallel reading: each data rank builds only its own rows of every batch; together they are the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from allyouneed.nn.batch import IGNORE, Batch, Rows


class DataShard(NamedTuple):
    """Shard `rank` of `world_size`. Rows depend only on their index in the batch, so results do not depend on
    `world_size`."""

    rank: int = 0
    world_size: int = 1

    def rows(self, total: int) -> range:
        """A contiguous range of the `total` rows of a batch."""
        return range(self.rank * total // self.world_size, (self.rank + 1) * total // self.world_size)


ALL_ROWS = DataShard()


def empty_like(batch: Batch) -> Batch:
    """The same rows with all tokens padding and all labels ignored: for a rank that has no sequence but must take part
    in every collective."""

    def side(rows: Any) -> Any:
        if isinstance(rows, Rows) and rows.segments is not None:
            return replace(rows, segments=torch.zeros_like(rows.segments))
        return rows

    labels = batch.labels
    if labels is not None:
        # not token ids: one for each sequence, or numbers of its classes
        scores = labels.ndim == 1 or labels.is_floating_point()
        per_sequence = scores and isinstance(batch.target, Rows) and batch.target.segments is not None
        labels = labels[:0] if per_sequence else torch.full_like(labels, IGNORE)
    return Batch(side(batch.target), None if batch.source is None else side(batch.source), labels, batch.begins)
