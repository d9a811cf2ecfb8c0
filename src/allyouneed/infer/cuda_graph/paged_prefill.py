"""Prefill into the blocks of a pool, as captured CUDA graphs.

A scheduler reads prompts into blocks, so that later ones can share them (infer/prefix_cache.py). A GPU finishes a short
prefill before the host has launched its kernels, so passes of a few sizes are captured and replayed: `warm_up` captures
the usual ones, others follow when they recur. A batch of prompts is read in passes of similar lengths, each rounded up
to the cheapest captured size (`plan`). Padding is stored in block 0, which no row reads.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.prefill import InputGraph, capture_warm, fill_rows
from allyouneed.infer.cuda_graph.shape import next_power, weight_addresses
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.prefill import start
from allyouneed.nn.batch import Rows, to_device
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import last_positions
from allyouneed.nn.models.decoder_decoder import DecoderDecoderModel
from allyouneed.nn.states.paged import BlockPool, PagedStates
from allyouneed.runtime.cuda.capture import can_capture_prefill
from allyouneed.runtime.cuda.kernels import move_constants

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # new tokens of a row in a pass
LONGEST = 2048  # tokens of a row in one call: longer ones keep a GPU busy without a graph
TOKENS = 8192  # of all rows of a pass
SCORES = 1 << 21  # of all rows and one head: new tokens times the positions they attend to
FLOOR = 512  # tokens that take as long as fewer, since the weights have to be read in any case
MIN_END = 128  # positions attended to, where a row has read tokens before
KEPT = 64  # sizes whose graphs are kept
REUSED = 32  # uses after which a size gets a graph of its own, where a larger one serves it meanwhile
WARM_LENGTHS = (32, 128, 512)  # captured at the start: new tokens of prompts without a cached prefix
WARM_SUFFIXES = ((16, 256), (128, 512))  # and new tokens and positions of those with one


class PassSize(NamedTuple):
    """Rows of a pass, new tokens of each, and positions they attend to; `end` equals `tokens` if no row has read any
    before."""

    rows: int
    tokens: int
    end: int

    @property
    def cost(self) -> int:
        """The cost in tokens; gathering and attending to past keys and values costs less than reading tokens."""
        return max(FLOOR, self.rows * self.tokens) + (self.rows * self.end // 16 if self.end > self.tokens else 0)

    def holds(self, other: PassSize) -> bool:
        """Whether a pass of the other size can run as one of this size."""
        if self.end == self.tokens and other.end > other.tokens:
            return False
        return self.rows >= other.rows and self.tokens >= other.tokens and self.end >= other.end


class Graph(NamedTuple):
    """The graph of a pass; `output`: hidden states (rows, width) of the last tokens."""

    size: PassSize
    captured: InputGraph
    output: Tensor


class PrefillChunk(NamedTuple):
    """The next tokens of a row: its index in the batch, and how many tokens it has read before."""

    row: int
    seen: int
    tokens: Sequence[int]


class PagedPrefill:
    """Prefill with the blocks of one pool. `rows`: the most rows of a batch."""

    def __init__(self, runner: ModelRunner, pool: BlockPool, rows: int) -> None:
        self.runner, self.pool, self.rows = runner, pool, rows
        self.fits: bool | None = None  # whether the model's prefill can be captured; None: not known yet
        self.weights = 0  # addresses that the graphs have captured
        self.seen: Counter[PassSize] = Counter()
        self.graphs: OrderedDict[PassSize, Graph] = OrderedDict()
        self.memory: Any = None  # of all graphs: none of it is needed after a pass, but for its output

    @property
    def enabled(self) -> bool:
        """Whether replaying is faster than launching."""
        return self.runner.device.type == "cuda"

    def read(self, states: PagedStates, chunks: Sequence[Sequence[int]]) -> Tensor | None:
        """Read the next tokens of each row; hidden states of the last ones (rows, width). None, with nothing read: this
        batch needs the plain prefill. Raises `PoolFullError` before anything is read."""
        longest = max(map(len, chunks))
        if not self.enabled or longest > LONGEST or states.marks or not states.fully_paged or not self.can_capture():
            return None
        limit = self.runner.model.embed.limit
        whole = [
            PrefillChunk(row, seen, tokens)
            for row, (seen, tokens) in enumerate(zip(states.lengths, chunks, strict=True))
        ]
        if limit is not None and max(chunk.seen + len(chunk.tokens) for chunk in whole) > limit:
            return None
        self.drop_stale()
        passes: list[tuple[list[PrefillChunk], Graph]] = []
        for part in split(whole):
            for group, size in plan(part, self.rows):
                graph = self.find(size)
                if graph is None:
                    return None
                passes.append((group, graph))
        counts = list(map(len, chunks))
        states.reserve(counts)
        states.copy_shared_blocks()
        found = torch.cat([self.run(states, group, graph) for group, graph in passes])
        states.lengths = [seen + count for seen, count in zip(states.lengths, counts, strict=True)]
        read = [chunk.row for group, _ in passes for chunk in group]
        if read == list(range(len(chunks))):
            return found
        last = {row: place for place, row in enumerate(read)}  # of each row, where its last part was read
        return found.index_select(0, to_device(torch.tensor([last[row] for row in range(len(chunks))]), found.device))

    def can_capture(self) -> bool:
        if self.fits is None:
            self.fits = can_capture_prefill(self.runner.model)
        return self.fits

    # --- sizes -------------------------------------------------------------------------------------------------------

    def find(self, size: PassSize) -> Graph | None:
        """The graph that runs a pass of this size; None: there is none yet."""
        limit = self.runner.model.embed.limit
        if size.tokens * size.end > SCORES or (limit is not None and size.tokens > limit):
            return None
        self.seen[size] += 1
        held = [other for other in self.graphs if other.holds(size)]
        best = min(held, key=lambda other: other.cost, default=None)
        if best is None:
            if self.seen[size] < 2 or not self.capture(size):  # a capture costs as much as a few prefills
                return None
            best = size
        elif self.seen[size] >= REUSED and best.cost > 1.5 * size.cost and self.capture(size):
            best = size
        if best not in self.graphs:  # that capture has failed for good
            return None
        self.graphs.move_to_end(best)
        return self.graphs[best]

    def drop_stale(self) -> None:
        weights = weight_addresses(self.runner.model)
        if weights != self.weights:
            self.weights = weights
            self.graphs.clear()

    def warm_up(self, budget: int) -> None:
        """Capture the usual sizes, for batches of at most `budget` tokens."""
        if not self.enabled or not self.can_capture():
            return
        self.drop_stale()
        for size in warm_sizes(self.rows, budget, self.runner.model.embed.limit):
            if size not in self.graphs and not self.capture(size):
                return

    # --- passes ------------------------------------------------------------------------------------------------------

    def run(self, states: PagedStates, chunks: Sequence[PrefillChunk], graph: Graph) -> Tensor:
        tables = [states.block_tables[chunk.row] for chunk in chunks]
        graph.captured.run(torch.from_numpy(pack(chunks, tables, graph.size, self.pool)))
        return graph.output[: len(chunks)].clone()

    def compute(self, inputs: Tensor, size: PassSize) -> Tensor:
        """Read the tokens of a pass, without synchronizing with the host. `inputs` (rows, 2 + blocks + tokens): tokens
        seen before, new ones, block table, token ids. The same as `PagedStates` and `base.advance`, but for where
        lengths are known."""
        model, pool = self.runner.model, self.pool
        seen, counts = inputs[:, :1], inputs[:, 1:2]  # (rows, 1)
        table, tokens = inputs[:, 2:].split([blocks_of(size, pool), size.tokens], 1)
        steps = torch.arange(size.tokens, device=inputs.device)[None]
        real = steps < counts
        if size.end == size.tokens:
            layout = TokenLayout(steps, real.long(), start=0)
        else:  # padding stays at the last position, for which there is room
            layout = TokenLayout(seen + torch.minimum(steps, (counts - 1).clamp(min=0)), real.long())
        positions = layout.positions.expand(size.rows, -1)
        states = PagedStates(start(model, size.rows), pool)
        states.block_table, states.reads_past = table, size.end > size.tokens
        states.unused = torch.arange(size.end, device=inputs.device) >= seen + counts
        states.write_blocks = table.gather(1, positions // pool.size) * real
        states.write_slots = positions % pool.size
        # a start, so that the host need not know the longest row: there are positions for all
        x = model.embed(Rows(tokens), replace(layout, start=0))
        context = Context(layout, states.slot_layout(size.end), None, x, static=True)
        stack = model.run_stacks if isinstance(model, DecoderDecoderModel) else model.decoder
        hidden: Tensor = stack(x, context, states.layers)
        return hidden.take_along_dim(last_positions(layout)[..., None], 1)[:, 0]

    def capture(self, size: PassSize) -> bool:
        """False: it cannot be captured, for lack of memory or because a part synchronizes with the host."""
        try:
            self.graphs[size] = self._capture(size)
        except torch.OutOfMemoryError:
            self.seen[size] = 0
            return False
        except RuntimeError as error:  # plain prefills from now on
            self.fits = False
            self.graphs.clear()
            warnings.warn(f"prefill without CUDA graphs, since capturing one failed: {error}", stacklevel=2)
            return False
        while len(self.graphs) > KEPT:
            self.seen.pop(self.graphs.popitem(last=False)[0], None)
        return True

    def _capture(self, size: PassSize) -> Graph:
        """Capture a pass without tokens, which changes nothing but block 0."""
        device = self.runner.device
        move_constants(self.runner.model, device)
        inputs = torch.zeros(size.rows, 2 + blocks_of(size, self.pool) + size.tokens, dtype=torch.long, device=device)
        if device.type != "cuda":
            output = self.compute(inputs, size)
            return Graph(size, InputGraph(inputs, lambda: _copy(self.compute(inputs, size), output)), output)
        with torch.cuda.device(device):
            if self.memory is None:
                self.memory = torch.cuda.graph_pool_handle()
            output = torch.empty_like(self.compute(inputs, size))  # outside of the graphs' memory, which they share
            graph = capture_warm(lambda: _copy(self.compute(inputs, size), output), 0, self.memory)
            return Graph(size, InputGraph(inputs, graph.replay), output)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def blocks_of(size: PassSize, pool: BlockPool) -> int:
    return -(-size.end // pool.size)


def split(chunks: Sequence[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
    """Chunks of at most `LENGTHS[-1]` tokens, to be read one after the other; the last of each row is in the last."""
    most = LENGTHS[-1]
    parts = -(-max(len(chunk.tokens) for chunk in chunks) // most)
    for part in range(parts):
        found = []
        for row, seen, tokens in chunks:
            own = max(1, -(-len(tokens) // most))  # a row with fewer parts is read in the last ones
            at = (part - parts + own) * most
            if at >= 0:
                found.append(PrefillChunk(row, seen + at, tokens[at : at + most]))
        yield found


def plan(chunks: Sequence[PrefillChunk], rows: int) -> Iterator[tuple[list[PrefillChunk], PassSize]]:
    """Groups of similar lengths and their sizes: few passes, little padding. `rows`: the most of a pass."""
    groups: list[tuple[int, list[PrefillChunk]]] = []
    for chunk in sorted(chunks, key=lambda chunk: -len(chunk.tokens)):
        length = round_up(len(chunk.tokens), LENGTHS)
        if not groups or length < groups[-1][0]:
            groups.append((length, []))
        groups[-1][1].append(chunk)
    merged: list[tuple[int, list[PrefillChunk]]] = []
    for length, group in groups:
        if merged and len(group) * (merged[-1][0] - length) <= FLOOR:  # padding costs less than a pass
            merged[-1][1].extend(group)
        else:
            merged.append((length, group))
    for length, group in merged:
        while group:
            end = max(chunk.seen + len(chunk.tokens) for chunk in group)
            reads_past = any(chunk.seen for chunk in group)
            end = next_power(max(end, length + 1), MIN_END) if reads_past else length
            count = rows_of_pass(len(group), length, end, rows)
            yield group[:count], PassSize(round_rows(min(count, len(group))), length, end)
            group = group[count:]


def rows_of_pass(count: int, length: int, end: int, rows: int) -> int:
    """How many of `count` rows the next pass takes: all, or as many as fill it if too many would be padding."""
    most = max(1, min(round_rows(rows), TOKENS // length, SCORES // (length * end)))
    most = 1 << (most.bit_length() - 1)
    size = round_rows(count)
    while size > 1 and (round_rows(size) > most or (size * length > FLOOR and (size - count) * 4 > size)):
        size //= 2
    return min(count, size)


def round_rows(count: int) -> int:
    """1, 4, 8, 16, …: a pass of 4 short rows takes as long as one of 2."""
    return 1 if count == 1 else next_power(count, 4)


def warm_sizes(rows: int, budget: int, limit: int | None) -> list[PassSize]:
    """The sizes to capture at the start; the largest first, whose memory the others share."""
    counts = [1, *(1 << n for n in range(2, round_rows(rows).bit_length()))]
    lengths = [(length, length) for length in WARM_LENGTHS] + list(WARM_SUFFIXES)
    found = [PassSize(count, length, end) for count in counts for length, end in lengths]
    tokens = min(TOKENS, max(budget, LENGTHS[-1]))
    return sorted(
        (
            size
            for size in found
            if size.rows * size.tokens <= tokens
            and size.rows * size.tokens * size.end <= SCORES
            and (limit is None or size.tokens <= limit)
        ),
        key=lambda size: -size.cost,
    )


def round_up(length: int, steps: Sequence[int]) -> int:
    return next(step for step in steps if step >= length)


def pack(
    chunks: Sequence[PrefillChunk], tables: Sequence[Sequence[int]], size: PassSize, pool: BlockPool
) -> NDArray[np.int64]:
    """The inputs of a pass (`PagedPrefill.compute`); spare rows have no tokens."""
    blocks = blocks_of(size, pool)
    found = np.zeros((size.rows, 2 + blocks + size.tokens), dtype=np.int64)
    rows = found[: len(chunks)]
    lengths = [len(chunk.tokens) for chunk in chunks]
    rows[:, 0], rows[:, 1] = [chunk.seen for chunk in chunks], lengths
    # blocks for later parts of a prompt are not needed yet
    fill_rows(rows[:, 2 : 2 + blocks], [table[:blocks] for table in tables])
    fill_rows(rows[:, 2 + blocks :], [chunk.tokens for chunk in chunks], lengths)
    return found
