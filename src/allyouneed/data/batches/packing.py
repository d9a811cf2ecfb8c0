"""Batches of packed rows: each row holds several sequences, so that almost nothing computed is padding.

The order of an epoch is a pure function of seed and epoch, and packing is a pure function of the order, so a run
resumed at step k sees exactly the batches it would have seen. Within an epoch every sequence occurs exactly once. The
last batch is filled with empty rows (all padding, all labels ignored), not with sequences of the next epoch: shapes
stay static.

A task's `Items` define what a sequence is, its special tokens and its labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.batches.sharding import ALL_ROWS, DataShard, empty_like
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, Media, Neighbours, Rows, Signal

POOL = 16  # rows open at a time while packing

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FlatSide:
    """One side of a batch: the tokens of all sequences concatenated, special tokens included, and per-token `features`
    (`prompt`, `types`, `slots`), one or several numbers per token."""

    tokens: Ints
    features: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlatBatch:
    """Sequences before packing or padding. Either `labels`, one per token of the last side, or `answers`, one per
    sequence."""

    sides: tuple[FlatSide, ...]  # the target, or source and target; none: the signal is the target
    labels: Ints | None = None
    answers: NDArray[Any] | None = None
    neighbours: Neighbours | None = None  # retrieved for them
    media: Media | None = None  # images and sounds in them, in order
    signal: Signal | None = None  # an image or a sound for each


class Items(ABC):
    """What a task learns from, one by one: sentences, or pieces of documents."""

    pads: tuple[int, ...]  # padding id of each side
    one_per_row: bool = False  # items must not share a row
    weights: NDArray[np.float64] | None = None  # how many times an epoch reads each; None: once

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        """Number of tokens of each item on each side, special tokens included."""

    @abstractmethod
    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        """These items. Random choices depend on seed, epoch and item alone."""

    @abstractmethod
    def show(self, number: int) -> dict[str, str]:
        """An item as readable text."""


class Batches(Protocol):
    """Packed or padded batches for training and validation."""

    items: Items

    def for_shard(self, shard: DataShard) -> Batches:
        """The same batches restricted to the rows of one shard; other rows are never built."""
        ...

    def steps_per_epoch(self, epoch: int) -> int: ...

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]: ...

    def describe(self, epoch: int, step: int) -> list[int]: ...


class IndexGroups:
    """Lists of item indices, concatenated: the rows of an epoch, or its padded batches."""

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

    def slice(self, start: int, stop: int) -> IndexGroups:
        """Groups `start` to `stop`, fewer at the end."""
        start = min(start, len(self))
        bounds = self.bounds[start : max(start, min(stop, len(self))) + 1]
        return IndexGroups(self.members[bounds[0] : bounds[-1]], bounds - bounds[0])


def pack(
    lengths: Sequence[NDArray[np.integer]], capacities: Sequence[int], order: Ints, pool: int = POOL
) -> IndexGroups:
    """First-fit packing of sequences, in this order, into rows of one or two capacities (source, target).

    At most `pool` rows are open; if a sequence fits none of them, the fullest is closed and a new row opened. A
    sequence lands at most about `pool` rows from its index in `order`, so rows are as random as the order.
    """
    sources, targets = lengths[0][order].tolist(), lengths[-1][order].tolist()
    row_source, row_target = capacities[0], capacities[-1]
    if not sources:
        return IndexGroups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if max(sources) > row_source or max(targets) > row_target:
        raise ValueError("a sequence is longer than a row")
    least_source, least_target = min(sources), min(targets)
    open_rows: list[list[int]] = []  # oldest first: [free source tokens, free target tokens, row index]
    chosen: list[int] = []
    opened = 0
    for source, target in zip(sources, targets, strict=True):
        for row in open_rows:
            if source <= row[0] and target <= row[1]:
                break
        else:
            if len(open_rows) == pool:
                open_rows.remove(min(open_rows, key=_free_tokens))
            row = [row_source, row_target, opened]
            open_rows.append(row)
            opened += 1
        row[0] -= source
        row[1] -= target
        chosen.append(row[2])
        if row[0] < least_source or row[1] < least_target:
            open_rows.remove(row)
    rows = np.array(chosen, dtype=np.int64)
    members = order[np.argsort(rows, kind="stable")]
    return IndexGroups(members, np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=opened))]))


def _free_tokens(row: list[int]) -> int:
    return row[0] + row[1]


class PackedBatches:
    """Batches of `rows` packed rows; `capacities`: tokens per row on each side. Caches the packing of one epoch."""

    def __init__(self, items: Items, capacities: Sequence[int], rows: int, seed: int = 0) -> None:
        if rows < 1:
            raise UserError(f"a batch needs at least one row, not {rows}")
        self.items, self.capacities, self.rows, self.seed = items, tuple(capacities), rows, seed
        self.shard = ALL_ROWS
        self._packed: tuple[int, IndexGroups, tuple[NDArray[np.integer], ...]] | None = None

    def for_shard(self, shard: DataShard) -> Self:
        restricted = copy(self)
        restricted.shard = shard
        return restricted

    def packing(self, epoch: int) -> IndexGroups:
        """The rows of an epoch, in order."""
        return self._pack_epoch(epoch)[0]

    def _pack_epoch(self, epoch: int) -> tuple[IndexGroups, tuple[NDArray[np.integer], ...]]:
        """The rows of an epoch, and the lengths of all items in it."""
        if self._packed is None or self._packed[0] != epoch:
            lengths = self.items.lengths(epoch)
            self._packed = epoch, pack(lengths, self.capacities, self._order(generator(self.seed, epoch))), lengths
        return self._packed[1:]

    def _order(self, rng: np.random.Generator) -> Ints:
        """Each item floor(weight) times, and once more with the probability of the fraction."""
        weights = self.items.weights
        if weights is None:
            return rng.permutation(len(self.items))
        whole = np.floor(weights)
        times = (whole + (rng.random(len(weights)) < weights - whole)).astype(np.int64)
        times = times if times.any() else np.ones_like(times)  # an empty epoch would never end
        return rng.permutation(np.repeat(np.arange(len(weights)), times))

    def steps_per_epoch(self, epoch: int) -> int:
        return -(-len(self.packing(epoch)) // self.rows)

    def describe(self, epoch: int, step: int) -> list[int]:
        """Indices of the items of a batch."""
        return [int(n) for n in self._rows(epoch, step).members]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        own = self.shard.rows(self.rows)
        for step in range(start_step, self.steps_per_epoch(epoch)):
            rows = self._rows(epoch, step)
            if len(mine := rows.slice(own.start, own.stop)):
                yield self._batch(epoch, mine, len(own))
            else:  # the last batch may have no sequence for this shard
                yield empty_like(self._batch(epoch, rows.slice(0, 1), len(own)))

    def _rows(self, epoch: int, step: int) -> IndexGroups:
        packing = self.packing(epoch)
        if not 0 <= step < self.steps_per_epoch(epoch):
            raise IndexError(f"step {step} of {self.steps_per_epoch(epoch)}")
        return packing.slice(step * self.rows, (step + 1) * self.rows)

    def _batch(self, epoch: int, rows: IndexGroups, height: int) -> Batch:
        """`height`: number of rows; those after `rows` are empty."""
        members, counts = rows.members, np.diff(rows.bounds)
        row_of = np.repeat(np.arange(len(rows)), counts)
        segment = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        flat = self.items.collate(epoch, members)
        sides = []
        for side, all_lengths, width, pad in zip(
            flat.sides, self._pack_epoch(epoch)[1], self.capacities, self.items.pads, strict=True
        ):
            lengths = all_lengths[members].astype(np.int64)
            ends = np.cumsum(lengths)
            # offset in the row: tokens of the batch before this sequence, minus those before the row
            row_begins = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
            begin = row_of * width + (ends - lengths) - np.repeat(row_begins, counts)
            position = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
            cells = CellIndex(np.repeat(begin, lengths) + position, (height, width))
            features = {"segments": np.repeat(segment, lengths), "positions": position} | side.features
            scattered: Any = {name: cells.scatter(values, 0) for name, values in features.items()}
            sides.append((Rows(cells.scatter(side.tokens, pad), **scattered), cells))
        return _batch_of(sides, flat)


@dataclass(frozen=True)
class CellIndex:
    """Flat indices, in a matrix of this shape, of concatenated tokens."""

    indices: Ints
    shape: tuple[int, int]

    def scatter(self, values: NDArray[Any], empty: int) -> torch.Tensor:
        """Uses torch, which releases the GIL to the training thread."""
        given = torch.from_numpy(np.ascontiguousarray(values))
        cells = torch.full((self.shape[0] * self.shape[1], *given.shape[1:]), empty, dtype=given.dtype)
        return cells.index_copy_(0, torch.from_numpy(self.indices), given).view(*self.shape, *given.shape[1:])


def _batch_of(sides: list[tuple[Rows, CellIndex]], flat: FlatBatch) -> Batch:
    target, cells = sides[-1]
    labels = None if flat.labels is None else cells.scatter(flat.labels, IGNORE)
    if flat.answers is not None:
        labels = torch.from_numpy(flat.answers)
    source = sides[0][0] if len(sides) > 1 else flat.neighbours or flat.media or flat.signal
    return Batch(target=target, source=source, labels=labels)


class PaddedBatches:
    """One sequence per row, batches of similar lengths with at most `budget` cells (padding included) on either side.

    Used for validation, and as the reference for packing. With a `seed`, sequences of equal length and the batches
    themselves are shuffled each epoch; without, they are sorted from short to long.
    """

    def __init__(self, items: Items, budget: int, seed: int | None = None) -> None:
        self.items, self.budget, self.seed = items, budget, seed
        self.shard = ALL_ROWS
        self._grouped: tuple[int, IndexGroups] | None = None

    def for_shard(self, shard: DataShard) -> Self:
        restricted = copy(self)
        restricted.shard = shard
        return restricted

    def grouping(self, epoch: int) -> IndexGroups:
        epoch = 0 if self.seed is None else epoch
        if self._grouped is None or self._grouped[0] != epoch:
            self._grouped = epoch, self._group(epoch)
        return self._grouped[1]

    def _group(self, epoch: int) -> IndexGroups:
        lengths = self.items.lengths(epoch)
        source, target = lengths[0], lengths[-1]
        longest = max(int(side.max(initial=0)) for side in lengths)
        if longest > self.budget:
            raise UserError(
                f"a batch of {self.budget} tokens cannot hold a sequence of {longest}; "
                "raise the tokens per batch or lower max_tokens"
            )
        rng = None if self.seed is None else generator(self.seed, epoch)
        ties = np.arange(len(self.items)) if rng is None else rng.permutation(len(self.items))
        order = np.lexsort((ties, source, target))
        starts, widest, tallest = [0], 0, 0
        for n, (s, t) in enumerate(zip(source[order].tolist(), target[order].tolist(), strict=True)):
            widest, tallest = max(widest, s), max(tallest, t)
            if (n - starts[-1] + 1) * max(widest, tallest) > self.budget:
                starts.append(n)
                widest, tallest = s, t
        bounds = np.array([*starts, len(order)], dtype=np.int64)
        if rng is None:
            return IndexGroups(order, bounds)
        shuffled = rng.permutation(len(starts))
        groups = IndexGroups(order, bounds)
        sizes = np.diff(bounds)[shuffled]
        return IndexGroups(np.concatenate([groups[int(n)] for n in shuffled]), np.concatenate([[0], np.cumsum(sizes)]))

    def steps_per_epoch(self, epoch: int) -> int:
        return len(self.grouping(epoch))

    def describe(self, epoch: int, step: int) -> list[int]:
        return [int(n) for n in self.grouping(epoch)[step]]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step in range(start_step, self.steps_per_epoch(epoch)):
            members = self.grouping(epoch)[step]
            own = self.shard.rows(len(members))
            drawn = 0 if self.seed is None else epoch
            if len(own):
                yield self._batch(drawn, members[own.start : own.stop])
            else:
                yield empty_like(self._batch(drawn, members[:1]))

    def _batch(self, epoch: int, members: Ints) -> Batch:
        flat = self.items.collate(epoch, members)
        if not flat.sides:
            assert flat.signal is not None and flat.answers is not None
            return Batch(flat.signal, labels=torch.from_numpy(flat.answers))
        sides = []
        for side, all_lengths, pad in zip(flat.sides, self.items.lengths(epoch), self.items.pads, strict=True):
            lengths = all_lengths[members].astype(np.int64)
            width = int(lengths.max())
            position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            cells = CellIndex(np.repeat(np.arange(len(members)) * width, lengths) + position, (len(members), width))
            features: Any = {name: cells.scatter(values, 0) for name, values in side.features.items()}
            rows = Rows(cells.scatter(side.tokens, pad), lengths=torch.from_numpy(lengths), **features)
            sides.append((rows, cells))
        return _batch_of(sides, flat)


class SizedBatches(PaddedBatches):
    """`rows` items per batch, one per row, fewer in the last of an epoch; with a `seed` in another order each epoch.
    `near`: batches whose items are sorted by length together, so that less is padding."""

    def __init__(self, items: Items, rows: int, seed: int | None = None, near: int = 1) -> None:
        super().__init__(items, 0, seed)
        self.rows, self.near = rows, near

    def _group(self, epoch: int) -> IndexGroups:
        count = len(self.items)
        bounds = np.append(np.arange(0, count, self.rows), count)
        if self.seed is None:
            return IndexGroups(np.arange(count), bounds)
        rng = generator(self.seed, epoch)
        order = rng.permutation(count)
        if self.near == 1:
            return IndexGroups(order, bounds)
        lengths, pool = self.items.lengths(epoch)[0][order], np.arange(count) // (self.near * self.rows)
        groups = IndexGroups(order[np.lexsort((lengths, pool))], bounds)
        shuffled = rng.permutation(len(groups))
        members = np.concatenate([groups[int(n)] for n in shuffled])
        return IndexGroups(members, np.concatenate([[0], np.cumsum(np.diff(bounds)[shuffled])]))


def add_special_tokens(tokens: Ints, lengths: Ints, first: Sequence[int] = (), last: Sequence[int] = ()) -> Ints:
    """Concatenated sequences of these lengths, with the tokens `first` before and `last` after each of them."""
    more = len(first) + len(last)
    ends = np.cumsum(lengths + more)
    out = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    is_text = np.ones(len(out), dtype=bool)
    before = [(token, ends - lengths - more + offset) for offset, token in enumerate(first)]
    after = [(token, ends - len(last) + offset) for offset, token in enumerate(last)]
    for token, indices in before + after:
        out[indices] = token
        is_text[indices] = False
    out[is_text] = tokens
    return out


def generator(*numbers: int) -> np.random.Generator:
    """A generator seeded by these numbers alone: seed, epoch, item."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))
