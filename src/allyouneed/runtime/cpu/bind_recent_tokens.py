"""The tokens before a convolution, as the interpreter reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.mixers.convolution import RecentTokens
from allyouneed.runtime.cpu.bindings import AHEAD, bind_state, unchanged


@bind_state.register(RecentTokens)
class RecentBinding:
    """The tokens of `RecentTokens`, in a buffer in which they advance by one in every pass."""

    def __init__(self, state: RecentTokens, features: int, memory: Any) -> None:
        self.state, self.features, self.memory = state, features, memory
        self.known: tuple[Any, ...] = ()
        self.buffer = torch.empty(0)
        self.offset = 0

    def prepare(self, rows: int, like: Tensor) -> bool:
        state = self.state
        if state.tokens is not None and len(state.tokens) != rows:
            return False
        if self.offset == AHEAD or not unchanged(self.known, self.tensors()):
            self.bind(rows)
        self.memory.inputs = self.buffer.data_ptr() + (self.offset + state.size) * self.features * 4
        return True

    def tensors(self) -> tuple[Any, ...]:
        return self.state.tokens, self.state.lengths, self.state.oldest

    def bind(self, rows: int) -> None:
        state = self.state
        self.buffer, self.offset = torch.zeros(rows, state.size + AHEAD, self.features), 0
        if state.tokens is not None:
            self.buffer[:, : state.size] = state.tokens
        state.tokens = self.buffer[:, : state.size]
        zeros = torch.zeros(rows, dtype=torch.long)
        state.lengths = (zeros if state.lengths is None else state.lengths).clone()
        state.oldest = (zeros if state.oldest is None else state.oldest).clone()
        self.memory.row = self.buffer.stride(0)
        self.memory.lengths, self.memory.since = state.lengths.data_ptr(), state.oldest.data_ptr()
        self.known = self.tensors()

    def finish(self, end: int) -> None:
        state = self.state
        self.offset += 1
        state.tokens, state.end = self.buffer.narrow(1, self.offset, state.size), min(end, state.size)
        self.known = (state.tokens, *self.known[1:])
