"""A static KV cache for patterns with a window: a ring of constant size in every row (nn/states/window.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.attention.decode import DilatedBranches, RelativeTables, decode_attention
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVState
from allyouneed.nn.states.window import MAX_TRIM, WindowKVCache
from allyouneed.runtime.cuda.static_cache import Prefilled, StaticStates, make_static_state, static_kv_cache


class StaticWindowKVCache(KVState):
    """Keys and values (rows, heads, slots + 1, head_width): the `first` positions, and a ring of the `recent` ones. The
    last slot takes what is not kept. Beams do not share a ring: it is copied when they are reordered."""

    def __init__(self, states: StaticStates, first: int, recent: int) -> None:
        self.states, self.first, self.recent = states, first, recent
        self.stored: tuple[Tensor, ...] = ()
        self.table = states.own_rows._replace(ring=(first, recent))

    def allocate(self, like: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        if not self.stored:
            sizes = (self.states.rows, self.first + self.recent + 1)
            self.stored = tuple(x.new_zeros(sizes[0], x.shape[1], sizes[1], x.shape[3]) for x in like)
        return self.stored

    def slots_of(self, positions: Tensor) -> Tensor:
        ring = self.first + (positions - self.first) % self.recent
        return torch.where(positions < self.first, positions, ring)

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """One token per row."""
        slots, layout = self._updated(context)
        for stored, new in zip(self.allocate((keys, values)), (keys, values), strict=True):
            stored[self.states.row_ids, :, slots] = new[:, :, 0].to(stored.dtype)
        keys, values = (stored[:, :, :-1] for stored in self.stored)
        return keys, values, layout

    def attend(
        self, q: Tensor, new: tuple[Tensor, Tensor], positions: Tensor, scale: float, rotation: Tensor | None,
        bias: Tensor | None = None, relative: RelativeTables | None = None, branches: DilatedBranches | None = None,
    ) -> Tensor:  # fmt: skip
        """`StaticKVCache.attend` of one token per row; `bias` is that of the slots."""
        keys, values = self.stored
        counters = self.states.counters
        return decode_attention(
            q, keys, values, positions, scale, self.table, new, rotation, counters, bias, relative, branches
        )

    @property
    def most(self) -> int:
        return self.first + self.recent

    def slot_layout(self, context: Context) -> TokenLayout:
        return self._updated(context)[1]

    def _updated(self, context: Context) -> tuple[Tensor, TokenLayout]:
        size = self.first, self.recent
        return context.memoize(StaticWindowKVCache, size, lambda: self._update(context.queries.positions))

    def _update(self, positions: Tensor) -> tuple[Tensor, TokenLayout]:
        """The slot of each row's new token (rows,), and the layout of all slots afterwards."""
        slots = torch.arange(self.first + self.recent, device=positions.device)[None]
        turns = (positions - slots).div(self.recent, rounding_mode="floor").clamp(min=0)
        held = torch.where(slots < self.first, slots, slots + self.recent * turns)  # (rows, slots)
        real = held <= positions
        return self.slots_of(positions[:, 0]), TokenLayout(held.where(real, 0), real.long())

    def load(self, given: Prefilled, past: State) -> None:
        assert isinstance(past, WindowKVCache)
        if past.keys is None or past.values is None or past.lengths is None:
            return
        held = past.stored_layout()
        assert held.real is not None
        newest = (held.positions < self.first) | (held.positions >= past.lengths[:, None] - self.recent)
        slots = self.slots_of(held.positions).where(held.real & newest, self.first + self.recent)  # (n, slots)
        both = (past.keys[:, :, : held.time], past.values[:, :, : held.time])
        for stored, old in zip(self.allocate(both), both, strict=True):
            for rows in given.rows.unbind(1):
                stored[rows[:, None], :, slots] = old.transpose(1, 2).to(stored.dtype)

    def select(self, rows: Tensor) -> None:
        for stored in self.stored:
            stored.copy_(stored.index_select(0, rows))

    def trim(self, length: int, each: Tensor | None = None) -> None:
        raise NotImplementedError("a static window cannot be trimmed: load it anew")

    @property
    def bytes(self) -> int:
        return sum(stored[:, :, :-1].numel() * stored.itemsize for stored in self.stored)  # without the spare slot


@make_static_state.register(WindowKVCache)
def _window(state: WindowKVCache, part: Any, states: StaticStates) -> KVState:
    """A ring, unless all positions of a row fit into it. Tokens that may be rejected overwrite none that is needed."""
    recent = max(1, state.ring - MAX_TRIM) + states.tokens - 1
    if state.first + recent < states.capacity:
        return StaticWindowKVCache(states, state.first, recent)
    return static_kv_cache(state, part, states)
