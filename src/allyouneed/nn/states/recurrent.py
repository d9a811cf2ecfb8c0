"""What a recurrence remembers while decoding: as much after a million tokens as after one.

A carry cannot be run backwards, so tokens are taken back by running it forwards again: from a snapshot, the carry at
some earlier place of each row, over the raw inputs since then. There are never more of those than `TAIL`; when they
would be more, all but the last `MAX_TRIM` of them are folded into the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.states.base import State
from allyouneed.nn.states.window import MAX_TRIM

TAIL = 2 * MAX_TRIM  # inputs kept: those that can be taken back, and room for as many, so that folding is rare

Carry = tuple[Tensor, ...]
# (batch, an input: its dtype and device) -> the carry of rows that have seen nothing; all its tensors batch first
Begin = Callable[[int, Tensor], Carry]
# (carry, inputs (batch, time, features), real (batch, time) bool or None) -> the carry after those that are real
Fold = Callable[[Carry, Tensor, Tensor | None], Carry]


def recurrent_cost(carry: int, features: int) -> Cost:
    """Of remembering a carry of so many elements whose inputs have so many features."""
    return Cost(state_constant=2 * carry + TAIL * features)


class Recurrent(State):
    """A mixer asks for the `carry`, computes what its new tokens give, and hands both back with `keep`."""

    def __init__(self, begin: Begin, fold: Fold) -> None:
        self.begin, self.fold = begin, fold
        self.now: Carry | None = None
        self.snapshot: Carry = ()
        # the one place too many takes what is padding
        self.tail: Tensor | None = None  # (batch, TAIL + 1, features): inputs since the snapshot, then anything
        self.since: Tensor | None = None  # (batch,) tokens in the snapshot
        self.lengths: Tensor | None = None  # (batch,) tokens in the carry
        self.most = 0  # no row has more inputs in its tail; known without asking the device

    def carry(self, batch: int, like: Tensor) -> Carry:
        """What has been seen so far, not to be changed in place; `like` tells dtype and device of new rows."""
        if self.now is None:
            self.now = self.snapshot = self.begin(batch, like)
        return self.now

    def keep(self, inputs: Tensor, carry: Carry, context: Context) -> None:
        """Take in these inputs (batch, time, features), of which `carry` already knows those that are no padding."""
        (batch, time, features), real = inputs.shape, context.queries.real
        self.carry(batch, inputs)
        if self.tail is None or self.since is None or self.lengths is None:
            self.tail = inputs.new_zeros(batch, TAIL + 1, features)
            self.since = self.lengths = torch.zeros(batch, dtype=torch.long, device=inputs.device)
        room = TAIL if self.most + time <= TAIL else TAIL + time
        joint = self.tail if room == TAIL else nn.functional.pad(self.tail, (0, 0, 0, time))
        places = (self.lengths - self.since)[:, None] + torch.arange(time, device=inputs.device)  # (batch, time)
        places = places if real is None else places.where(real, room)
        joint[torch.arange(batch, device=inputs.device)[:, None], places] = inputs
        self.now, self.most = carry, self.most + time
        self.lengths = self.lengths + (time if real is None else real.sum(1))
        if room == TAIL:
            return
        old = (self.lengths - MAX_TRIM - self.since).clamp(min=0)[:, None]  # inputs that can no longer be taken back
        self.snapshot = self.fold(self.snapshot, joint, torch.arange(room + 1, device=old.device) < old)
        left = (old + torch.arange(TAIL + 1, device=old.device)).clamp(max=room)  # (batch, TAIL + 1)
        self.tail = joint.gather(1, left[..., None].expand(-1, -1, features))
        self.since, self.most = self.since + old[:, 0], MAX_TRIM

    def select(self, rows: Tensor) -> None:
        if self.now is None:
            return
        self.now, self.snapshot = _selected(self.now, rows), _selected(self.snapshot, rows)
        if self.tail is not None and self.since is not None and self.lengths is not None:
            self.tail, self.since, self.lengths = _selected((self.tail, self.since, self.lengths), rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.tail is None or self.since is None or self.lengths is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        gone = (kept < self.since) | ((self.lengths - kept > MAX_TRIM) & (self.since > 0))
        if bool(gone.any()):
            raise ValueError(f"a recurrent state can trim at most {MAX_TRIM} tokens")
        again = max(1, int((kept - self.since).max()))
        inside = torch.arange(again, device=kept.device) < (kept - self.since)[:, None]
        self.now, self.lengths = self.fold(self.snapshot, self.tail[:, :again], inside), kept

    @property
    def bytes(self) -> int:
        if self.now is None or self.tail is None:
            return 0
        return sum(tensor.numel() * tensor.itemsize for tensor in (*self.now, *self.snapshot, self.tail[:, :TAIL]))


def _selected(tensors: Carry, rows: Tensor) -> Carry:
    return tuple(tensor.index_select(0, rows) for tensor in tensors)
