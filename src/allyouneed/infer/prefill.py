"""Prefill: the model reads sources and prompts before the first token is decoded. The engine, the scheduler, draft
models and captured CUDA graphs (cuda_graph/prefill.py) all go through `start` and `prefill`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import RequestState
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


class DecodableModel(Protocol):
    """What decoding needs of a model."""

    head: Any  # hidden states -> logits

    def start(self, source: Any) -> States:
        """`source`: rows to encode; for a model without an encoder, the number of texts."""

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor: ...


def start(model: Any, sources: Rows | int, retrieve: Callable[..., Any] | None = None) -> States:
    """States of rows that have read their sources and no prompt. `retrieve`: finds neighbours of a retrieval model."""
    states: States = model.start(sources) if retrieve is None else model.start(sources, search=retrieve)
    return states


def prefill(model: DecodableModel, states: States, tokens: Rows, bidirectional: bool = False) -> Tensor:
    """Read one chunk of each row's prompt; hidden states of the last tokens (rows, width). `bidirectional`: tokens of
    the chunk attend to each other, so that it must be the whole prompt."""
    if bidirectional:
        device, time = tokens.tokens.device, tokens.tokens.shape[1]
        lengths = torch.full((len(tokens.tokens),), time, device=device) if tokens.lengths is None else tokens.lengths
        tokens = replace(tokens, prompt=torch.arange(time, device=device) < lengths[:, None])
    return model.advance(tokens, states, last=True)[:, 0]


def share_rows(requests: Sequence[RequestState]) -> list[list[RequestState]]:
    """Requests with equal sources and prompts together: the model reads each once (`n` samples of one prompt)."""
    rows: dict[Any, list[RequestState]] = {}
    for state in requests:
        rows.setdefault(prefill_key(state), []).append(state)
    return list(rows.values())


def prefill_key(state: RequestState) -> Any:
    request = state.request
    return tuple(request.prompt), None if request.source is None else tuple(request.source)


@dataclass(eq=False)
class PrefillBatch:
    """Prompts that are being read: the requests of each row, and how many of its tokens have been read."""

    model: DecodableModel
    states: States
    rows: list[list[RequestState]]
    read: list[int]
    handed_over: bool = False  # its states became a running batch's

    @property
    def requests(self) -> list[RequestState]:
        return [state for row in self.rows for state in row]

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [row[0].request.prompt for row in self.rows]

    @property
    def unread(self) -> list[int]:
        return [len(prompt) - at for prompt, at in zip(self.prompts, self.read, strict=True)]

    def unread_tokens(self) -> Iterator[tuple[RequestState, int]]:
        """Of each request; the tokens of a row count for its first one."""
        for row, left in zip(self.rows, self.unread, strict=True):
            yield from ((state, 0 if n else left) for n, state in enumerate(row))

    def keep(self, rows: list[int]) -> None:
        if rows and len(rows) < len(self.rows):
            self.states.select(rows)
        elif not rows and not self.handed_over:
            self.states.close()
        self.rows, self.read = [self.rows[row] for row in rows], [self.read[row] for row in rows]

    def drop_cancelled(self) -> None:
        left = [[state for state in row if not state.cancelled] for row in self.rows]
        kept = [number for number, row in enumerate(left) if row]
        self.keep(kept)
        self.rows = [left[number] for number in kept]
