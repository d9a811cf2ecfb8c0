"""The state of a recurrence: a carry of constant size.

A carry cannot be run backwards, so trimming runs it forwards again: from a snapshot, the carry at an earlier position
of each row, over the inputs since then. There are at most `TAIL` of those; when there would be more, all but the last
`MAX_TRIM` are folded into the snapshot.

An executor that runs one token after another need not fold: it keeps the carry `MAX_TRIM` inputs after the snapshot as
it passes by (`pending`), and `make_room` makes it the next snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.observe import is_observed
from allyouneed.nn.states.base import State
from allyouneed.nn.states.window import MAX_TRIM

TAIL = 2 * MAX_TRIM  # inputs kept: those that can be trimmed, and room for as many, so that folding is rare

Carry = tuple[Tensor, ...]
# (batch, an input: its dtype and device) -> the carry of rows that have seen no token; all its tensors batch first
Begin = Callable[[int, Tensor], Carry]
# (carry, inputs (batch, time, features), real (batch, time) bool or None) -> the carry after those that are real
Fold = Callable[[Carry, Tensor, Tensor | None], Carry]
Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, Tensor])  # (batch, time, …)


def recurrent_cost(carry: int, features: int, wide: int = 0) -> Cost:
    """The cost of a state of `carry` elements whose inputs have `features` features. `wide`: elements that stay in
    single precision where inputs are in half precision."""
    kept = carry + TAIL * features  # the snapshot and the inputs since then
    return Cost(state_constant=carry + kept, wide_constant=2 * wide, trim=kept, trim_wide=wide)


class Recurrent(State):
    """A mixer runs over its new tokens by `advance`; or it takes the `carry`, and stores the new one and the inputs by
    `update`."""

    pending: Carry = ()  # of an executor: the carry of each row after `pending_at` tokens (batch,); −1: not known
    pending_at: Tensor | None = None

    def __init__(self, begin: Begin, fold: Fold) -> None:
        self.begin, self.fold = begin, fold
        self.now: Carry | None = None
        self.snapshot: Carry = ()
        # (batch, TAIL + 1, features): inputs since the snapshot, then anything; padding goes into the last slot
        self.tail: Tensor | None = None
        self.since: Tensor | None = None  # (batch,) tokens in the snapshot
        self.lengths: Tensor | None = None  # (batch,) tokens in the carry
        self.most = 0  # the most inputs in the tail of any row, known without a device synchronisation

    def carry(self, batch: int, like: Tensor) -> Carry:
        """The carry so far, not to be changed in place; new rows get dtype and device of `like`."""
        if self.now is None:
            self.now = self.snapshot = self.begin(batch, like)
        return self.now

    def advance(
        self, run: Callable[..., tuple[Outputs, Carry]], inputs: Tensor, context: Context, *others: Tensor
    ) -> Outputs:
        """Outputs of these inputs (batch, time, features) by `run(inputs, carry, real, *others)`, which also gives the
        carry after them; that and the inputs are stored. `others` (batch, time, …) are read with the inputs, only.

        A long pass runs in two pieces, since the carry between them, after all that can no longer be trimmed, is the
        next snapshot: no input is folded twice."""
        (batch, time, _), real = inputs.shape, context.queries.real
        carry = self.carry(batch, inputs)
        if time <= MAX_TRIM or is_observed():
            y, carry = run(inputs, carry, real, *others)
            self.update(inputs, carry, context)
            return y
        size, both = time - MAX_TRIM, (inputs, *others)
        if real is None:
            y, between = run(inputs[:, :size], carry, None, *(x[:, :size] for x in others))
            rest, carry = run(inputs[:, size:], between, None, *(x[:, size:] for x in others))
            self.update(inputs, carry, context, between)
            return _each(lambda *both: torch.cat(both, 1), y, rest)
        # each row has its own place to cut
        count, place = real.sum(1)[:, None], torch.arange(time, device=inputs.device)
        first = (count - MAX_TRIM).clamp(min=0)  # (batch, 1): tokens of the first piece
        y, between = run(inputs[:, :size], carry, place[:size] < first, *(x[:, :size] for x in others))
        last = first + place[:MAX_TRIM]
        ends, *other_ends = (_gather(x, last.clamp(max=time - 1)) for x in both)
        rest, carry = run(ends, between, last < count, *other_ends)
        self.update(inputs, carry, context, between)
        found = torch.where(place < first, place, size + (place - first).clamp(0, MAX_TRIM - 1))  # (batch, time)
        return _each(lambda *both: _gather(torch.cat(both, 1), found), y, rest)

    def update(self, inputs: Tensor, carry: Carry, context: Context, between: Carry | None = None) -> None:
        """Store the carry after these inputs (batch, time, features), and the inputs; padding is skipped. `between`:
        the carry before the last MAX_TRIM of them, for rows that have more; for others, before all of them."""
        (batch, time, features), real = inputs.shape, context.queries.real
        self.carry(batch, inputs)
        if self.tail is None or self.since is None or self.lengths is None:
            self.tail = inputs.new_zeros(batch, TAIL + 1, features)
            self.since = self.lengths = torch.zeros(batch, dtype=torch.long, device=inputs.device)
        room = TAIL if between is None and self.most + time <= TAIL else TAIL + time
        joint = self.tail if room == TAIL else nn.functional.pad(self.tail, (0, 0, 0, time))
        slots = (self.lengths - self.since)[:, None] + torch.arange(time, device=inputs.device)  # (batch, time)
        slots = slots if real is None else slots.where(real, room)
        joint[torch.arange(batch, device=inputs.device)[:, None], slots] = inputs
        before, self.now, self.most = self.most, carry, self.most + time
        self.lengths = self.lengths + (time if real is None else real.sum(1))
        if room == TAIL:
            return
        old = (self.lengths - MAX_TRIM - self.since).clamp(min=0)[:, None]  # inputs that can no longer be trimmed
        if between is None:
            self.snapshot = self.fold(self.snapshot, joint, torch.arange(room + 1, device=old.device) < old)
        elif real is None or not before:
            self.snapshot = between
        else:  # rows with few new inputs: what can no longer be trimmed is in the tail
            few = real.sum(1) <= MAX_TRIM
            inside = (torch.arange(TAIL, device=old.device) < old) & few[:, None]
            folded = self.fold(self.snapshot, joint[:, :TAIL], inside)
            self.snapshot = tuple(
                torch.where(few.view(-1, *(1,) * (new.dim() - 1)), was, new.to(was.dtype))
                for new, was in zip(between, folded, strict=True)
            )
        left = (old + torch.arange(TAIL + 1, device=old.device)).clamp(max=room)  # (batch, TAIL + 1)
        self.tail = joint.gather(1, left[..., None].expand(-1, -1, features))
        self.since, self.most = self.since + old[:, 0], MAX_TRIM

    def make_room(self) -> None:
        """Shorten the tails that are full, in place: for an executor, whose tensors are this state's alone. The pending
        carry becomes the snapshot, and the carry of now the next pending one, since it is MAX_TRIM inputs after that.
        Rows whose pending carry is not known are folded."""
        assert self.tail is not None and self.since is not None and self.lengths is not None
        count = self.lengths - self.since
        rows = (count >= TAIL).nonzero()[:, 0]
        if self.pending_at is None or bool((self.pending_at != self.since + MAX_TRIM)[rows].any()):
            rows = (count > MAX_TRIM).nonzero()[:, 0]
            inside = torch.arange(TAIL + 1, device=count.device) < (count - MAX_TRIM)[:, None]
            parts = self.fold(self.snapshot, self.tail, inside)
        else:
            parts = self.pending
        assert self.now is not None
        _write(self.snapshot, parts, rows)
        left = (count[rows] - MAX_TRIM)[:, None] + torch.arange(MAX_TRIM, device=count.device)  # (rows, MAX_TRIM)
        self.tail[rows, :MAX_TRIM] = self.tail[rows[:, None], left]
        self.since[rows] = self.lengths[rows] - MAX_TRIM
        if self.pending_at is not None:
            _write(self.pending, self.now, rows)
            self.pending_at[rows] = self.lengths[rows]
        self.most = int((self.lengths - self.since).max())

    def join(self, other: Self) -> None:
        if (self.pending_at is None) != (other.pending_at is None):
            self.forget_pending()
            other.forget_pending()
        super().join(other)

    def forget_pending(self) -> None:
        for name in ("pending", "pending_at"):
            vars(self).pop(name, None)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.tail is None or self.since is None or self.lengths is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        lost = (kept < self.since) | ((self.lengths - kept > MAX_TRIM) & (self.since > 0))
        if bool(lost.any()):
            raise ValueError(f"a recurrent state can trim at most {MAX_TRIM} tokens")
        again = max(1, int((kept - self.since).max()))
        inside = torch.arange(again, device=kept.device) < (kept - self.since)[:, None]
        self.now, self.lengths = self.fold(self.snapshot, self.tail[:, :again], inside), kept
        if self.pending_at is not None:
            self.pending_at = self.pending_at.where(kept >= self.pending_at, -1)

    @property
    def bytes(self) -> int:
        if self.now is None or self.tail is None:
            return 0
        tensors = (*self.now, *self.snapshot, *self.pending, self.tail[:, :TAIL])
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _write(into: Carry, parts: Carry, rows: Tensor) -> None:
    for to, part in zip(into, parts, strict=True):
        if len(rows) == len(to):
            to.copy_(part)
        else:
            to[rows] = part[rows].to(to.dtype)


def _each(change: Callable[..., Tensor], first: Outputs, second: Outputs) -> Outputs:
    if isinstance(first, Tensor):
        return change(first, second)
    a, b = (change(*both) for both in zip(first, second, strict=True))
    return a, b


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """x (batch, time, …) at these places (batch, n)."""
    index = places.view(*places.shape, *(1,) * (x.dim() - 2)).expand(*places.shape, *x.shape[2:])
    return x.gather(1, index)
