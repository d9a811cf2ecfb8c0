"""Batches out of a store: rows that hold several sentences each, so that almost nothing computed is padding.

The order of an epoch is a pure function of seed and epoch, and packing of the order, so a run that resumes at step k
sees exactly the batches it would have seen. Within an epoch every sentence comes exactly once; the last batch is
filled up with empty rows (all padding, all labels ignored) rather than with sentences of the next epoch, so that
shapes are static and an epoch means what it says.

A source sentence is its tokens and an end mark. A target sentence is read as begin mark and tokens, and predicts
tokens and end mark. `lengths` below count that mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.store import Store
from allyouneed.data.tokenizers import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, Rows

POOL = 16

Ints = NDArray[np.int64]


class Batches(Protocol):
    """What training and validation read from, packed or padded."""

    def steps_per_epoch(self, epoch: int) -> int: ...

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]: ...

    def describe(self, epoch: int, step: int) -> list[int]: ...


class Groups:
    """Lists of sentence indices laid end to end: the rows of an epoch, or its padded batches."""

    def __init__(self, members: Ints, bounds: Ints) -> None:
        self.members, self.bounds = members, bounds

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Ints]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Ints:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)}")
        return self.members[self.bounds[index] : self.bounds[index + 1]]


def pack(
    source_lengths: NDArray[np.integer],
    target_lengths: NDArray[np.integer],
    row_source: int,
    row_target: int,
    order: Ints,
    pool: int = POOL,
) -> Groups:
    """Put the sentences, in this order, into rows of two capacities: each into the first open row that has room.

    At most `pool` rows are open; when none has room, the fullest is closed for a new one. The order stays local (a
    sentence lands at most about `pool` rows from its place), so rows stay as random as the order is.
    """
    sources, targets = source_lengths[order].tolist(), target_lengths[order].tolist()
    if not sources:
        return Groups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if max(sources) > row_source or max(targets) > row_target:
        raise ValueError("a sentence is longer than a row")
    least_source, least_target = min(sources), min(targets)
    rooms: list[list[int]] = []  # open rows, oldest first: [room in source, room in target, number]
    chosen: list[int] = []
    opened = 0
    for source, target in zip(sources, targets, strict=True):
        for room in rooms:
            if source <= room[0] and target <= room[1]:
                break
        else:
            if len(rooms) == pool:
                rooms.remove(min(rooms, key=_emptiness))
            room = [row_source, row_target, opened]
            rooms.append(room)
            opened += 1
        room[0] -= source
        room[1] -= target
        chosen.append(room[2])
        if room[0] < least_source or room[1] < least_target:
            rooms.remove(room)
    rows = np.array(chosen, dtype=np.int64)
    members = order[np.argsort(rows, kind="stable")]
    return Groups(members, np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=opened))]))


def _emptiness(room: list[int]) -> int:
    return room[0] + room[1]


def fill(groups: Groups, lengths: NDArray[np.integer], row: int) -> float:
    """Which part of the rows is sentence."""
    return float(lengths[groups.members].sum() / max(len(groups) * row, 1))


class PackedBatches:
    """Batches of `rows` packed rows each. One epoch's packing is kept at a time."""

    def __init__(
        self, store: Store, vocabularies: Vocabularies, row_source: int, row_target: int, rows: int, seed: int = 0
    ) -> None:
        _check(store, vocabularies)
        for side, row in (("source", row_source), ("target", row_target)):
            if store.max_tokens > row:
                raise UserError(
                    f"the data keeps sentences of up to {store.max_tokens} tokens (max_tokens), but a {side} row holds "
                    f"{row}; make the rows at least that long or set max_tokens to {min(row_source, row_target)}"
                )
        if rows < 1:
            raise UserError(f"a batch needs at least one row, not {rows}")
        self.store, self.vocabularies, self.seed = store, vocabularies, seed
        self.row_source, self.row_target, self.rows = row_source, row_target, rows
        self._packed: tuple[int, Groups] | None = None

    def packing(self, epoch: int) -> Groups:
        """The rows of an epoch, in order."""
        if self._packed is None or self._packed[0] != epoch:
            order = _generator(self.seed, epoch).permutation(len(self.store))
            lengths = self.store.source_lengths + 1, self.store.target_lengths + 1
            self._packed = epoch, pack(*lengths, self.row_source, self.row_target, order)
        return self._packed[1]

    def steps_per_epoch(self, epoch: int) -> int:
        return -(-len(self.packing(epoch)) // self.rows)

    def describe(self, epoch: int, step: int) -> list[int]:
        """The sentences of a batch by their number in the store."""
        return [int(n) for row in self._rows(epoch, step) for n in row]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step in range(start_step, self.steps_per_epoch(epoch)):
            yield self._batch(self._rows(epoch, step))

    def _rows(self, epoch: int, step: int) -> list[Ints]:
        packing = self.packing(epoch)
        if not 0 <= step < self.steps_per_epoch(epoch):
            raise IndexError(f"step {step} of {self.steps_per_epoch(epoch)}")
        return [packing[n] for n in range(step * self.rows, min((step + 1) * self.rows, len(packing)))]

    def _batch(self, rows: list[Ints]) -> Batch:
        members = np.concatenate(rows)
        counts = np.array([len(row) for row in rows])
        row_of = np.repeat(np.arange(len(rows)), counts)
        segment = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        sides = []
        for number, width in ((0, self.row_source), (1, self.row_target)):
            lengths = self.store.sides[number].lengths[members].astype(np.int64) + 1
            ends = np.cumsum(lengths)
            # Where a sentence begins in its row: what came before it in the batch, less what came before the row.
            row_begins = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
            begin = row_of * width + (ends - lengths) - np.repeat(row_begins, counts)
            position = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
            place = np.repeat(begin, lengths) + position
            sides.append((place, position, np.repeat(segment, lengths), np.repeat(lengths, lengths)))

        def spread(side: int, values: Ints, empty: int) -> torch.Tensor:
            width = (self.row_source, self.row_target)[side]
            cells = np.full(self.rows * width, empty, dtype=np.int64)
            cells[sides[side][0]] = values
            return torch.from_numpy(cells.reshape(self.rows, width))

        def rows_of(side: int, tokens: Ints, pad: int) -> Rows:
            _, position, segments, _ = sides[side]
            return Rows(
                spread(side, tokens, pad), segments=spread(side, segments, 0), positions=spread(side, position, 0)
            )

        source, target = self.vocabularies.source, self.vocabularies.target
        heard = _marked(self.store.sides[0].gather(members), sides[0], source.eos)
        said = self.store.sides[1].gather(members)
        return Batch(
            source=rows_of(0, heard, source.pad),
            target=rows_of(1, _marked(said, sides[1], target.bos, at_begin=True), target.pad),
            labels=spread(1, _marked(said, sides[1], target.eos), IGNORE),
        )


def _marked(tokens: Ints, side: tuple[Ints, Ints, Ints, Ints], number: int, at_begin: bool = False) -> Ints:
    """Sentences end to end, each with one mark more: at its beginning or at its end."""
    _, position, _, lengths = side
    mark = position == (0 if at_begin else lengths - 1)
    out = np.full(len(position), number, dtype=np.int64)
    out[~mark] = tokens
    return out


class PaddedBatches:
    """One sentence a row, batches of like lengths with at most `budget` cells, padding included, on either side.

    The plain way, for validation and as what packing is compared with. With a `seed`, sentences of one length and the
    batches themselves come in a new order each epoch; without, always from short to long.
    """

    def __init__(self, store: Store, vocabularies: Vocabularies, budget: int, seed: int | None = None) -> None:
        _check(store, vocabularies)
        if store.max_tokens > budget:
            raise UserError(
                f"a batch of {budget} tokens cannot hold a sentence of {store.max_tokens} (max_tokens); "
                "give batches more tokens or set max_tokens lower"
            )
        self.store, self.vocabularies, self.budget, self.seed = store, vocabularies, budget, seed
        self._grouped: tuple[int, Groups] | None = None

    def grouping(self, epoch: int) -> Groups:
        epoch = 0 if self.seed is None else epoch
        if self._grouped is None or self._grouped[0] != epoch:
            self._grouped = epoch, self._group(epoch)
        return self._grouped[1]

    def _group(self, epoch: int) -> Groups:
        source, target = self.store.source_lengths + 1, self.store.target_lengths + 1
        rng = None if self.seed is None else _generator(self.seed, epoch)
        ties = np.arange(len(self.store)) if rng is None else rng.permutation(len(self.store))
        order = np.lexsort((ties, source, target))
        starts, widest, tallest = [0], 0, 0
        for n, (s, t) in enumerate(zip(source[order].tolist(), target[order].tolist(), strict=True)):
            widest, tallest = max(widest, s), max(tallest, t)
            if (n - starts[-1] + 1) * max(widest, tallest) > self.budget:
                starts.append(n)
                widest, tallest = s, t
        bounds = np.array([*starts, len(order)], dtype=np.int64)
        if rng is None:
            return Groups(order, bounds)
        shuffled = rng.permutation(len(starts))
        groups = Groups(order, bounds)
        sizes = np.diff(bounds)[shuffled]
        return Groups(np.concatenate([groups[int(n)] for n in shuffled]), np.concatenate([[0], np.cumsum(sizes)]))

    def steps_per_epoch(self, epoch: int) -> int:
        return len(self.grouping(epoch))

    def describe(self, epoch: int, step: int) -> list[int]:
        return [int(n) for n in self.grouping(epoch)[step]]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        source, target = self.vocabularies.source, self.vocabularies.target
        for step in range(start_step, self.steps_per_epoch(epoch)):
            members = self.describe(epoch, step)
            heard = [self.store.source(n).tolist() for n in members]
            said = [self.store.target(n).tolist() for n in members]
            lengths = torch.tensor([len(ids) + 1 for ids in said])
            yield Batch(
                source=_padded([[*ids, source.eos] for ids in heard], source.pad),
                target=Rows(_padded([[target.bos, *ids] for ids in said], target.pad).tokens, lengths=lengths),
                labels=_padded([[*ids, target.eos] for ids in said], IGNORE).tokens,
            )


def _padded(sentences: list[list[int]], pad: int) -> Rows:
    return Rows(Rows.of(sentences, pad).tokens, lengths=torch.tensor([len(ids) for ids in sentences]))


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))


def _check(store: Store, vocabularies: Vocabularies) -> None:
    if store.vocabularies_hash != vocabularies.hash:
        raise UserError(f"{store.folder}: was encoded with another tokenizer; build the store again with this one")
