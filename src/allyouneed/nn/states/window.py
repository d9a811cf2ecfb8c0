"""A cache of constant size for patterns that forget: the first places and a ring of the most recent ones.

Slot p holds position p as long as there is room; then the ring turns, and position p lies in slot
first + (p − first) % ring. What a slot holds follows from how many tokens a row has had, so nothing else is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.patterns.core import KVWindow
from allyouneed.nn.states.kv_cache import KVState, writable_cache

MAX_TRIM = 64  # tokens that can be taken back; a pass of as many new tokens needs no copy of the ring


def window_slots(kept: KVWindow) -> int:
    """Slots a ring comes to hold."""
    return kept.first + kept.recent + MAX_TRIM


@dataclass(frozen=True, eq=False)
class _Turn:
    """What one pass does to the rings of all layers that are alike."""

    into: Tensor  # (batch, time): the slot of each new token, the last one for those that nobody will ask for
    lengths: Tensor  # (batch,) tokens of each row after it
    written: Tensor  # (batch,) the greatest number of tokens a row ever had: what was written there is overwritten
    places: TokenLayout  # of the slots after it, or of the slots before it and the new tokens, see `copies`
    copies: bool


class WindowKVCache(KVState):
    """Keys and values (batch, heads, slots + 1, head_width); into the one slot too many goes what is not to be kept."""

    def __init__(self, kept: KVWindow) -> None:
        self.first, self.ring = kept.first, kept.recent + MAX_TRIM
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.lengths: Tensor | None = None
        self.written: Tensor | None = None
        self.end = 0  # slots in use in the longest row

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        assert context.slots is not None
        self.end = min(context.slots.time, self.first + self.ring)
        self.keys, self.values = self._roomy(self.keys, keys), self._roomy(self.values, values)
        key = ("ring", self.first, self.ring, self.keys.shape[2], len(keys))
        turn = context.memoize(key, lambda: self._turn(context, len(keys)))
        old = (self.keys, self.values) if turn.copies else ()
        both = [torch.cat((was[:, :, :-1], new), 2) for was, new in zip(old, (keys, values), strict=False)]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        self.keys[rows, :, turn.into] = keys.transpose(1, 2)
        self.values[rows, :, turn.into] = values.transpose(1, 2)
        self.lengths, self.written = turn.lengths, turn.written
        if turn.copies:
            return both[0], both[1], turn.places
        return self.keys[:, :, :-1], self.values[:, :, :-1], turn.places

    def held(self) -> TokenLayout:
        """The places of what its slots hold."""
        assert self.keys is not None and self.lengths is not None and self.written is not None
        return self._places(self.lengths, self.written, self.keys.shape[2] - 1)

    def _roomy(self, cache: Tensor | None, new: Tensor) -> Tensor:
        """Room for all slots in use, and the one too many."""
        batch, heads, _, head_width = new.shape
        slots = 0 if cache is None else cache.shape[2] - 1
        if cache is not None and self.end <= slots:
            return writable_cache(cache, new)
        grown = new.new_zeros(batch, heads, min(self.first + self.ring, max(self.end, 2 * slots, 16)) + 1, head_width)
        if cache is not None:
            grown[:, :, :slots] = cache[:, :, :slots]
        return grown

    def _turn(self, context: Context, batch: int) -> _Turn:
        new, slots = context.queries, context.slots
        assert self.keys is not None and slots is not None
        positions = new.positions.expand(batch, -1)
        count = new.time if new.segments is None else new.segments.sum(1)
        lengths = positions[:, 0] + count
        before = positions[:, 0], torch.zeros_like(lengths) if self.written is None else self.written
        after = lengths, lengths.maximum(before[1])
        room = self.keys.shape[2] - 1
        slot = torch.where(positions < self.first, positions, self.first + (positions - self.first) % self.ring)
        lost = (positions >= self.first) & (positions < lengths[:, None] - self.ring)
        lost = lost if new.real is None else lost | ~new.real
        copies = new.time > MAX_TRIM + 1  # else the ring still holds all that the first of the new tokens may see
        places = self._places(*(before if copies else after), room)
        if copies:
            real = torch.ones_like(positions) if new.segments is None else new.segments
            assert places.segments is not None
            places = TokenLayout(torch.cat((places.positions, positions), 1), torch.cat((places.segments, real), 1))
        said = {name: getattr(slots, name) for name in ("prompt", "chosen", "order", "types")}
        marks = {name: marks.gather(1, places.positions) for name, marks in said.items() if marks is not None}
        return _Turn(torch.where(lost, room, slot), *after, replace(places, **marks), copies)

    def _places(self, lengths: Tensor, written: Tensor, room: int) -> TokenLayout:
        """What the slots hold: of all positions that were ever written there the last, if it is still there."""
        slot = torch.arange(room, device=lengths.device)[None]
        turns = (written[:, None] - 1 - slot).div(self.ring, rounding_mode="floor").clamp(min=0)
        position = torch.where(slot < self.first, slot, slot + self.ring * turns)
        there = position < lengths[:, None]
        return TokenLayout(torch.where(there, position, 0), there.long())

    def select(self, rows: Tensor) -> None:
        if self.keys is None or self.values is None or self.lengths is None or self.written is None:
            return
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        self.lengths, self.written = self.lengths.index_select(0, rows), self.written.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.lengths is None or self.written is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        gone = (self.written - kept > MAX_TRIM) & (self.written > self.first + self.ring)
        if bool(gone.any()):
            raise ValueError(f"a windowed KV cache can trim at most {MAX_TRIM} tokens")
        self.lengths = kept
        self.end = min(self.end, length)

    @property
    def bytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        used = [cache[:, :, : self.end].numel() * cache.itemsize for cache in (self.keys, self.values)]
        return sum(used)
