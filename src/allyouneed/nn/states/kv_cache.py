"""KV caches: one that grows with the text, and one of a source."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

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

    # On a CPU, rows are allocated ahead and buffers reused once requests join: copying all rows into new memory in
    # every step would take as long as the model. Only a cache that is not shared has either.
    spare = 0  # rows allocated behind those in use
    scratch: Tensor | None = None  # memory for the next `select`

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
        if cache is None or end > capacity:  # grow by doubling: amortised, a token is copied once
            grown = new.new_zeros(batch, heads, max(end, 2 * capacity, 16), head_width)
            if cache is not None:
                grown[:, :, :capacity] = cache
            cache = grown
            self.drop_spare()
        assert cache is not None
        cache = writable_cache(cache, new)
        if layout.start is not None:
            cache[:, :, layout.start : layout.start + time] = new
        else:
            rows = torch.arange(batch, device=new.device)[:, None]
            cache[rows, :, layout.positions] = new.transpose(1, 2)
        return cache

    def select(self, rows: Tensor) -> None:
        if self.keys is None or self.values is None:
            return
        if len(rows) > len(self.keys) + self.spare or not self.spare:
            self.drop_spare()
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
            return
        allocated = len(self.keys) + self.spare
        keys, values = with_rows(self.keys, allocated), with_rows(self.values, allocated)
        free = torch.empty_like(keys) if self.scratch is None else self.scratch
        self.keys = torch.index_select(self.keys, 0, rows, out=free[: len(rows)])
        self.values = torch.index_select(self.values, 0, rows, out=keys[: len(rows)])
        self.spare, self.scratch = allocated - len(rows), values

    def join(self, other: Self) -> None:
        if self.keys is None or self.values is None or other.keys is None or other.values is None or not self._reuses:
            self.drop_spare()
            other.drop_spare()
            return super().join(other)
        self.end = max(self.end, other.end)
        before, new = len(self.keys), len(other.keys)
        if new > self.spare or self.end > self.keys.shape[2]:
            allocated, capacity = max(before + new, 2 * before), max(self.end, self.keys.shape[2])
            self.keys, self.values = grow(self.keys, allocated, capacity), grow(self.values, allocated, capacity)
            self.spare, self.scratch = allocated - before, None
        self.spare -= new
        self.keys = append_rows(self.keys, other.keys[:, :, : other.end])
        self.values = append_rows(self.values, other.values[:, :, : other.end])

    def copy(self) -> Self:
        self.drop_spare()  # the copy shares it
        return super().copy()

    @property
    def _reuses(self) -> bool:
        """Whether memory is reused: on a CPU, where keys and values can take each other's; subclasses keep more than
        these."""
        if self.keys is None or self.values is None or type(self) not in (KVCache, CrossKVCache):
            return False
        same = self.keys.shape == self.values.shape and self.keys.dtype == self.values.dtype
        return same and self.keys.device.type == "cpu"

    def drop_spare(self) -> None:
        for name in ("spare", "scratch"):
            vars(self).pop(name, None)

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


def grow(cache: Tensor, rows: int, capacity: int) -> Tensor:
    """A copy of a cache (batch, heads, time, head_width) with `rows` rows allocated and this capacity."""
    batch, heads, time, head_width = cache.shape
    found = cache.new_empty(rows, heads, capacity, head_width)[:batch]
    found[:, :, :time] = cache
    found[:, :, time:] = 0
    return found


def with_rows(cache: Tensor, rows: int) -> Tensor:
    """The first `rows` allocated rows of a cache."""
    return cache.as_strided((rows, *cache.shape[1:]), cache.stride(), cache.storage_offset())


def append_rows(cache: Tensor, new: Tensor) -> Tensor:
    """The cache with new rows (batch, heads, time, head_width) in its spare ones."""
    batch, time = len(cache), new.shape[2]
    found = with_rows(cache, batch + len(new))
    found[batch:, :, :time] = new
    found[batch:, :, time:] = 0  # what was here may not be finite
    return found
