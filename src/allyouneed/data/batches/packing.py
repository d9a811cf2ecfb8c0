"""Batches of whatever a task learns from: rows that hold several sentences each, so that almost nothing computed is
padding.

The order of an epoch is a pure function of seed and epoch, and packing of the order, so a run that resumes at step k
sees exactly the batches it would have seen. Within an epoch every sentence comes exactly once; the last batch is
filled up with empty rows (all padding, all labels ignored) rather than with sentences of the next epoch, so that
shapes are static and an epoch means what it says.

What a sentence is, which marks it gets and what is to be learnt of it, is said by the task's `Items`.
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

from allyouneed.data.batches.shares import WHOLE, Share, blank
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, Neighbours, Rows

POOL = 16

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Side:
    """What stands on one side of a batch: the tokens of all its sentences end to end, marks included, and what else
    there is to say about each of them (`prompt`, `types`)."""

    tokens: Ints
    besides: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Filled:
    """Sentences in full. `labels`: of each token of the last side, end to end; or `answers`: one for each sentence."""

    sides: tuple[Side, ...]  # the target, or source and target
    labels: Ints | None = None
    answers: NDArray[Any] | None = None
    found: Neighbours | None = None  # what was retrieved for them


class Items(ABC):
    """What a task learns from, one by one: sentences, or pieces of documents."""

    pads: tuple[int, ...]  # the padding of each side
    alone: bool = False  # each needs a row of its own
    weights: NDArray[np.float64] | None = None  # how many times an epoch reads each; None: once

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        """How many tokens each takes on each side, marks counted."""

    @abstractmethod
    def fill(self, epoch: int, members: Ints) -> Filled:
        """These items. What is drawn by chance depends on seed, epoch and item alone."""

    @abstractmethod
    def show(self, number: int) -> dict[str, str]:
        """An item for a person to read."""


class Batches(Protocol):
    """What training and validation read from, packed or padded."""

    items: Items

    def shared(self, share: Share) -> Batches:
        """The same batches, of each of them the rows of one of several readers; no other rows are made."""
        ...

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

    def between(self, start: int, stop: int) -> Groups:
        """Neighbouring ones; none beyond the last."""
        start = min(start, len(self))
        bounds = self.bounds[start : max(start, min(stop, len(self))) + 1]
        return Groups(self.members[bounds[0] : bounds[-1]], bounds - bounds[0])


def pack(lengths: Sequence[NDArray[np.integer]], capacities: Sequence[int], order: Ints, pool: int = POOL) -> Groups:
    """Put the sentences, in this order, into rows of one or two capacities: each into the first open row with room.

    At most `pool` rows are open; when none has room, the fullest is closed for a new one. The order stays local (a
    sentence lands at most about `pool` rows from its place), so rows stay as random as the order is.
    """
    sources, targets = lengths[0][order].tolist(), lengths[-1][order].tolist()
    row_source, row_target = capacities[0], capacities[-1]
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
    """Batches of `rows` packed rows each, of so many tokens on each side. One epoch's packing is kept at a time."""

    def __init__(self, items: Items, capacities: Sequence[int], rows: int, seed: int = 0) -> None:
        if rows < 1:
            raise UserError(f"a batch needs at least one row, not {rows}")
        self.items, self.capacities, self.rows, self.seed = items, tuple(capacities), rows, seed
        self.share = WHOLE
        self._packed: tuple[int, Groups, tuple[NDArray[np.integer], ...]] | None = None

    def shared(self, share: Share) -> Self:
        found = copy(self)
        found.share = share
        return found

    def packing(self, epoch: int) -> Groups:
        """The rows of an epoch, in order."""
        return self._of(epoch)[0]

    def _of(self, epoch: int) -> tuple[Groups, tuple[NDArray[np.integer], ...]]:
        """The rows of an epoch, and how long all items are in it."""
        if self._packed is None or self._packed[0] != epoch:
            lengths = self.items.lengths(epoch)
            self._packed = epoch, pack(lengths, self.capacities, self._order(generator(self.seed, epoch))), lengths
        return self._packed[1:]

    def _order(self, rng: np.random.Generator) -> Ints:
        """Every item as often as it weighs; what is left of a weight after whole times is a chance."""
        weights = self.items.weights
        if weights is None:
            return rng.permutation(len(self.items))
        whole = np.floor(weights)
        times = (whole + (rng.random(len(weights)) < weights - whole)).astype(np.int64)
        times = times if times.any() else np.ones_like(times)  # an epoch of nothing would never end
        return rng.permutation(np.repeat(np.arange(len(weights)), times))

    def steps_per_epoch(self, epoch: int) -> int:
        return -(-len(self.packing(epoch)) // self.rows)

    def describe(self, epoch: int, step: int) -> list[int]:
        """The items of a batch by their number."""
        return [int(n) for n in self._rows(epoch, step).members]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        own = self.share.rows(self.rows)
        for step in range(start_step, self.steps_per_epoch(epoch)):
            rows = self._rows(epoch, step)
            if len(mine := rows.between(own.start, own.stop)):
                yield self._batch(epoch, mine, len(own))
            else:  # the last batch is filled up with empty rows
                yield blank(self._batch(epoch, rows.between(0, 1), len(own)))

    def _rows(self, epoch: int, step: int) -> Groups:
        packing = self.packing(epoch)
        if not 0 <= step < self.steps_per_epoch(epoch):
            raise IndexError(f"step {step} of {self.steps_per_epoch(epoch)}")
        return packing.between(step * self.rows, (step + 1) * self.rows)

    def _batch(self, epoch: int, rows: Groups, height: int) -> Batch:
        """`height`: how many rows it has, the last ones empty."""
        members, counts = rows.members, np.diff(rows.bounds)
        row_of = np.repeat(np.arange(len(rows)), counts)
        segment = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        filled = self.items.fill(epoch, members)
        found = []
        for side, all_lengths, width, pad in zip(
            filled.sides, self._of(epoch)[1], self.capacities, self.items.pads, strict=True
        ):
            lengths = all_lengths[members].astype(np.int64)
            ends = np.cumsum(lengths)
            # Where a sentence begins in its row: what came before it in the batch, less what came before the row.
            row_begins = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
            begin = row_of * width + (ends - lengths) - np.repeat(row_begins, counts)
            position = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
            cells = Cells(np.repeat(begin, lengths) + position, (height, width))
            facts = {"segments": np.repeat(segment, lengths), "positions": position} | side.besides
            spread: Any = {name: cells.spread(values, 0) for name, values in facts.items()}
            found.append((Rows(cells.spread(side.tokens, pad), **spread), cells))
        return _batch_of(found, filled)


@dataclass(frozen=True)
class Cells:
    """The places, in a matrix of this shape, of tokens that come end to end."""

    places: Ints
    shape: tuple[int, int]

    def spread(self, values: NDArray[Any], empty: int) -> torch.Tensor:
        """By torch, which leaves the interpreter to whoever trains meanwhile."""
        given = torch.from_numpy(np.ascontiguousarray(values))
        cells = torch.full((self.shape[0] * self.shape[1],), empty, dtype=given.dtype)
        return cells.index_copy_(0, torch.from_numpy(self.places), given).view(self.shape)


def _batch_of(sides: list[tuple[Rows, Cells]], filled: Filled) -> Batch:
    target, cells = sides[-1]
    labels = None if filled.labels is None else cells.spread(filled.labels, IGNORE)
    if filled.answers is not None:
        labels = torch.from_numpy(filled.answers)
    return Batch(target=target, source=sides[0][0] if len(sides) > 1 else filled.found, labels=labels)


class PaddedBatches:
    """One sentence a row, batches of like lengths with at most `budget` cells, padding included, on either side.

    The plain way, for validation and as what packing is compared with. With a `seed`, sentences of one length and the
    batches themselves come in a new order each epoch; without, always from short to long.
    """

    def __init__(self, items: Items, budget: int, seed: int | None = None) -> None:
        self.items, self.budget, self.seed = items, budget, seed
        self.share = WHOLE
        self._grouped: tuple[int, Groups] | None = None

    def shared(self, share: Share) -> Self:
        found = copy(self)
        found.share = share
        return found

    def grouping(self, epoch: int) -> Groups:
        epoch = 0 if self.seed is None else epoch
        if self._grouped is None or self._grouped[0] != epoch:
            self._grouped = epoch, self._group(epoch)
        return self._grouped[1]

    def _group(self, epoch: int) -> Groups:
        lengths = self.items.lengths(epoch)
        source, target = lengths[0], lengths[-1]
        longest = max(int(side.max(initial=0)) for side in lengths)
        if longest > self.budget:
            raise UserError(
                f"a batch of {self.budget} tokens cannot hold a sentence of {longest}; "
                "give batches more tokens or set max_tokens lower"
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
        for step in range(start_step, self.steps_per_epoch(epoch)):
            members = self.grouping(epoch)[step]
            own = self.share.rows(len(members))
            drawn = 0 if self.seed is None else epoch
            if len(own):
                yield self._batch(drawn, members[own.start : own.stop])
            else:
                yield blank(self._batch(drawn, members[:1]))

    def _batch(self, epoch: int, members: Ints) -> Batch:
        filled = self.items.fill(epoch, members)
        found = []
        for side, all_lengths, pad in zip(filled.sides, self.items.lengths(epoch), self.items.pads, strict=True):
            lengths = all_lengths[members].astype(np.int64)
            width = int(lengths.max())
            position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            cells = Cells(np.repeat(np.arange(len(members)) * width, lengths) + position, (len(members), width))
            besides: Any = {name: cells.spread(values, 0) for name, values in side.besides.items()}
            rows = Rows(cells.spread(side.tokens, pad), lengths=torch.from_numpy(lengths), **besides)
            found.append((rows, cells))
        return _batch_of(found, filled)


def marked(tokens: Ints, lengths: Ints, first: Sequence[int] = (), last: Sequence[int] = ()) -> Ints:
    """Sentences end to end, of these lengths without marks, each with these marks before and after it."""
    more = len(first) + len(last)
    ends = np.cumsum(lengths + more)
    out = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    real = np.ones(len(out), dtype=bool)
    before = [(mark, ends - lengths - more + place) for place, mark in enumerate(first)]
    after = [(mark, ends - len(last) + place) for place, mark in enumerate(last)]
    for mark, places in before + after:
        out[places] = mark
        real[places] = False
    out[real] = tokens
    return out


def generator(*numbers: int) -> np.random.Generator:
    """Chance that depends on these numbers alone: seed, epoch, item."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(numbers)))
