"""The memory of Infini-attention, as the interpreter reads it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.mixers.attention.infini import CompressiveMemory
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.cpu.bindings import bind_state, unchanged


@bind_state.register(CompressiveMemory)
class CompressiveBinding:
    """Keys and values of a `CompressiveMemory`, and two things that follow from them: the memory of all segments before
    a row's current one, and that segment's keys and values, with positions, by their position in it. A pass appends to
    the keys; a segment is added to the memory when it is complete, between two passes."""

    def __init__(self, state: CompressiveMemory, features: int, memory: Any) -> None:
        self.state, self.memory = state, memory
        self.known: tuple[Any, ...] = ()
        self.counts: list[int] = []  # cached tokens of each row, `passes` passes ago
        self.passes = self.left = 0  # since then, and until a segment is complete or a cache full

    def prepare(self, rows: int, like: Tensor) -> bool:
        if self.state.lengths is not None and len(self.state.lengths) != rows:
            return False
        if not unchanged(self.known, self.tensors()):
            self.bind(rows)
        elif not self.left:
            self.counts = [count + self.passes for count in self.counts]
            complete = [row for row, count in enumerate(self.counts) if count % self.state.module.segment == 0]
            self.add_segments(self.before, complete, [self.counts[row] for row in complete])
            self.make_room()
        return True

    def tensors(self) -> tuple[Any, ...]:
        state = self.state
        return state.memory, state.keys, state.values, state.lengths, state.since

    def bind(self, rows: int) -> None:
        state, module = self.state, self.state.module
        heads, width, segment = module.heads, module.head_width, module.segment
        if state.memory is None or state.lengths is None or state.since is None:
            state.memory = module.initial_memory(torch.empty(rows, heads, 0, width))
            state.keys, state.values = torch.zeros(2, rows, heads, state.kept + 1, width)
            state.lengths = state.since = torch.zeros(rows, dtype=torch.long)
        assert state.keys is not None and state.values is not None
        state.memory, state.lengths, state.since = state.memory.clone(), state.lengths.clone(), state.since.clone()
        state.keys, state.values = (
            cache.detach().to(torch.float32, copy=True).contiguous() for cache in (state.keys, state.values)
        )
        self.counts = (state.lengths - state.since).tolist()
        self.before = state.memory.clone()
        for end in range(segment, max(self.counts) + 1, segment):
            complete = [row for row, count in enumerate(self.counts) if count >= end]
            self.add_segments(self.before, complete, [end] * len(complete))
        starts = torch.tensor([count // segment * segment for count in self.counts])
        slots = (starts[:, None] + torch.arange(segment)).clamp(max=state.kept)  # (rows, segment)
        slots = slots[:, None, :, None].expand(-1, heads, -1, width)
        self.segment = [cache.gather(2, slots) for cache in (state.keys, state.values)]
        if isinstance(module.rotary, RotaryModule):
            tables = module.rotary.tables(torch.arange(segment)[None], torch.float32)
            self.segment[0] = module.rotary.rotate(self.segment[0], tables[1]).contiguous()
        self.make_room()
        parts = [self.before, *self.segment, state.keys, state.values]
        self.held = (
            (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)),
            (ctypes.c_int32 * len(parts))(*(part[0].numel() for part in parts)),
        )
        self.memory.carry, self.memory.sizes = (ctypes.addressof(array) for array in self.held)
        self.memory.lengths, self.memory.since = state.lengths.data_ptr(), state.since.data_ptr()
        self.known = self.tensors()

    def add_segments(self, memory: Tensor, rows: list[int], ends: list[int]) -> None:
        """Update the memory of these rows by the segments that end before these slots."""
        state, size = self.state, self.state.module.segment
        assert state.keys is not None and state.values is not None
        for row, end in zip(rows, ends, strict=True):
            one, slots = slice(row, row + 1), slice(end - size, end)
            keys, values = state.keys[one, :, slots], state.values[one, :, slots]
            memory[one] = state.module.update_memory(memory[one], keys, values, None)

    def make_room(self) -> None:
        """Move a segment of each full cache into the memory; then count the passes until the next change."""
        state, size = self.state, self.state.module.segment
        assert state.memory is not None and state.since is not None
        full = [row for row, count in enumerate(self.counts) if count == state.kept]
        self.add_segments(state.memory, full, [size] * len(full))
        for row in full:
            for cache in (state.keys, state.values):
                assert cache is not None
                cache[row, :, : state.kept - size] = cache[row, :, size : state.kept].clone()
            state.since[row] += size
            self.counts[row] -= size
        self.passes, self.left = 0, min(min(size - count % size, state.kept - count) for count in self.counts)

    def finish(self, end: int) -> None:
        self.state.end = min(end, self.state.kept)
        self.passes, self.left = self.passes + 1, self.left - 1
