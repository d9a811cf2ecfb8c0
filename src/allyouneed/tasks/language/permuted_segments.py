"""XLNet with segment recurrence: segments continue from batch to batch, each with its own order (Yang et al. 2019,
2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.data.batches.sharding import DataShard
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.nn.batch import IGNORE, Batch, Rows

# (number of tokens, number of targets, rng) -> target indices
Draw = Callable[[int, int, np.random.Generator], Ints]


class FramedDocuments(StoredItems):
    """Documents with special tokens, in pieces of at most `max_length` tokens. Targets are drawn later."""

    def __init__(self, store: Store, tokenizer: Tokenizer, max_length: int, seed: int) -> None:
        super().__init__(store, tokenizer)
        self.seed = seed
        self.pieces = DocumentPieces.split(
            store["text"].lengths.astype(np.int64) + tokenizer.template.count(), max_length
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        tokens = np.concatenate([self.piece(int(number)) for number in members])
        return FlatBatch((FlatSide(tokens),), tokens)

    def piece(self, number: int) -> Ints:
        ids = self.store["text"][int(self.pieces.documents[number])]
        before, after = self.tokenizer.template.before, self.tokenizer.template.after
        begin = int(self.pieces.begins[number]) - len(before)  # index in the text itself
        end = begin + int(self.pieces.lengths[number])
        first, last = before[max(0, len(before) + begin) :], after[: max(0, end - len(ids))]
        return np.concatenate([first if begin < 0 else (), ids[max(begin, 0) : end], last]).astype(np.int64)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.piece(number).tolist())}


class PermutedSegments:
    """The segments of `SegmentBatches`; one token in `one_in` is a target, in an order redrawn every epoch, the others
    are context. The queries are the source of the batch; labels are those of the row, then those of the queries."""

    def __init__(self, items: FramedDocuments, rows: int, size: int, one_in: int, draw: Draw, seed: int | None) -> None:
        self.items: Items = items
        self.target_count, self.one_in, self.draw = max(size // one_in, 1), one_in, draw
        self.draw_seed, self.pad = items.seed, items.tokenizer.pad
        self.inner = SegmentBatches(items, items.pieces.documents, rows, size, seed)

    def for_shard(self, shard: DataShard) -> Self:
        restricted = copy(self)
        restricted.inner = self.inner.for_shard(shard)
        return restricted

    def steps_per_epoch(self, epoch: int) -> int:
        return self.inner.steps_per_epoch(epoch)

    def describe(self, epoch: int, step: int) -> list[int]:
        return self.inner.describe(epoch, step)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(self.inner.batches(epoch, start_step), start=start_step):
            yield self._add_queries(batch, epoch, step)

    def _add_queries(self, batch: Batch, epoch: int, step: int) -> Batch:
        assert batch.labels is not None
        tokens, real = batch.rows.tokens.numpy(), (batch.labels != IGNORE).numpy()
        order = np.where(real, 0, self.target_count + 1)  # padding comes last, so that nothing attends to it
        targets = np.zeros((len(tokens), self.target_count), dtype=np.int64)
        answers = np.full_like(targets, IGNORE)
        first = self.inner.shard.rows(self.inner.rows).start
        for row, count in enumerate(real.sum(1).tolist()):
            if count:
                target_count = max(count // self.one_in, 1)
                rng = generator(self.draw_seed, epoch, step, first + row)
                drawn = rng.permutation(self.draw(count, target_count, rng))
                order[row, drawn] = np.arange(1, target_count + 1)
                targets[row, :target_count], answers[row, :target_count] = drawn, tokens[row, drawn]
        queries = Rows(
            torch.from_numpy(np.full_like(targets, self.pad)),
            positions=torch.from_numpy(targets),
            order=torch.from_numpy(-1 - np.take_along_axis(order, targets, 1)),
        )
        labels = np.concatenate([np.full_like(tokens, IGNORE), answers], 1)
        target = replace(batch.rows, order=torch.from_numpy(order))
        return replace(batch, target=target, source=queries, labels=torch.from_numpy(labels))
