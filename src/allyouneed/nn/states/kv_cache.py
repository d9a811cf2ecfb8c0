"""KV caches: one that grows with the text, and one of a source."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.states.base import State


class KVState(State):
    """Keys and values of the tokens seen so far."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """Store new keys and values (batch, heads, time, head_width); return all that may be attended to, and their
        layout."""

    def attend_new_token(
        self, q: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float
    ) -> Tensor | None:
        """Store one new token per row and attend to all tokens by softmax(q·k · scale): (batch, heads, 1, head_width).
        None, with nothing stored, where `append` and plain attention are as fast."""
        return None


class KVCache(KVState):
    """A cache that grows with the text: keys and values (batch, heads, capacity, head_width)."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.end = 0  # slots in use in the longest row

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        slots = context.slots
        assert slots is not None
        self.end = slots.time
        self.keys = self._store(self.keys, keys, context.queries)
        self.values = self._store(self.values, values, context.queries)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end], slots

    def _store(self, cache: Tensor | None, new: Tensor, layout: TokenLayout) -> Tensor:
        batch, heads, time, head_width = new.shape
        end = self.end
        capacity = 0 if cache is None else cache.shape[2]
        if end > capacity:  # grow by doubling: amortised, a token is copied once
            grown = new.new_zeros(batch, heads, max(end, 2 * capacity, 16), head_width)
            if cache is not None:
                grown[:, :, :capacity] = cache
            cache = grown
        assert cache is not None
        cache = writable_cache(cache, new)
        if layout.start is not None:
            cache[:, :, layout.start : layout.start + time] = new
        else:
            rows = torch.arange(batch, device=new.device)[:, None]
            cache[rows, :, layout.positions] = new.transpose(1, 2)
        return cache

    def select(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        self.end = min(self.end, length)

    @property
    def bytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return (self.keys[:, :, : self.end].numel() + self.values[:, :, : self.end].numel()) * self.keys.itemsize


class CrossKVCache(KVCache):
    """Keys and values of a source, for cross-attention: computed once, shared by all beams, never reordered among
    them."""

    shared = True

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # the source does not change


def writable_cache(cache: Tensor, new: Tensor) -> Tensor:
    """A cache to write into: a copy where gradients still need the old values."""
    needed = torch.is_grad_enabled() and (cache.requires_grad or new.requires_grad)
    return cache.clone() if needed else cache
