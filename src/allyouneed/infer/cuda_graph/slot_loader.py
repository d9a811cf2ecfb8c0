"""Copies prompts from the blocks of a pool (paged_prefill.py) into the slots of a graph runner, as captured CUDA
graphs: one launch instead of one for each layer and tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.device_search import DeviceSearch
from allyouneed.infer.cuda_graph.prefill import InputGraph, capture_warm, captures_on, fill_rows
from allyouneed.infer.decoding.base import RequestState
from allyouneed.nn.batch import to_device
from allyouneed.nn.ops.attention.decode import BlockTable
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import BlockPool, PagedStates
from allyouneed.runtime.cuda.static_cache import StaticStates

KEPT = 16  # sizes whose graphs are kept
FEW = 8  # rows
MIN_END = 128  # positions
FIRST = 5  # columns before the block table: slot, limit, last token, tokens before it, those to copy


class CopySize(NamedTuple):
    """Rows, and positions of each."""

    rows: int
    end: int


class SlotLoader:
    def __init__(self, states: StaticStates, search: DeviceSearch, pool: BlockPool) -> None:
        self.states, self.search, self.pool = states, search, pool
        self.captures = captures_on(states.device)
        self.graphs: OrderedDict[CopySize, InputGraph] = OrderedDict()
        self.memory: Any = None  # of all graphs: none of it is needed after a copy

    @staticmethod
    def suits(states: States) -> bool:
        return isinstance(states, PagedStates) and states.fully_paged and not states.has_sources

    def load(
        self, paged: PagedStates, rows: Sequence[int], requests: Sequence[RequestState], slots: Sequence[int]
    ) -> None:
        """Copy the prompts of these rows, but for their last tokens, into the slots, and reset these."""
        size = self.size(len(requests), max(len(state.request.prompt) for state in requests))
        inputs = torch.from_numpy(pack(size, [paged.block_tables[row] for row in rows], requests, slots, self.pool))
        if size not in self.graphs and self.captures:
            try:
                self.graphs[size] = self.capture(inputs.to(self.states.device), size)
            except RuntimeError:  # no memory, for example
                self.captures = False
            while len(self.graphs) > KEPT:
                self.graphs.popitem(last=False)
        if size not in self.graphs:
            self.copy(to_device(inputs, self.states.device), size)
            return
        self.graphs.move_to_end(size)
        self.graphs[size].run(inputs)

    def size(self, rows: int, longest: int) -> CopySize:
        """Few sizes serve all: a few rows or as many as there are slots, and powers of four."""
        few, end = min(FEW, self.states.slot_count), MIN_END
        while end < longest:
            end *= 4
        return CopySize(few if rows <= few else self.states.slot_count, min(end, self.states.capacity))

    def copy(self, inputs: Tensor, size: CopySize) -> None:
        """`inputs` (rows, FIRST + blocks): see `pack`. Does not synchronize with the host."""
        slots, limits, last, counts, copied = inputs[:, :FIRST].unbind(1)
        table, storage = BlockTable(inputs[:, FIRST:].contiguous(), self.pool.size), self.pool.storage
        past = [storage[number] if layer else () for number, layer in enumerate(self.states.layers)]
        self.states.load_blocks(slots, past, table, counts, copied.contiguous())
        self.search.reset_slots(slots, limits, last)

    def capture(self, inputs: Tensor, size: CopySize) -> InputGraph:
        """Capture a copy that is to be made anyway, so that the warm-up changes nothing else."""
        with torch.cuda.device_of(inputs):
            if self.memory is None:
                self.memory = torch.cuda.graph_pool_handle()
            return InputGraph(inputs, capture_warm(lambda: self.copy(inputs, size), 1, self.memory).replay)


def pack(
    size: CopySize,
    tables: Sequence[Sequence[int]],
    requests: Sequence[RequestState],
    slots: Sequence[int],
    pool: BlockPool,
) -> NDArray[np.int64]:
    """The inputs of a copy (rows, FIRST + blocks); spare rows repeat the first one, with nothing to copy."""
    blocks = -(-size.end // pool.size)
    found = np.zeros((size.rows, FIRST + blocks), dtype=np.int64)
    rows, prompts = found[: len(requests)], [state.request.prompt for state in requests]
    limits, last = [state.limit for state in requests], [prompt[-1] for prompt in prompts]
    counts = [len(prompt) - 1 for prompt in prompts]
    rows[:, :FIRST] = np.array([slots, limits, last, counts, counts]).T
    fill_rows(rows[:, FIRST:], [table[:blocks] for table in tables])
    found[len(requests) :] = found[0]
    found[len(requests) :, FIRST - 1] = 0
    return found
