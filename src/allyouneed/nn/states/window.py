"""A KV cache of constant size for patterns with a window: the first positions and a ring of the most recent ones.

Slot p holds position p until the ring is full; then position p lies in slot first + (p − first) % ring. What a slot
holds follows from how many tokens a row has had, so nothing else is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.patterns.core import KVWindow
from allyouneed.nn.states.kv_cache import KVState, writable_cache

MAX_TRIM = 64  # tokens that can be trimmed; a pass of as many new tokens needs no copy of the ring


def window_slots(kept: KVWindow) -> int:
    """Slots of a full cache."""
    return kept.first + kept.recent + MAX_TRIM


@dataclass(frozen=True, eq=False)
class _WindowUpdate:
    """What one pass writes, for all layers with the same window."""

    slots: Tensor  # (batch, time): where each new token is written; the spare slot for those out of the window
    lengths: Tensor  # (batch,) tokens of each row afterwards
    written: Tensor  # (batch,) the most tokens a row ever had: trimmed ones are still in the ring
    layout: TokenLayout  # of the slots afterwards, or, if `copies`, of the slots before and the new tokens
    copies: bool


class WindowKVCache(KVState):
    """Keys and values (batch, heads, slots + 1, head_width); tokens that are not kept go into the spare last slot."""

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
        self.keys, self.values = self._grow(self.keys, keys), self._grow(self.values, values)
        key = (self.first, self.ring, self.keys.shape[2], len(keys))
        update = context.memoize(WindowKVCache, key, lambda: self._update(context, len(keys)))
        old = (self.keys, self.values) if update.copies else ()
        both = [torch.cat((was[:, :, :-1], new), 2) for was, new in zip(old, (keys, values), strict=False)]
        rows = torch.arange(len(keys), device=keys.device)[:, None]
        self.keys[rows, :, update.slots] = keys.transpose(1, 2)
        self.values[rows, :, update.slots] = values.transpose(1, 2)
        self.lengths, self.written = update.lengths, update.written
        if update.copies:
            return both[0], both[1], update.layout
        return self.keys[:, :, :-1], self.values[:, :, :-1], update.layout

    def stored_layout(self) -> TokenLayout:
        """The layout of its slots."""
        assert self.keys is not None and self.lengths is not None and self.written is not None
        return self._layout(self.lengths, self.written, self.keys.shape[2] - 1)

    def _grow(self, cache: Tensor | None, new: Tensor) -> Tensor:
        """A cache with room for all slots in use and the spare one."""
        batch, heads, _, head_width = new.shape
        slots = 0 if cache is None else cache.shape[2] - 1
        if cache is not None and self.end <= slots:
            return writable_cache(cache, new)
        grown = new.new_zeros(batch, heads, min(self.first + self.ring, max(self.end, 2 * slots, 16)) + 1, head_width)
        if cache is not None:
            grown[:, :, :slots] = cache[:, :, :slots]
        return grown

    def _update(self, context: Context, batch: int) -> _WindowUpdate:
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
        copies = new.time > MAX_TRIM + 1  # otherwise the ring still holds all that the first new token may see
        layout = self._layout(*(before if copies else after), room)
        if copies:
            real = torch.ones_like(positions) if new.segments is None else new.segments
            assert layout.segments is not None
            layout = TokenLayout(torch.cat((layout.positions, positions), 1), torch.cat((layout.segments, real), 1))
        attributes = {name: getattr(slots, name) for name in ("prompt", "chosen", "order", "types")}
        marks = {name: marks.gather(1, layout.positions) for name, marks in attributes.items() if marks is not None}
        return _WindowUpdate(torch.where(lost, room, slot), *after, replace(layout, **marks), copies)

    def _layout(self, lengths: Tensor, written: Tensor, room: int) -> TokenLayout:
        """What each slot holds: the last position written there, unless it was trimmed."""
        slot = torch.arange(room, device=lengths.device)[None]
        turns = (written[:, None] - 1 - slot).div(self.ring, rounding_mode="floor").clamp(min=0)
        position = torch.where(slot < self.first, slot, slot + self.ring * turns)
        real = position < lengths[:, None]
        return TokenLayout(torch.where(real, position, 0), real.long())

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.lengths is None or self.written is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        lost = (self.written - kept > MAX_TRIM) & (self.written > self.first + self.ring)
        if bool(lost.any()):
            raise ValueError(f"a windowed KV cache can trim at most {MAX_TRIM} tokens")
        self.lengths = kept
        self.end = min(self.end, length)

    @property
    def bytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        used = [cache[:, :, : self.end].numel() * cache.itemsize for cache in (self.keys, self.values)]
        return sum(used)
