"""Rows that continue across batches: no token is lost, and order is preserved."""

import random

import numpy as np
import pytest

from allyouneed.data.batches.packing import FlatBatch, FlatSide, Items
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.nn.batch import IGNORE


class Numbers(Items):
    """Document d has the tokens 1000·d, 1000·d + 1, …, in pieces of 7; each predicts the one after it."""

    pads = (-1,)

    def __init__(self, sizes):
        self.pieces = [(d, b, min(7, size - b)) for d, size in enumerate(sizes) for b in range(0, size, 7)]
        self.documents = np.array([d for d, _, _ in self.pieces])

    def __len__(self):
        return len(self.pieces)

    def lengths(self, epoch):
        return (np.array([length for _, _, length in self.pieces]),)

    def collate(self, epoch, members):
        tokens = np.concatenate([1000 * d + np.arange(b, b + n) for d, b, n in (self.pieces[m] for m in members)])
        return FlatBatch((FlatSide(tokens),), tokens + 1)

    def show(self, number):
        return {}


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("rows, row", [(1, 4), (3, 5), (4, 16), (5, 1), (2, 500)])
@pytest.mark.parametrize("sizes", [[90], [1, 2, 3], [20, 1, 33, 7, 14, 2]])
def test_each_row_is_a_stream_across_batches(sizes, rows, row, seed):
    items = Numbers(sizes)
    data = SegmentBatches(items, items.documents, rows, row, seed)
    given = list(data.batches(2))
    assert len(given) == data.steps_per_epoch(2)
    assert [batch.begins for batch in given] == [True] + [False] * (len(given) - 1)
    tokens, labels = (np.concatenate(x, 1) for x in zip(*((b.rows.tokens, b.labels) for b in given), strict=True))
    assert tokens.shape == (rows, len(given) * row) and ((tokens == -1) == (labels == IGNORE)).all()
    read = [line[line != -1] for line in tokens]
    assert all((line[: len(one)] == one).all() for line, one in zip(tokens, read, strict=True)), "padding comes last"
    whole = np.concatenate(read)
    # all rows after another are all documents after another, each whole and in order
    assert sorted(whole) == sorted(n for d, size in enumerate(sizes) for n in range(1000 * d, 1000 * d + size))
    starts = np.flatnonzero(whole % 1000 == 0)
    for part in np.split(whole, starts[1:]):
        assert (np.diff(part) == 1).all()
    assert (labels[tokens != -1] == tokens[tokens != -1] + 1).all()
    assert max(map(len, read)) == -(-sum(sizes) // rows)


def test_an_epoch_has_its_own_order_and_begins_anywhere():
    items = Numbers([random.Random(0).randint(1, 30) for _ in range(40)])
    data = SegmentBatches(items, items.documents, 3, 8, seed=1)
    orders = [[batch.rows.tokens.tolist() for batch in data.batches(epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    other = SegmentBatches(items, items.documents, 3, 8, seed=1)
    later = list(other.batches(1, start_step=4))
    assert [batch.rows.tokens.tolist() for batch in later] == orders[1][4:] and not later[0].begins
    for step, batch in enumerate(data.batches(0)):
        seen = {int(token) for token in batch.rows.tokens.flatten() if token >= 0}
        told = other.describe(0, step)
        assert seen <= {int(n) for n in items.collate(0, told).sides[0].tokens}
    with pytest.raises(IndexError):
        data.describe(0, step + 1)
