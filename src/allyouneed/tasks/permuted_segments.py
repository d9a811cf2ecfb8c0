"""XLNet over long texts: segments that go on from batch to batch, each with its own order (Yang et al. 2019, 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.batches.documents import Pieces
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, generator
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.data.batches.shares import Share
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.nn.batch import IGNORE, Batch, Rows

# (how many tokens, how many to tell, chance) -> the places of those
Draw = Callable[[int, int, np.random.Generator], Ints]


class FramedDocuments(Items):
    """Documents between their marks, in pieces of at most `room` places. What of them is to be told is drawn later."""

    def __init__(self, store: Store, tokenizer: Tokenizer, room: int, seed: int) -> None:
        self.store, self.tokenizer, self.seed = store, tokenizer, seed
        store.check(text=tokenizer)
        self.pads = (tokenizer.pad,)
        self.pieces = Pieces.of(store["text"].lengths.astype(np.int64) + tokenizer.template.count(), room)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths,)

    def fill(self, epoch: int, members: Ints) -> Filled:
        tokens = np.concatenate([self.piece(int(number)) for number in members])
        return Filled((Side(tokens),), tokens)

    def piece(self, number: int) -> Ints:
        ids = self.store["text"][int(self.pieces.documents[number])]
        before, after = self.tokenizer.template.before, self.tokenizer.template.after
        begin = int(self.pieces.begins[number]) - len(before)  # counted in the text itself
        end = begin + int(self.pieces.lengths[number])
        first, last = before[max(0, len(before) + begin) :], after[: max(0, end - len(ids))]
        return np.concatenate([first if begin < 0 else (), ids[max(begin, 0) : end], last]).astype(np.int64)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.piece(number).tolist())}


class PermutedSegments:
    """The segments of `SegmentBatches`; one token in `one_in` is told, in an order drawn anew, all others are there
    from the start. Who asks is the source of the batch; labels are those of the row and then of those who ask."""

    def __init__(self, items: FramedDocuments, rows: int, size: int, one_in: int, draw: Draw, seed: int | None) -> None:
        self.items: Items = items
        self.told, self.one_in, self.draw = max(size // one_in, 1), one_in, draw
        self.chance, self.pad = items.seed, items.tokenizer.pad
        self.inner = SegmentBatches(items, items.pieces.documents, rows, size, seed)

    def shared(self, share: Share) -> Self:
        found = copy(self)
        found.inner = self.inner.shared(share)
        return found

    def steps_per_epoch(self, epoch: int) -> int:
        return self.inner.steps_per_epoch(epoch)

    def describe(self, epoch: int, step: int) -> list[int]:
        return self.inner.describe(epoch, step)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(self.inner.batches(epoch, start_step), start=start_step):
            yield self._asked(batch, epoch, step)

    def _asked(self, batch: Batch, epoch: int, step: int) -> Batch:
        assert batch.labels is not None
        tokens, real = batch.rows.tokens.numpy(), (batch.labels != IGNORE).numpy()
        order = np.where(real, 0, self.told + 1)  # padding is said last: nobody sees it
        places = np.zeros((len(tokens), self.told), dtype=np.int64)
        answers = np.full_like(places, IGNORE)
        first = self.inner.share.rows(self.inner.rows).start
        for row, count in enumerate(real.sum(1).tolist()):
            if count:
                told = max(count // self.one_in, 1)
                chance = generator(self.chance, epoch, step, first + row)
                drawn = chance.permutation(self.draw(count, told, chance))
                order[row, drawn] = np.arange(1, told + 1)
                places[row, :told], answers[row, :told] = drawn, tokens[row, drawn]
        asks = Rows(
            torch.from_numpy(np.full_like(places, self.pad)),
            positions=torch.from_numpy(places),
            order=torch.from_numpy(-1 - np.take_along_axis(order, places, 1)),
        )
        labels = np.concatenate([np.full_like(tokens, IGNORE), answers], 1)
        target = replace(batch.rows, order=torch.from_numpy(order))
        return replace(batch, target=target, source=asks, labels=torch.from_numpy(labels))
