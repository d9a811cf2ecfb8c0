"""How texts come to their seats (runner.py): what they give is read, and laid where a step looks for it.

A GPU is done with a short reading before the host has said what to read next, so a reading of a size that comes again
is captured as a CUDA graph and replayed. Sizes are rounded up so that few of them serve all: rows that nobody asked for
repeat the first one, and what stands behind the end of a prompt is overwritten before anybody looks at it.
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
from allyouneed.nn.batch import Rows
from allyouneed.runtime.cuda.capture import can_capture_prefill
from allyouneed.runtime.cuda.graphs import capture_graph
from allyouneed.runtime.cuda.static_cache import StaticStates

STEP = 16  # lengths are rounded up to multiples of this
LONGEST = 512  # tokens of a row: longer ones keep a GPU busy
TOKENS = 16384  # of all rows
KEPT = 16  # sizes that are kept ready


class Size(NamedTuple):
    """So many rows, tokens of a source (0: there is none) and tokens before the last one of a prompt."""

    rows: int
    sources: int
    prompts: int


class Graph(NamedTuple):
    given: Tensor
    replay: Callable[[], None]


class PrefillRunner:
    def __init__(self, model: Any, states: StaticStates, saying: DeviceSearch) -> None:
        self.model, self.states, self.saying = model, states, saying
        self.fits, self.captures = can_capture_prefill(model), states.device.type == "cuda"
        self.came: Counter[Size] = Counter()
        self.graphs: OrderedDict[Size, Graph] = OrderedDict()
        self.pool: Any = None  # of memory, for all graphs: nothing in it is needed after a reading

    def take(self, requests: Sequence[Any], limits: Sequence[int], seats: Sequence[int]) -> bool:
        """Read these and lay them down at these seats; False: they are to be read in the plain way."""
        size = self.size(requests)
        if size is None:
            return False
        self.came[size] += 1
        if self.came[size] < 2:  # to be captured costs as much as to be read a few times
            return False
        numbers = torch.from_numpy(numbered(size, requests, limits, seats))
        if not self.captures:
            self.lay(numbers, size)
            return True
        if size not in self.graphs:
            try:
                self.graphs[size] = self.captured(numbers.to(self.states.device), size)
            except RuntimeError:  # something in it asks the host after all: then it is read in the plain way for good
                self.fits = False
                return False
            while len(self.graphs) > KEPT:
                self.came.pop(self.graphs.popitem(last=False)[0])
        graph = self.graphs[size]
        self.graphs.move_to_end(size)
        graph.given.copy_(numbers.pin_memory() if self.states.device.type == "cuda" else numbers, non_blocking=True)
        graph.replay()
        return True

    def size(self, requests: Sequence[Any]) -> Size | None:
        """Of a reading of these; None: it is none of those that are captured."""
        source = rounded(max(len(request.source or ()) for request in requests))
        prompt = rounded(max(len(request.prompt) for request in requests) - 1)
        rows = 1 << (len(requests) - 1).bit_length()
        if not self.fits or max(source, prompt) > LONGEST or rows * (source + prompt) > TOKENS or not source + prompt:
            return None
        model = self.model
        ahead = getattr(model, "source_embed", None) or model.embed
        limits = [(ahead.limit, source), (model.embed.limit, prompt)]
        if any(limit is not None and limit < length for limit, length in limits):
            return None
        return Size(rows, source, prompt)

    def lay(self, given: Tensor, size: Size) -> None:
        """Nothing is asked of the host."""
        chairs, limits, lasts, counts, lengths = given[:, :FIRST].unbind(1)
        sources, prompts = given[:, FIRST:].split([size.sources, size.prompts], 1)
        states = self.model.start(Rows(sources, lengths) if size.sources else size.rows)
        if size.prompts:
            self.model.advance(Rows(prompts), states, last=True)
        self.states.load(self.model.decoder, chairs, states, counts)
        self.saying.reset_slots(chairs, limits, lasts)

    def captured(self, given: Tensor, size: Size) -> Graph:
        with torch.cuda.device_of(given):
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            return Graph(given, rehearsed(lambda: self.lay(given, size), 1, self.pool).replay)


FIRST = 5  # numbers before the tokens: seat, limit, last token, tokens read before it, tokens of the source


def numbered(size: Size, requests: Sequence[Any], limits: Sequence[int], seats: Sequence[int]) -> NDArray[np.int64]:
    """All that is to be known of these (rows, FIRST + sources + prompts), on its way to the device as one."""
    found = np.zeros((size.rows, FIRST + size.sources + size.prompts), dtype=np.int64)
    sources, prompts = [request.source or () for request in requests], [request.prompt[:-1] for request in requests]
    counts, lengths = (list(map(len, texts)) for texts in (prompts, sources))
    lasts = [request.prompt[-1] for request in requests]
    asked = found[: len(requests)]
    asked[:, :FIRST] = np.array([seats, limits, lasts, counts, lengths]).T
    _lay_out(asked[:, FIRST : FIRST + size.sources], sources, lengths)
    _lay_out(asked[:, FIRST + size.sources :], prompts, counts)
    found[len(requests) :] = found[0]
    return found


def _lay_out(rows: NDArray[np.int64], texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Each text from the beginning of its row on."""
    inside = np.arange(rows.shape[1]) < np.array(lengths)[:, None]
    rows[inside] = np.fromiter(chain.from_iterable(texts), np.int64, sum(lengths))


def rounded(length: int) -> int:
    return (length + STEP - 1) // STEP * STEP


def rehearsed(step: Callable[[], None], tries: int = 2, pool: Any = None) -> torch.cuda.CUDAGraph:
    """What has been tried out, so that everything it needs is there, and then is only written down."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(tries):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, pool):
        step()
    return graph
