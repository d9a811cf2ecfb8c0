"""KV caches that grow with the text, and those of a source."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.states.base import State


def writable_cache(cache: Tensor, new: Tensor) -> Tensor:
    """A cache that may be written into: a copy where gradients still need what it was."""
    needed = torch.is_grad_enabled() and (cache.requires_grad or new.requires_grad)
    return cache.clone() if needed else cache


class KVState(State):
    """Keys and values of tokens seen."""

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """Take in new keys and values (batch, heads, time, head_width); all that may be looked at, and its places."""

    def attend_new_token(
        self, q: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float
    ) -> Tensor | None:
        """Take in one new token a row, and let it look at all there is, by softmax(q·k · scale): (batch, heads, 1,
        head_width). None, and nothing taken in: there is no quicker way here than `append`, and then to look."""
        return None


class KVCache(KVState):
    """A cache that grows with the sentence: keys and values (batch, heads, capacity, head_width)."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.end = 0  # slots in use in the longest row

    def append(self, keys: Tensor, values: Tensor, context: Context) -> tuple[Tensor, Tensor, TokenLayout]:
        """Store new keys and values at their positions; return all there are, and where they stand."""
        slots = context.slots
        assert slots is not None
        self.end = slots.time
        self.keys = self._stored(self.keys, keys, context.queries)
        self.values = self._stored(self.values, values, context.queries)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end], slots

    def _stored(self, cache: Tensor | None, new: Tensor, layout: TokenLayout) -> Tensor:
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
    """Keys and values of a source sentence: computed once, shared by all beams, never reordered among them."""

    shared = True

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass  # the source sentence stays what it is
