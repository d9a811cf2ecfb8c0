"""Sentences of packed rows cut into pieces of equal size, in shapes that depend on the rows only.

Mixers that cut a sentence into segments or chunks count them from its first token, which may lie anywhere in a packed
row. Within pieces, tokens attend to each other as if each piece were a sentence (`layout`). What later pieces read is a
memory of the complete pieces before them: a row of `time` tokens has at most (time − 1) // size complete pieces with a
token behind them, and only the next `size` tokens read the memory after each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allyouneed.nn.context import TokenLayout


@dataclass(frozen=True, eq=False)
class Pieces:
    """`pieces` is (time − 1) // size; missing ones are not real."""

    layout: TokenLayout  # packed rows whose sentences are the pieces, the incomplete ones included
    tokens: Tensor  # (batch, pieces, size): tokens of each complete piece
    real: Tensor  # (batch, pieces, 1) bool: it exists
    goes_on: Tensor  # (batch, pieces) bool: it is not the first piece of its sentence
    readers: Tensor  # (batch, pieces, size): tokens of the next piece of the sentence; `time`: there is none

    @classmethod
    def of(cls, starts: Tensor, size: int, layout: TokenLayout) -> Pieces:
        """`starts` (batch, time): index at which the sentence of each token begins (ops/unpack.py)."""
        assert layout.segments is not None
        (batch, time), device = starts.shape, starts.device
        starts, at, count = starts.long(), torch.arange(time, device=device), (time - 1) // size
        local = (at - starts) % size  # position in the piece
        numbers = (at - local + 1) * (layout.segments > 0)
        ends = local == size - 1
        slots = torch.where(ends, (ends.cumsum(1) - 1).clamp(max=count), count)
        begins = starts.new_full((batch, count + 1), time).scatter(1, slots, (at - size + 1).where(ends, time))
        begins = begins[:, :count, None]  # (batch, pieces, 1)
        real, tokens = begins < time, begins + torch.arange(size, device=device)
        readers, tokens = tokens + size, tokens.clamp(max=time - 1)
        sentence = starts.gather(1, tokens[..., 0])[..., None]
        of_readers = starts.gather(1, readers.clamp(max=time - 1).flatten(1)).view_as(readers)
        read = real & (readers < time) & (of_readers == sentence)
        pieces = TokenLayout(local, numbers, packed=True)
        return cls(pieces, tokens, real, (real & (begins > sentence))[..., 0], readers.where(read, time))

    def sums(self, each: Tensor) -> Tensor:
        """each (batch, heads, pieces, …) summed over the pieces of a sentence up to each of them."""
        sentence = (~self.goes_on).cumsum(1)
        past = (sentence[:, :, None] == sentence[:, None]).tril()  # (batch, pieces, pieces)
        return (past[:, None].to(each.dtype) @ each.flatten(3)).view_as(each)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """x (batch, heads, time, width) at `tokens` or `readers`: (batch, heads, pieces, size, width)."""
        there = index.clamp(max=x.shape[2] - 1).flatten(1)[:, None, :, None]
        return x.gather(2, there.expand(-1, x.shape[1], -1, x.shape[3])).unflatten(2, index.shape[1:])

    def scatter(self, y: Tensor, time: int) -> Tensor:
        """y (batch, heads, pieces · size, width) of the `readers`, as rows of `time` tokens; 0 for those that read
        nothing."""
        batch, heads, _, width = y.shape
        index = self.readers.flatten(1)[:, None, :, None].expand(-1, heads, -1, width)
        rows = y.new_zeros(batch, heads, time + 1, width)  # one more slot receives what is not read
        return rows.scatter(2, index, y)[:, :, :time]
