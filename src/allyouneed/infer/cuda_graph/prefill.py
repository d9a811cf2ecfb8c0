"""Prefill into the slots of a graph runner (runner.py), as a captured CUDA graph.

A GPU finishes a short prefill before the host has launched all its kernels, so a prefill of a size that recurs is
captured and replayed. Sizes are rounded up so that few serve all: spare rows repeat the first one, and what is behind
the end of a prompt is overwritten before it is read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.device_search import DeviceSearch
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.prefill import prefill, start
from allyouneed.nn.batch import Rows
from allyouneed.runtime.cuda.capture import can_capture_prefill
from allyouneed.runtime.cuda.graphs import capture_graph
from allyouneed.runtime.cuda.static_cache import StaticStates

MULTIPLE = 16  # lengths are rounded up to multiples of this
LONGEST = 512  # tokens of a row: longer prefills keep a GPU busy without a graph
TOKENS = 32768  # of all rows
FLOOR = 256  # tokens that take as long as fewer, since the weights have to be read in any case
KEPT = 16  # sizes whose graphs are kept
WARM_UPS = 1  # runs of a step before it is captured


class PrefillSize(NamedTuple):
    """Rows, tokens of a source (0: no source), and prompt tokens before the last one."""

    rows: int
    sources: int
    prompts: int

    @property
    def cost(self) -> int:
        return max(FLOOR, self.rows * (self.sources + self.prompts))

    def holds(self, other: PrefillSize) -> bool:
        """Whether a prefill of the other size can run as one of this size, at little more cost."""
        if bool(self.sources) != bool(other.sources) or bool(self.prompts) != bool(other.prompts):
            return False
        larger = all(own >= theirs for own, theirs in zip(self, other, strict=True))
        return larger and self.cost <= 1.5 * other.cost


class InputGraph(NamedTuple):
    """A captured graph, and the tensor on the device from which it reads its inputs."""

    inputs: Tensor
    replay: Callable[[], None]

    def run(self, inputs: Tensor) -> None:
        """Run with inputs from the host, without waiting for it."""
        self.write(inputs)
        self.launch()

    def write(self, inputs: Tensor) -> None:
        self.inputs.copy_(inputs.pin_memory() if self.inputs.is_cuda else inputs, non_blocking=True)

    def launch(self) -> None:
        self.replay()


class PrefillRunner:
    def __init__(self, model: Any, states: StaticStates, search: DeviceSearch) -> None:
        self.model, self.states, self.search = model, states, search
        self.fits, self.captures = can_capture_prefill(model), captures_on(states.device)
        self.seen: Counter[PrefillSize] = Counter()
        self.graphs: OrderedDict[PrefillSize, InputGraph] = OrderedDict()
        self.pool: Any = None  # memory of all graphs: none of it is needed after a prefill

    def run(self, requests: Sequence[RequestState], slots: Sequence[int]) -> bool:
        """Prefill requests into these slots; False: this size needs the plain prefill."""
        size = self.size(requests)
        if size is None:
            return False
        held = [other for other in self.graphs if other.holds(size)]
        size = min(held, key=lambda other: other.cost, default=size)
        self.seen[size] += 1
        if self.seen[size] < 2:  # a capture costs as much as a few prefills
            return False
        inputs = torch.from_numpy(pack_inputs(size, requests, slots))
        if not self.captures:
            self.fill_slots(inputs, size)
            return True
        if size not in self.graphs:
            try:
                self.graphs[size] = self.capture(inputs.to(self.states.device), size)
            except RuntimeError:  # a part synchronizes with the host: plain prefills from now on
                self.fits = False
                return False
            while len(self.graphs) > KEPT:
                self.seen.pop(self.graphs.popitem(last=False)[0])
        self.graphs.move_to_end(size)
        self.graphs[size].run(inputs)
        return True

    def size(self, requests: Sequence[RequestState]) -> PrefillSize | None:
        """The rounded size of these requests; None: such prefills are not captured."""
        model, rows = self.model, 1 << (len(requests) - 1).bit_length()
        source = max([len(state.request.source or ()) for state in requests])
        prompt = max([len(state.request.prompt) for state in requests]) - 1
        source_limit = (getattr(model, "source_embed", None) or model.embed).limit
        source = round_up(source, rows, self.states.source_capacity, source_limit)
        prompt = round_up(prompt, rows, self.states.capacity, model.embed.limit)
        if not self.fits or max(source, prompt) > LONGEST or rows * (source + prompt) > TOKENS or not source + prompt:
            return None
        limits = [(source_limit, source), (model.embed.limit, prompt)]
        if any(limit is not None and limit < length for limit, length in limits):
            return None
        return PrefillSize(rows, source, prompt)

    def fill_slots(self, inputs: Tensor, size: PrefillSize) -> None:
        """Prefill, and copy the states into the slots, without synchronizing with the host."""
        slots, limits, last, counts, lengths = inputs[:, :FIRST].unbind(1)
        sources, prompts = inputs[:, FIRST:].split([size.sources, size.prompts], 1)
        states = start(self.model, Rows(sources, lengths) if size.sources else size.rows)
        if size.prompts:
            prefill(self.model, states, Rows(prompts))
        self.states.load(slots, states, counts)
        self.search.reset_slots(slots, limits, last)

    def capture(self, inputs: Tensor, size: PrefillSize) -> InputGraph:
        with torch.cuda.device_of(inputs):
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            return InputGraph(inputs, capture_warm(lambda: self.fill_slots(inputs, size), 1, self.pool).replay)


FIRST = 5  # columns before the tokens: slot, limit, last token, tokens before it, tokens of the source


def pack_inputs(size: PrefillSize, requests: Sequence[RequestState], slots: Sequence[int]) -> NDArray[np.int64]:
    """All inputs of a prefill in one array (rows, FIRST + sources + prompts): one copy to the device."""
    found = np.zeros((size.rows, FIRST + size.sources + size.prompts), dtype=np.int64)
    sources = [state.request.source or () for state in requests]
    prompts = [state.request.prompt[:-1] for state in requests]
    counts, lengths = (list(map(len, texts)) for texts in (prompts, sources))
    last, limits = [state.request.prompt[-1] for state in requests], [state.limit for state in requests]
    rows = found[: len(requests)]
    rows[:, :FIRST] = np.array([slots, limits, last, counts, lengths]).T
    fill_rows(rows[:, FIRST : FIRST + size.sources], sources, lengths)
    fill_rows(rows[:, FIRST + size.sources :], prompts, counts)
    found[len(requests) :] = found[0]
    return found


def fill_rows(rows: NDArray[np.int64], texts: Sequence[Sequence[int]], lengths: Sequence[int] | None = None) -> None:
    """Write each text, of these lengths, to the start of its row."""
    lengths = list(map(len, texts)) if lengths is None else lengths
    inside = np.arange(rows.shape[1]) < np.array(lengths)[:, None]
    rows[inside] = np.fromiter(chain.from_iterable(texts), np.int64, sum(lengths))


def round_up(length: int, rows: int, capacity: int, limit: int | None) -> int:
    """To a multiple of `MULTIPLE`, and to `FLOOR` tokens of all rows as far as there are positions for them."""
    if not length:
        return 0
    free = min(FLOOR // rows, capacity, capacity if limit is None else limit) // MULTIPLE * MULTIPLE
    return max((length + MULTIPLE - 1) // MULTIPLE * MULTIPLE, free)


def captures_on(device: torch.device) -> bool:
    """Whether steps are captured there."""
    return device.type == "cuda"


def capture_warm(
    step: Callable[[], None], tries: int = WARM_UPS, pool: Any = None, reset: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    """Capture a step after running it `tries` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up(step, tries, reset)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, pool):
        step()
    return graph


def warm_up(step: Callable[[], None], tries: int = WARM_UPS, reset: Callable[[], object] | None = None) -> None:
    """Run a step, so that everything it allocates lazily exists. `reset`, before each run, is no part of it."""
    for _ in range(tries):
        if reset is not None:
            reset()
        step()
