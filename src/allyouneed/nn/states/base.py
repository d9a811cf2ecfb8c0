"""States: what decoding keeps of the tokens seen so far. One protocol, `State`, for one sub-layer; one container,
`States`, for a whole model. A mixer declares its state; the engine owns it and uses this protocol only.

    append   store new tokens (each kind has its own signature)
    select   keep, drop, repeat or reorder rows (beams)
    join     append rows of other texts (continuous batching)
    trim     remove the last tokens (speculative decoding)
    detach   keep the values, cut the gradient (segment recurrence)

Implementations of `State`, each with a reason to exist:

    KVCache, CrossKVCache   kv_cache.py    keys and values of a growing text; of a source, shared by its beams
    WindowKVCache           window.py      patterns that forget: a ring of constant size
    PagedKVCache            paged.py       blocks of a shared pool, copied on write
    StaticKVCache           runtime/cuda   fixed shape, written in place: what a CUDA graph can capture
    Recurrent               recurrent.py   a carry of constant size

Mixers add their own where a layer keeps something else. Of `States`, `PagedStates` and `StaticStates` override where
the rows of their caches lie. The CPU interpreter reads and writes most of them in place (runtime/cpu/bindings.py).

A token's slot is its position, row by row: rows of unequal lengths share a tensor, and padding is never stored.
Attribute names of states are stored in checkpoints of segment-recurrent training (segment_memory.py): renaming one
breaks them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from allyouneed.nn.batch import to_device
from allyouneed.nn.context import Memory, TokenLayout


class State(ABC):
    """One sub-layer's memory of the rows being decoded."""

    shared = False  # True: belongs to the source, so all its beams share one copy

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row `rows[i]`."""
        for name, value in vars(self).items():
            setattr(
                self, name, _each(value, lambda tensor: tensor.index_select(0, rows), lambda part: part.select(rows))
            )

    @abstractmethod
    def trim(self, length: int, each: Tensor | None = None) -> None:
        """Remove everything from position `length` on; with `each` (rows,), whose maximum is `length`, from each row's
        own position on."""

    def join(self, other: Self) -> None:
        """Append the rows of a state of the same kind. Either both have seen tokens or neither has."""
        for name, value in vars(self).items():
            setattr(self, name, _join(value, getattr(other, name)))

    def copy(self) -> Self:
        """A state whose rows can be selected, joined and appended to without changing the original."""
        new = copy(self)
        for name, value in vars(self).items():
            setattr(new, name, _copy(value))
        return new

    def detach(self) -> None:
        """Keep the values and cut the gradient."""
        for name, value in vars(self).items():
            setattr(self, name, _each(value, Tensor.detach, State.detach))

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory in use."""


class States:
    """All states of a model: how many tokens each row has seen, and each layer's states by sub-layer name.

    Target rows come in groups of `group` (beams) that share one source row. `joins`: rows can be joined to it.
    """

    joins = True

    def __init__(self, layers: list[dict[str, State]], rows: int, device: torch.device, memory: Memory | None) -> None:
        self.layers = layers
        self.lengths = [0] * rows
        self.device = device
        self.memory = memory
        self.group = 1
        self.marks: dict[str, Tensor] = {}  # attributes of the tokens seen (rows, time), by name

    def repeat_rows(self, group: int) -> None:
        """Repeat each row `group` times; the copies share its source."""
        self._select([row for row in range(len(self.lengths)) for _ in range(group)], sources=None)
        self.group *= group

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Rows of one group stay together, so a source is copied once or not at all."""
        sources = [row // self.group for row in rows]
        heads = sources[:: self.group]
        if sources != [source for source in heads for _ in range(self.group)]:
            raise ValueError("rows that share a source must stay together")
        same = heads == list(range(len(self.lengths) // self.group))
        self._select(list(rows), sources=None if same else heads)

    def close(self) -> None:
        """Release memory that is held elsewhere. The states are not used any more."""

    def copy_rows(self, rows: Sequence[int]) -> Self:
        """States of their own with a copy of these rows."""
        new = copy(self)
        new.layers = [{name: state.copy() for name, state in layer.items()} for layer in self.layers]
        new.select(rows)
        return new

    @property
    def has_sources(self) -> bool:
        """Groups of rows share a source."""
        return self.memory is not None or any(state.shared for layer in self.layers for state in layer.values())

    def ungroup(self) -> None:
        """Rows that share no source need not stay together."""
        if self.group > 1 and not self.has_sources:
            self.group = 1

    def join(self, other: Self) -> None:
        """Append rows of other texts, of any lengths."""
        if self.group != other.group:
            raise ValueError(f"groups of {other.group} rows that share a source cannot join groups of {self.group}")
        for layer, new in zip(self.layers, other.layers, strict=True):
            for name, state in layer.items():
                state.join(new[name])
        if self.memory is not None and other.memory is not None:
            self.memory = self.memory.join(other.memory)
        ours, theirs = len(self.lengths), len(other.lengths)
        for name in {*self.marks, *other.marks}:
            known = self.marks.get(name, other.marks.get(name))
            assert known is not None
            sides = (self.marks.get(name, known.new_zeros(ours, 0)), other.marks.get(name, known.new_zeros(theirs, 0)))
            self.marks[name] = concat_rows(*sides)
        self.lengths = self.lengths + other.lengths

    def trim(self, length: int | Sequence[int]) -> None:
        """Remove every row's tokens from position `length` on, or from a position of its own."""
        own = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        left = [min(both) for both in zip(self.lengths, own, strict=True)]
        most = max(left, default=0)
        each = None if isinstance(length, int) else to_device(torch.tensor(left), self.device)
        for layer in self.layers:
            for state in layer.values():
                state.trim(most) if each is None else state.trim(most, each)
        self.lengths, self.marks = left, {name: marks[:, :most] for name, marks in self.marks.items()}

    def detach(self) -> None:
        """Keep the values and cut the gradient (Dai et al. 2019, 3.2: SG)."""
        for layer in self.layers:
            for state in layer.values():
                state.detach()
        self.memory = _each(self.memory, Tensor.detach, State.detach)

    def append_marks(self, new: TokenLayout, end: int) -> None:
        """Add the attributes of new tokens: marks become (rows, end); a missing one is False or 0."""
        attributes = {"prompt": new.prompt, "chosen": new.chosen, "types": new.types}
        positions = new.positions.expand(len(self.lengths), -1)
        for name, given in attributes.items():
            if given is None and name not in self.marks:
                continue
            known = self.marks.get(name)
            dtype = torch.long if name == "types" else torch.bool
            marks = positions.new_zeros(len(positions), end, dtype=dtype)
            if known is not None:
                marks[:, : known.shape[1]] = known[:, :end]
            marked = torch.zeros_like(positions, dtype=dtype) if given is None else given.to(dtype)
            marks.scatter_(1, positions, marked if new.real is None else marked * new.real)
            self.marks[name] = marks

    def slot_layout(self, end: int) -> TokenLayout:
        """The layout of the first `end` slots of every row."""
        positions, marks = torch.arange(end, device=self.device)[None], self.marks.get
        return TokenLayout(positions, start=0, prompt=marks("prompt"), chosen=marks("chosen"), types=marks("types"))

    @property
    def bytes(self) -> int:
        return sum(state.bytes for layer in self.layers for state in layer.values())

    def _select(self, rows: list[int], sources: list[int] | None) -> None:
        kept = to_device(torch.tensor(rows, dtype=torch.long), self.device)
        shared = None if sources is None else to_device(torch.tensor(sources, dtype=torch.long), self.device)
        for layer in self.layers:
            for state in layer.values():
                index = shared if state.shared else kept
                if index is not None:
                    state.select(index)
        if shared is not None and self.memory is not None:
            self.memory = self.memory.select(shared)
        self.marks = {name: marks.index_select(0, kept) for name, marks in self.marks.items()}
        self.lengths = [self.lengths[row] for row in rows]


def concat_rows(ours: Tensor, theirs: Tensor) -> Tensor:
    """Rows of both; where one is smaller along another axis, zeros are appended to it."""
    if ours.shape[1:] == theirs.shape[1:]:
        return torch.cat((ours, theirs))
    sizes = [max(both) for both in zip(ours.shape[1:], theirs.shape[1:], strict=True)]
    joint = ours.new_zeros(len(ours) + len(theirs), *sizes)
    for rows, part in ((slice(len(ours)), ours), (slice(len(ours), None), theirs)):
        joint[(rows, *(slice(size) for size in part.shape[1:]))] = part
    return joint


def _each(value: Any, change: Callable[[Tensor], Tensor], visit: Callable[[State], None]) -> Any:
    """The value with all its tensors changed; states in it are visited."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, State):
        visit(value)
    elif isinstance(value, list | tuple):
        inside = [_each(entry, change, visit) for entry in value]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    elif isinstance(value, dict):
        return {key: _each(entry, change, visit) for key, entry in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {entry.name: _each(getattr(value, entry.name), change, visit) for entry in fields(value)}
        return replace(value, **parts)
    return value


def _join(ours: Any, theirs: Any) -> Any:
    """Tensors are concatenated by rows; of counts the larger one is kept; anything else is equal in both."""
    if (ours is None) != (theirs is None):
        raise ValueError("cannot join rows that have seen tokens and rows that have not")
    if isinstance(ours, Tensor):
        return concat_rows(ours, theirs)
    if isinstance(ours, State):
        ours.join(theirs)
    elif isinstance(ours, list | tuple):
        inside = [_join(*both) for both in zip(ours, theirs, strict=True)]
        return type(ours)(*inside) if hasattr(ours, "_fields") else type(ours)(inside)
    elif isinstance(ours, dict):
        return {key: _join(entry, theirs[key]) for key, entry in ours.items()}
    elif isinstance(ours, int):
        return max(ours, theirs)
    return ours


def _copy(value: Any) -> Any:
    if isinstance(value, State):
        return value.copy()
    return {key: _copy(entry) for key, entry in value.items()} if isinstance(value, dict) else value
